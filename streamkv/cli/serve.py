"""`streamkv serve`: sessions over a WebSocket."""

from typing import Annotated

import typer

from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine
from streamkv.cli.options import EngineOptions, JsonOption, with_many_sessions


@with_many_sessions
def serve(
    options: EngineOptions,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="Port to listen on; 0 takes a free one.", show_default="8765"),
    ] = None,
    origin: Annotated[
        list[str] | None, typer.Option("--origin", help="Web origin that may connect; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve sessions over a WebSocket until Ctrl-C or SIGTERM.

    Everyone who reaches the address can use every session.
    """
    from streamkv.ws_server.server import ServerConfig
    from streamkv.ws_server.server import serve as serve_engine

    output = Output(as_json)
    place = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    config = ServerConfig(**place, origins=tuple(origin or ()))  # type: ignore[arg-type]

    def ready(url: str) -> None:
        output.line(f"Listening on {url} (Ctrl-C ends it; sessions resume)")
        output.json({"url": url, "model": options.model, "store": str(options.store)})

    with open_engine(options, output) as engine:
        serve_engine(engine, config.host, config.port, ready, origins=config.origins)
    output.note("Stopped; every session is saved.")

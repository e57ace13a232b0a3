"""`streamkv session export|import`: one session in one file."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from streamkv.cli.cache_view import open_source
from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine
from streamkv.cli.options import EngineOptions, JsonOption, with_engine
from streamkv.cli.progress import ProgressDisplay
from streamkv.config import format_size
from streamkv.session_export import SessionExport, export_session


@with_engine
def export(
    options: EngineOptions,
    name: Annotated[str, typer.Argument(help="The session.")],
    file: Annotated[Path, typer.Argument(help="The file to be made.")],
    all_blocks: Annotated[
        bool,
        typer.Option(
            "--all", help="With old blocks, for recall and `full`; wants the store alone."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of this name.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a session into one file: its journal, and the blocks that its resume needs.

    Without --all it needs no model and may run beside an engine.
    """
    output = Output(as_json)
    path = file.expanduser()
    with ProgressDisplay(output, f"writing {path.name}") as display:

        def show(num_done: int, total: int) -> None:
            display.update(num_done / max(total, 1), f"{num_done:,} of {total:,} blocks")

        if all_blocks:
            with open_engine(options, output) as engine:
                done = engine.export_session(
                    name, path, all_blocks=True, overwrite=force, on_progress=show
                )
        else:
            with open_source(options.store) as source:
                stored = source.format
                done = export_session(
                    options.store, name, path, source, stored, overwrite=force, on_progress=show
                )
    _show_export(done, name, path, output)


def _show_export(done: SessionExport, name: str, path: Path, output: Output) -> None:
    if done.needs_old:
        output.note(
            "It attends to old blocks, and they are not in the file: with --all they are. "
            "Elsewhere recall will do without them, and mode `full` will not go on."
        )
    if done.num_absent:
        output.note(f"{done.num_absent:,} of its old blocks are not stored any more.")
    output.line(
        f"Session {name!r} of {done.num_tokens:,} tokens is in {path}, with {done.num_blocks:,} "
        f"blocks: {format_size(done.num_bytes)}."
    )
    output.json({"session": name, "file": str(path)} | dataclasses.asdict(done))


@with_engine
def import_(
    options: EngineOptions,
    file: Annotated[Path, typer.Argument(help="A file that `session export` made.")],
    name: Annotated[
        str | None, typer.Argument(help="Name of the session; the one it had unless given.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", help="Share its blocks with this tenant, who then trusts the file."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a session of an exported one, in this store; it sleeps until it is opened."""
    output = Output(as_json)
    path = file.expanduser()
    with (
        open_engine(options, output) as engine,
        ProgressDisplay(output, f"reading {path.name}") as display,
    ):

        def show(num_done: int, total: int) -> None:
            text = f"{format_size(num_done)} of {format_size(total)}, read twice"
            display.update(num_done / max(total, 1), text)

        done = engine.import_session(path, name, tenant=tenant, on_progress=show)
    if done.num_unknown:
        output.note(f"{done.num_unknown:,} blocks of the file are no blocks of its journal.")
    output.line(
        f"Session {done.name!r} of {done.num_tokens:,} tokens came with {done.num_blocks:,} blocks."
    )
    output.json({"store": str(options.store), "file": str(path)} | dataclasses.asdict(done))

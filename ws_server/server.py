"""The WebSocket server: sockets, limits, who may connect, and a quiet end.

The model runs on the engine's own thread, so pings are answered while it computes. Every buffer of
a connection is bounded. It knows nothing of messages: `Connection` does.
"""

import asyncio
import http
import logging
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import websockets
from websockets.asyncio.server import Server as SocketServer
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from streamkv.config import require_int
from streamkv.errors import ConfigError, ServerError
from streamkv.ws_server.connection import Connection
from streamkv.ws_server.engine_api import ServedEngine
from streamkv.ws_server.protocol import MAX_MESSAGE_BYTES

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8765
_LOG = logging.getLogger("streamkv.ws_server")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_KERNEL_SEND_BYTES = 64 * 1024
_WRITE_LIMIT_BYTES = 32 * 1024
_MAX_UNSENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of a server.

    Attributes:
        host: address to listen on. Everyone who reaches it can use every session.
        port: port to listen on; 0 takes a free one.
        origins: web origins, such as `https://chat.example`, whose pages may connect besides the
            server's own. Clients that are not browsers send none and may connect.
        ping_interval_s: seconds between pings.
        ping_timeout_s: seconds without an answer to a ping after which a client counts as gone. A
            client that stops reading for longer is dropped; its session can be opened again.
        drain_timeout_s: seconds that clients get to take their last messages when the server ends.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    origins: tuple[str, ...] = ()
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 60.0
    drain_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        require_int("port", self.port, 0, 65535)
        if not self.host:
            raise ConfigError("host", self.host, "empty", f'Use "{DEFAULT_HOST}" or an address.')
        for name in ("ping_interval_s", "ping_timeout_s", "drain_timeout_s"):
            seconds = getattr(self, name)
            if not seconds > 0:
                raise ConfigError(name, seconds, "out of range", "Use a number above 0.")


class _BoundedConnection(ServerConnection):
    """Drops a client that makes the library itself queue answers (to pings) and reads none."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.transport.abort()


class Server:
    """A running server: an async context manager that drains when it is left.

    Args:
        engine: serves the sessions; it stays open when the server ends.
        config: options.

    Raises:
        ServerError: on entering, when the address cannot be listened on.
    """

    def __init__(self, engine: ServedEngine, config: ServerConfig | None = None) -> None:
        self._engine = engine
        self._config = config or ServerConfig()
        self._connections: set[Connection] = set()
        self._open_names: set[str] = set()
        self._server: SocketServer | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "the server is not running"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where clients connect."""
        host = self._config.host
        return f"ws://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Self:
        config = self._config
        # The library logs the frames of a conversation at debug level.
        logger = logging.getLogger("streamkv.ws_server.socket")
        logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))
        if config.host not in (*_LOOPBACK, "::1"):
            _LOG.warning("whoever reaches host %s can use every session", config.host)
        try:
            self._server = await websockets.serve(
                self._handle,
                config.host,
                config.port,
                process_request=self._check_origin,
                compression=None,
                max_size=MAX_MESSAGE_BYTES,
                max_queue=4,
                write_limit=_WRITE_LIMIT_BYTES,
                ping_interval=config.ping_interval_s,
                ping_timeout=config.ping_timeout_s,
                close_timeout=config.drain_timeout_s,
                create_connection=_BoundedConnection,
                logger=logger,
            )
        except OSError as error:
            raise ServerError(
                f"Cannot listen on host={config.host!r}, port={config.port}: {error}. "
                "Use another port (0 takes a free one) or another host."
            ) from error
        for listener in self._server.sockets:
            # Accepted sockets inherit it. What the kernel buffers, the model has already computed.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_SEND_BYTES)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop every turn at a token, tell every client, close every session. Idempotent."""
        assert self._server is not None, "the server is not running"
        self._server.close(close_connections=False)
        drains = [asyncio.create_task(connection.drain()) for connection in self._connections]
        if drains:
            await asyncio.wait(drains, timeout=self._config.drain_timeout_s)
            for connection in self._connections:
                connection.abort()
            await asyncio.wait(drains)
        await self._server.wait_closed()

    async def _handle(self, websocket: ServerConnection) -> None:
        connection = Connection(websocket, self._engine, self._open_names)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    def _check_origin(self, websocket: ServerConnection, request: Request) -> Response | None:
        origins = request.headers.get_all("Origin")
        hosts = (*_LOOPBACK, self._config.host)
        own = {f"http://{host}:{self.port}" for host in hosts}
        if all(origin in own or origin in self._config.origins for origin in origins):
            return None
        return websocket.respond(
            http.HTTPStatus.FORBIDDEN,
            "Pages of this origin may not connect. Start the server with it among its origins.\n",
        )


async def aserve(
    engine: ServedEngine,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    ready: Callable[[str], None] | None = None,
    *,
    origins: tuple[str, ...] = (),
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT arrives (in the main thread) or `stop` is set, then drain.

    Args:
        engine: serves the sessions; stays open.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        ready: called with the URL once clients can connect.
        origins: web origins that may connect besides the server's own.
        stop: ends the server when set.

    Raises:
        ConfigError: a bad option.
        ServerError: the address cannot be listened on.
    """
    stop = stop or asyncio.Event()
    config = ServerConfig(host=host, port=port, origins=origins)
    with _StopOnSignals(stop):
        async with Server(engine, config) as server:
            if ready is not None:
                ready(server.url)
            await stop.wait()
            _LOG.info("draining")


def serve(
    engine: ServedEngine,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    ready: Callable[[str], None] | None = None,
    *,
    origins: tuple[str, ...] = (),
) -> None:
    """`aserve` for callers without an event loop: returns when the server has drained."""
    asyncio.run(aserve(engine, host, port, ready, origins=origins))


class _StopOnSignals:
    """Sets an event at the first SIGTERM or SIGINT; a second one acts as usual."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._signals = [signal.SIGTERM, signal.SIGINT] if in_main_thread else []

    def __enter__(self) -> None:
        for number in self._signals:
            self._loop.add_signal_handler(number, self._receive)

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self) -> None:
        self._restore()
        self._stop.set()

    def _restore(self) -> None:
        for number in self._signals:
            self._loop.remove_signal_handler(number)
        self._signals = []

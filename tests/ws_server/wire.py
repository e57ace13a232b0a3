"""Raw sockets that speak the protocol as its page describes it, without streamkv's own client."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from streamkv.ws_server.server import Server


class Wire:
    """One connection to a server under test."""

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.websocket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self.websocket.recv())
        return message

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        await self.send(kind, **fields)
        return await self.receive()

    async def open(self, session: str, **fields: Any) -> dict[str, Any]:
        return await self.ask("open", version=1, session=session, **fields)

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Messages up to and with the first of one of these kinds."""
        messages = [await self.receive()]
        while messages[-1]["type"] not in kinds:
            messages.append(await self.receive())
        return messages


@asynccontextmanager
async def wire(server: Server, **options: Any) -> AsyncIterator[Wire]:
    """A connection to `server`; `options` are those of the websockets library."""
    async with connect(server.url, proxy=None, **options) as websocket:
        yield Wire(websocket)


@asynccontextmanager
async def deaf_wire(server: Server) -> AsyncIterator[Wire]:
    """A connection whose client stops reading when 8 KiB have come."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.setblocking(True)
        sock.connect(("127.0.0.1", server.port))
        async with wire(server, sock=sock, max_queue=1, close_timeout=0.1) as connected:
            yield connected

"""One client: its session, and one request at a time on it.

Two tasks: the reader (`run`) answers at once what is quick, and so always sees a cancel; a `Turn`
does what takes a while. Both await every send, so a client that does not read stops them and
nothing piles up. The session is released when the client is gone *and* the turn has stopped,
however the client left.
"""

import asyncio
import dataclasses
import logging

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from streamkv.errors import StreamKVError
from streamkv.ws_server.engine_api import ServedEngine, ServedSession
from streamkv.ws_server.fields import MessageError
from streamkv.ws_server.messages import (
    Cancel,
    ClientMessage,
    Close,
    Delete,
    Done,
    DoneReason,
    ErrorCode,
    GoingAway,
    Open,
    Opened,
    RequestId,
    ServerMessage,
    Stats,
    StatsReply,
)
from streamkv.ws_server.protocol import encode, parse_client
from streamkv.ws_server.replies import Refused, error_reply
from streamkv.ws_server.turn import Turn

_LOG = logging.getLogger("streamkv.ws_server")


class Connection:
    """Serves one socket.

    Args:
        socket: an open WebSocket.
        engine: where sessions come from.
        open_names: names of the sessions that connections of this server hold; shared by them.
    """

    def __init__(
        self, socket: ServerConnection, engine: ServedEngine, open_names: set[str]
    ) -> None:
        self._socket = socket
        self._engine = engine
        self._open_names = open_names
        self._name: str | None = None
        self._session: ServedSession | None = None
        self._last_seq = -1
        self._turn: Turn | None = None
        self._turn_task: asyncio.Task[None] | None = None
        self._is_draining = False

    async def run(self) -> None:
        """Answer messages until the client leaves or the server drains."""
        try:
            async for frame in self._socket:
                await self._answer(frame)
        except ConnectionClosed:
            pass
        finally:
            await self._stop_turn(DoneReason.CANCELLED)
            await self._release()

    async def drain(self) -> None:
        """Stop the turn at a token, say where the session stands, close."""
        self._is_draining = True
        await self._stop_turn(DoneReason.GOING_AWAY)
        try:
            await self._send(await self._goodbye())
        except ConnectionClosed:
            return
        await self._socket.close(1001, "going away")

    def abort(self) -> None:
        """Drop the socket without a word; a send that waits for the client fails at once."""
        self._socket.transport.abort()

    async def _goodbye(self) -> GoingAway:
        if self._session is None:
            return GoingAway()
        try:
            stats = await asyncio.to_thread(self._session.stats)
        except StreamKVError:
            return GoingAway(self._name)
        return GoingAway(self._name, stats.num_tokens, stats.text_chars)

    async def _send(self, message: ServerMessage) -> None:
        await self._socket.send(encode(message))

    async def _answer(self, frame: str | bytes) -> None:
        request_id: RequestId | None = None
        try:
            message = parse_client(frame)
            request_id = message.id
            await self._dispatch(message)
        except ConnectionClosed:
            raise
        except MessageError as error:
            await self._send(error_reply(error, error.request_id))
        except StreamKVError as error:
            await self._send(error_reply(error, request_id))
        except Exception as error:
            _LOG.exception("a request failed")
            await self._send(error_reply(error, request_id))

    async def _dispatch(self, message: ClientMessage) -> None:
        if isinstance(message, Cancel):
            if self._turn is not None:
                self._turn.stop(DoneReason.CANCELLED)
        elif self._is_draining:
            raise Refused(ErrorCode.GOING_AWAY)
        elif isinstance(message, Open):
            await self._open(message)
        elif self._session is None:
            raise Refused(ErrorCode.NOT_OPEN)
        elif isinstance(message, Stats):
            stats = await asyncio.to_thread(self._session.stats)
            await self._send(StatsReply(message.id, dataclasses.asdict(stats)))
        elif self._turn is not None and not self._turn.is_over:
            raise Refused(ErrorCode.BUSY)
        elif isinstance(message, Close):
            await self._release()
            await self._send(Done(message.id, DoneReason.CLOSED))
        elif isinstance(message, Delete):
            await self._session.adelete()
            await self._release()
            await self._send(Done(message.id, DoneReason.DELETED))
        else:
            await self._start(Turn(message, self._session, self._send, self._number))

    async def _start(self, turn: Turn) -> None:
        if self._turn_task is not None:
            # It is over, and at most still sending its last message.
            await self._turn_task
        self._turn = turn
        self._turn_task = asyncio.create_task(turn.run())

    async def _stop_turn(self, reason: DoneReason) -> None:
        if self._turn is not None and self._turn_task is not None:
            self._turn.stop(reason)
            await self._turn_task

    def _number(self, token_index: int) -> int:
        # At most two deltas end at one token (its own, and a flush of held-back text), so numbers
        # made from the token's index grow over a restart without being stored.
        self._last_seq = max(self._last_seq + 1, 2 * token_index)
        return self._last_seq

    async def _open(self, message: Open) -> None:
        if self._session is not None:
            raise Refused(ErrorCode.ALREADY_OPEN)
        if message.session in self._open_names:
            raise Refused(ErrorCode.SESSION_IN_USE)
        self._open_names.add(message.session)
        self._name = message.session
        try:
            opened = await asyncio.to_thread(self._open_session, message)
        except BaseException:
            await self._release()
            raise
        self._last_seq = 2 * opened.token_index - 1
        await self._send(opened)

    def _open_session(self, message: Open) -> Opened:
        self._session = self._engine.session(message.session, system=message.system)
        stats = self._session.stats()
        return Opened(
            message.id,
            message.session,
            stats.num_tokens,
            stats.text_chars,
            self._session.resumed,
            self._engine.model_name,
        )

    async def _release(self) -> None:
        session, name = self._session, self._name
        self._session = self._name = None
        try:
            if session is not None:
                await session.aclose()
        finally:
            if name is not None:
                self._open_names.discard(name)

"""The asynchronous twin of `client`: the same methods, awaited; the same rules.

An iterator that is left early is cancelled when it is closed (`aclose`) or before the next request.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Self, cast

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import ConnectionClosed, WebSocketException

from streamkv.errors import ServerError
from streamkv.ws_server.dialogue import (
    Dialogue,
    accept,
    accept_step,
    feed_messages,
    frame_of,
    is_cut_short,
    socket_options,
    unreachable,
)
from streamkv.ws_server.messages import (
    Cancel,
    ClientMessage,
    Close,
    Delete,
    Done,
    ErrorReply,
    Feed,
    FeedProgress,
    Generate,
    Open,
    Opened,
    RequestId,
    Say,
    ServerMessage,
    Stats,
    StatsReply,
    TextDelta,
)

_TurnMessage = Say | Generate | Feed


async def aconnect(url: str) -> "AsyncClient":
    """Connect to a server, such as `ws://127.0.0.1:8765`.

    Raises:
        ServerError: nobody answers there, or not as a streamkv server.
    """
    try:
        return AsyncClient(await connect_socket(url, **socket_options(url)))
    except (OSError, WebSocketException, TimeoutError) as error:
        raise unreachable(url, error) from error


class AsyncClient:
    """One connection; an async context manager. See `client.Client`.

    Attributes:
        last_done: how the last turn ended: reason, usage, timings.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._dialogue = Dialogue()
        self._turn: AsyncGenerator[Any, None] | None = None
        self._settling = asyncio.Lock()
        self.last_done: Done | None = None

    async def open(self, session: str, *, system: str | None = None) -> Opened:
        """Create or resume a session; `system` is the system prompt of a new one."""
        await self._settle()
        return cast(Opened, await self._ask(Open(self._dialogue.new_id(), session, system=system)))

    def say(
        self, text: str, *, token_ids: bool = False, **params: Any
    ) -> AsyncGenerator[TextDelta, None]:
        """Say a text and iterate over the answer. `params`: fields of `SamplingParams`."""
        return self._run(_once(Say(self._dialogue.new_id(), text, params, token_ids)))

    def generate(
        self, *, token_ids: bool = False, **params: Any
    ) -> AsyncGenerator[TextDelta, None]:
        """Let the model go on where the stream stands."""
        return self._run(_once(Generate(self._dialogue.new_id(), params, token_ids)))

    def feed(
        self, items: str | Iterable[str | list[int]] | AsyncIterable[str | list[int]]
    ) -> AsyncGenerator[FeedProgress, None]:
        """Let the session read text or token ids of any length; items are taken when needed."""
        return self._run(self._feed_messages(items))

    async def cancel(self) -> None:
        """Ask the server to end the turn in progress; its iterator then ends."""
        await self._send(Cancel(None))

    async def stats(self) -> dict[str, Any]:
        """Where the session stands: the fields of `SessionStats`. Also between two deltas."""
        return cast(StatsReply, await self._ask(Stats(self._dialogue.new_id()))).stats

    async def delete(self) -> None:
        """Forget the session for good."""
        await self._settle()
        await self._ask(Delete(self._dialogue.new_id()))

    async def leave(self) -> None:
        """Leave the session, which keeps; then another can be opened."""
        await self._settle()
        await self._ask(Close(self._dialogue.new_id()))

    async def close(self) -> None:
        """Leave the server. Idempotent."""
        await self._socket.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _feed_messages(
        self, items: str | Iterable[str | list[int]] | AsyncIterable[str | list[int]]
    ) -> AsyncIterator[Feed]:
        if isinstance(items, AsyncIterable):
            async for item in items:
                for piece in feed_messages(self._dialogue, item):
                    yield piece
        else:
            for item in [items] if isinstance(items, str) else items:
                for piece in feed_messages(self._dialogue, item):
                    yield piece

    async def _settle(self, only: AsyncGenerator[Any, None] | None = None) -> None:
        # An iterator that was dropped is closed by a task of the event loop: both may come here.
        async with self._settling:
            if self._turn is None or (only is not None and only is not self._turn):
                return
            turn, self._turn = self._turn, None
            await turn.aclose()

    async def _run(self, messages: AsyncIterator[_TurnMessage]) -> AsyncGenerator[Any, None]:
        await self._settle()
        turn = self._exchange(messages)
        self._turn = turn
        try:
            async for step in turn:
                yield step
        finally:
            await self._settle(turn)

    async def _exchange(self, messages: AsyncIterator[_TurnMessage]) -> AsyncGenerator[Any, None]:
        async for message in messages:
            self._dialogue.begin_turn(message.id)
            await self._send(message)
            step: TextDelta | FeedProgress | Done | None = None
            is_answered = False
            try:
                while not isinstance(step, Done):
                    reply = await self._receive(message.id)
                    is_answered = isinstance(reply, Done | ErrorReply)
                    step = accept_step(reply)
                    if not isinstance(step, Done):
                        yield step
            finally:
                if not is_answered:
                    await self._abandon(message.id)
            self.last_done = step
            if is_cut_short(step):
                return

    async def _abandon(self, request_id: RequestId | None) -> None:
        try:
            await self.cancel()
            while not isinstance(await self._receive(request_id), Done | ErrorReply):
                pass
        except ServerError:
            return

    async def _ask(self, message: ClientMessage) -> ServerMessage:
        await self._send(message)
        return accept(await self._receive(message.id))

    async def _send(self, message: ClientMessage) -> None:
        frame = frame_of(message)
        try:
            await self._socket.send(frame)
        except ConnectionClosed as error:
            raise self._dialogue.lost(error) from error

    async def _receive(self, request_id: RequestId | None) -> ServerMessage:
        message = self._dialogue.take_early(request_id)
        while message is None:
            try:
                frame = await self._socket.recv()
            except ConnectionClosed as error:
                raise self._dialogue.lost(error) from error
            message = self._dialogue.receive(frame, request_id)
        return message


async def _once(message: _TurnMessage) -> AsyncIterator[_TurnMessage]:
    yield message

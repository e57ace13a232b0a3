"""A synchronous client of the token stream.

It holds one session and one request at a time. Iterators are lazy: the first `next` sends the
request, and one that is left early is cancelled, at the latest before the next request. A client
that does not iterate does not read, so the server stops computing for it. It does not reconnect:
after a lost connection (`ServerError`) a new client can open the same session again.
"""

import weakref
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, cast

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from streamkv.errors import ServerError
from streamkv.ws_server.dialogue import (
    Dialogue,
    RemoteError,
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

__all__ = ["Client", "RemoteError", "connect"]


def connect(url: str) -> "Client":
    """Connect to a server, such as `ws://127.0.0.1:8765`.

    Raises:
        ServerError: nobody answers there, or not as a streamkv server.
    """
    with ExitStack() as stack:
        try:
            socket = stack.enter_context(connect_socket(url, **socket_options(url)))
        except (OSError, WebSocketException, TimeoutError) as error:
            raise unreachable(url, error) from error
        return Client(socket, stack.pop_all())


class Client:
    """One connection; a context manager.

    Methods that talk to the server raise `RemoteError` when it refuses, `ServerError` when the
    connection is lost.

    Attributes:
        last_done: how the last turn ended: reason, usage, timings.
    """

    def __init__(self, socket: ClientConnection, owner: ExitStack) -> None:
        self._socket = socket
        self._owner = owner
        self._dialogue = Dialogue()
        self._turn: weakref.ref[Generator[Any, None, None]] | None = None
        self.last_done: Done | None = None

    def open(self, session: str, *, system: str | None = None) -> Opened:
        """Create or resume a session; `system` is the system prompt of a new one."""
        self._settle()
        return cast(Opened, self._ask(Open(self._dialogue.new_id(), session, system=system)))

    def say(
        self, text: str, *, token_ids: bool = False, **params: Any
    ) -> Generator[TextDelta, None, None]:
        """Say a text and iterate over the answer. `params`: fields of `SamplingParams`."""
        message = Say(self._dialogue.new_id(), text, params, token_ids)
        return cast("Generator[TextDelta, None, None]", self._start([message]))

    def generate(
        self, *, token_ids: bool = False, **params: Any
    ) -> Generator[TextDelta, None, None]:
        """Let the model go on where the stream stands."""
        message = Generate(self._dialogue.new_id(), params, token_ids)
        return cast("Generator[TextDelta, None, None]", self._start([message]))

    def feed(self, items: str | Iterable[str | list[int]]) -> Generator[FeedProgress, None, None]:
        """Let the session read text or token ids of any length, taken when needed."""
        texts = [items] if isinstance(items, str) else items
        messages = (piece for item in texts for piece in feed_messages(self._dialogue, item))
        return cast("Generator[FeedProgress, None, None]", self._start(messages))

    def cancel(self) -> None:
        """Ask the server to end the turn in progress; its iterator then ends. Thread-safe."""
        self._send(Cancel(None))

    def stats(self) -> dict[str, Any]:
        """Where the session stands: the fields of `SessionStats`. Also between two deltas."""
        return cast(StatsReply, self._ask(Stats(self._dialogue.new_id()))).stats

    def delete(self) -> None:
        """Forget the session for good."""
        self._settle()
        self._ask(Delete(self._dialogue.new_id()))

    def leave(self) -> None:
        """Leave the session, which keeps; then another can be opened."""
        self._settle()
        self._ask(Close(self._dialogue.new_id()))

    def close(self) -> None:
        """Leave the server. Idempotent."""
        self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, messages: Iterable[Say | Generate | Feed]) -> Generator[Any, None, None]:
        self._settle()
        turn = self._run(messages)
        # Weak: a loop that is left drops the last reference, and so cancels at once.
        self._turn = weakref.ref(turn)
        return turn

    def _settle(self) -> None:
        turn = self._turn() if self._turn is not None else None
        if turn is not None:
            turn.close()
        self._turn = None

    def _run(self, messages: Iterable[Say | Generate | Feed]) -> Generator[Any, None, None]:
        for message in messages:
            self._dialogue.begin_turn(message.id)
            self._send(message)
            step: TextDelta | FeedProgress | Done | None = None
            is_answered = False
            try:
                while not isinstance(step, Done):
                    reply = self._receive(message.id)
                    is_answered = isinstance(reply, Done | ErrorReply)
                    step = accept_step(reply)
                    if not isinstance(step, Done):
                        yield step
            finally:
                if not is_answered:
                    self._abandon(message.id)
            self.last_done = step
            if is_cut_short(step):
                return

    def _abandon(self, request_id: RequestId | None) -> None:
        try:
            self.cancel()
            while not isinstance(self._receive(request_id), Done | ErrorReply):
                pass
        except ServerError:
            return

    def _ask(self, message: ClientMessage) -> ServerMessage:
        self._send(message)
        return accept(self._receive(message.id))

    def _send(self, message: ClientMessage) -> None:
        frame = frame_of(message)
        try:
            self._socket.send(frame)
        except ConnectionClosed as error:
            raise self._dialogue.lost(error) from error

    def _receive(self, request_id: RequestId | None) -> ServerMessage:
        message = self._dialogue.take_early(request_id)
        while message is None:
            try:
                frame = self._socket.recv()
            except ConnectionClosed as error:
                raise self._dialogue.lost(error) from error
            message = self._dialogue.receive(frame, request_id)
        return message

"""A client's side of the protocol without I/O: ids, cutting of long input, replies out of turn.

The two clients are thin shells around it: they move frames and wait.
"""

import ipaddress
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from streamkv.errors import InputError, ServerError
from streamkv.ws_server.messages import (
    ClientMessage,
    Done,
    DoneReason,
    ErrorCode,
    ErrorReply,
    Feed,
    FeedProgress,
    GoingAway,
    RequestId,
    ServerMessage,
    TextDelta,
)
from streamkv.ws_server.protocol import MAX_MESSAGE_BYTES, encode, parse_server

FEED_CHARS = 64 * 1024
FEED_IDS = 64 * 1024


class RemoteError(ServerError):
    """The server refused a request or failed on it.

    Attributes:
        code: stable name of what went wrong.
        message: what happened.
        remedy: what to do.
        field: the field of the request that is wrong, if it is one.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(f"{reply.message} {reply.remedy} [{reply.code.value}]")
        self.code: ErrorCode = reply.code
        self.message = reply.message
        self.remedy = reply.remedy
        self.field = reply.field


class Dialogue:
    """Matches replies to requests; keeps those to the turn while another reply is awaited."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._early: deque[ServerMessage] = deque()
        self._turn_id: RequestId | None = None
        self.going_away: GoingAway | None = None

    def new_id(self) -> int:
        """An id for a request."""
        return next(self._ids)

    def begin_turn(self, request_id: RequestId | None) -> None:
        """From now on, replies to `request_id` are kept when another is awaited."""
        self._turn_id = request_id
        self._early.clear()

    def take_early(self, request_id: RequestId | None) -> ServerMessage | None:
        """The first reply to the turn that was received while another was awaited."""
        return self._early.popleft() if self._early and request_id == self._turn_id else None

    def receive(self, frame: str | bytes, request_id: RequestId | None) -> ServerMessage | None:
        """The message in a frame if it answers `request_id`, else `None`."""
        message = parse_server(frame)
        if isinstance(message, GoingAway):
            self.going_away = message
        elif message is not None and message.id in (request_id, None):
            return message
        elif message is not None and message.id == self._turn_id:
            self._early.append(message)
        return None

    def lost(self, error: ConnectionClosed) -> ServerError:
        """What a caller is told when the socket is gone."""
        # The close may be seen before the message that announces it was read.
        says_so = error.rcvd is not None and error.rcvd.code == CloseCode.GOING_AWAY
        is_ending = self.going_away or says_so
        why = "The server is shutting down" if is_ending else "The connection was lost"
        return ServerError(f"{why} ({error}). Connect again and open the session: it resumes.")


def frame_of(message: ClientMessage) -> str:
    """The frame of a request, checked before it is sent: a bad one would cost the connection.

    Raises:
        InputError: invalid Unicode, an option that JSON does not know, or too long.
    """
    try:
        frame = encode(message)
        num_bytes = len(frame.encode())
    except UnicodeEncodeError as error:
        problem, remedy = "invalid Unicode", "Remove the lone surrogates."
        raise InputError(message.type, error.object[:40], problem, remedy) from error
    except (TypeError, ValueError) as error:
        remedy = "Use numbers, texts, true, false and flat lists."
        raise InputError(message.type, "...", f"not JSON: {error}", remedy) from error
    if num_bytes > MAX_MESSAGE_BYTES:
        remedy = f"Send at most {MAX_MESSAGE_BYTES} bytes at once, or feed it: a feed is cut."
        raise InputError(message.type, f"<{num_bytes} bytes>", "too long", remedy)
    return frame


def accept(reply: ServerMessage) -> ServerMessage:
    """`reply`, unless it is an error.

    Raises:
        RemoteError: it is one.
    """
    if isinstance(reply, ErrorReply):
        raise RemoteError(reply)
    return reply


def accept_step(reply: ServerMessage) -> TextDelta | FeedProgress | Done:
    """A reply to a turn.

    Raises:
        RemoteError: the turn failed.
        ServerError: the server answered something else.
    """
    step = accept(reply)
    if not isinstance(step, TextDelta | FeedProgress | Done):
        raise ServerError(f"The server answered a turn with {step.type!r}. Check the URL.")
    return step


def is_cut_short(done: Done) -> bool:
    """Whether the rest of a feed is not to be sent."""
    return done.reason in (DoneReason.CANCELLED, DoneReason.GOING_AWAY)


def feed_messages(dialogue: Dialogue, item: str | list[int]) -> Iterator[Feed]:
    """Messages that feed `item`; how input is cut makes no difference to a session.

    Raises:
        InputError: it is neither text nor token ids.
    """
    if not isinstance(item, str | list):
        raise InputError("items", item, "neither text nor token ids", "Give str or list[int].")
    if isinstance(item, str):
        for start in range(0, len(item), FEED_CHARS):
            yield Feed(dialogue.new_id(), text=item[start : start + FEED_CHARS])
    else:
        for start in range(0, len(item), FEED_IDS):
            yield Feed(dialogue.new_id(), ids=item[start : start + FEED_IDS])


def socket_options(url: str) -> dict[str, Any]:
    """Options of the library's `connect`, for both clients."""
    return {
        "compression": None,
        "max_size": MAX_MESSAGE_BYTES,
        "max_queue": 4,
        # Longer than the library's own: a caller may take its time between two deltas.
        "ping_timeout": 60.0,
        "proxy": None if _is_loopback(urlsplit(url).hostname) else True,
    }


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def unreachable(url: str, error: Exception) -> ServerError:
    """What a caller is told when no connection came about."""
    return ServerError(
        f"Cannot connect to url={url!r}: {error}. Check the URL, or start `streamkv serve` there."
    )

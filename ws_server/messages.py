"""The messages of the token stream, as plain data. `docs/protocol.md` says what each one means.

A request carries an `id` that the client chose, and every reply carries the id of what it answers.
This module knows no JSON and no sockets.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

VERSION = 1
RequestId = str | int


class ErrorCode(Enum):
    """Stable names of what can go wrong. Clients may compare them; texts may change."""

    BAD_JSON = "bad_json"
    BAD_MESSAGE = "bad_message"
    UNKNOWN_TYPE = "unknown_type"
    UNSUPPORTED_VERSION = "unsupported_version"
    NOT_OPEN = "not_open"
    ALREADY_OPEN = "already_open"
    SESSION_IN_USE = "session_in_use"
    BUSY = "busy"
    BAD_INPUT = "bad_input"
    BAD_OPTION = "bad_option"
    SESSION_STATE = "session_state"
    OUT_OF_ROOM = "out_of_room"
    STORAGE = "storage"
    GOING_AWAY = "going_away"
    INTERNAL = "internal"


class DoneReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    GOING_AWAY = "going_away"
    FED = "fed"
    CLOSED = "closed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Open:
    """Create a session or resume it; `system` is its system prompt when it is created."""

    type: ClassVar[str] = "open"
    id: RequestId | None
    session: str
    version: int = VERSION
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """Let the model go on. `params` are fields of `SamplingParams`."""

    type: ClassVar[str] = "generate"
    id: RequestId | None
    params: dict[str, Any] = field(default_factory=dict)
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Say:
    """One turn: the user's text, then the model's answer."""

    type: ClassVar[str] = "say"
    id: RequestId | None
    text: str
    params: dict[str, Any] = field(default_factory=dict)
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Feed:
    """Text or token ids (exactly one of the two) that the model only reads."""

    type: ClassVar[str] = "feed"
    id: RequestId | None
    text: str | None = None
    ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the request in progress. Its own `done` is the answer."""

    type: ClassVar[str] = "cancel"
    id: RequestId | None


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask where the session stands."""

    type: ClassVar[str] = "stats"
    id: RequestId | None


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget the session for good."""

    type: ClassVar[str] = "delete"
    id: RequestId | None


@dataclass(frozen=True, slots=True)
class Close:
    """Leave the session; it can be opened again."""

    type: ClassVar[str] = "close"
    id: RequestId | None


ClientMessage = Open | Say | Generate | Feed | Cancel | Stats | Delete | Close


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is open: tokens in its stream, characters of text it has accepted."""

    type: ClassVar[str] = "opened"
    id: RequestId | None
    session: str
    token_index: int
    text_chars: int
    resumed: bool
    model: str
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text. `seq` grows with every delta of a session, over connections and restarts too."""

    type: ClassVar[str] = "delta"
    id: RequestId | None
    seq: int
    text: str
    token_index: int
    token_id: int | None = None
    logprob: float | None = None
    top: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """How far a feed has come."""

    type: ClassVar[str] = "progress"
    id: RequestId | None
    num_tokens: int
    token_index: int
    text_chars: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request put into the stream, and of these what the model wrote."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the request to its end, and to its first delta (`None`: there was none)."""

    total_s: float
    first_delta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A request ended well. The numbers are absent after `closed` and `deleted`."""

    type: ClassVar[str] = "done"
    id: RequestId | None
    reason: DoneReason
    token_index: int | None = None
    text_chars: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The fields of `streamkv.outputs.SessionStats`."""

    type: ClassVar[str] = "stats"
    id: RequestId | None
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A request failed or was refused. `field` names what is wrong in it, if one thing is."""

    type: ClassVar[str] = "error"
    id: RequestId | None
    code: ErrorCode
    message: str
    remedy: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The server ends. Open `session` again later: it stands at `token_index`, `text_chars`."""

    type: ClassVar[str] = "going_away"
    session: str | None = None
    token_index: int | None = None
    text_chars: int | None = None


ServerMessage = Opened | TextDelta | FeedProgress | Done | StatsReply | ErrorReply | GoingAway

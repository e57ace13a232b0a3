"""The wire format: one JSON object per text frame. Sans-I/O: text in, messages out, and back.

What a client sends is not trusted: every field is checked for presence, type and size, and a field
or type that does not exist is refused. What the server sends is trusted: a client skips types and
fields it does not know, so that a newer server may say more. Nothing here knows sockets or
sessions.
"""

import dataclasses
import json
from enum import Enum
from typing import Any

from streamkv.errors import ServerError
from streamkv.ws_server.fields import Fields, MessageError
from streamkv.ws_server.messages import (
    Cancel,
    ClientMessage,
    Close,
    Delete,
    Done,
    DoneReason,
    ErrorCode,
    ErrorReply,
    FeedProgress,
    Generate,
    GoingAway,
    Open,
    Opened,
    Say,
    ServerMessage,
    Stats,
    StatsReply,
    TextDelta,
    Timings,
    Usage,
)

MAX_MESSAGE_BYTES = 1 << 20
_TYPES = ("open", "say", "generate", "feed", "cancel", "stats", "delete", "close")


def parse_client(frame: str | bytes) -> ClientMessage:
    """Check one frame from a client.

    Raises:
        MessageError: it is not a message of this protocol.
    """
    fields = Fields(_read_object(frame))
    kind = fields.take("type", str)
    match kind:
        case "open":
            # The version comes first: another version may have other fields.
            version = fields.version()
            message: ClientMessage = Open(
                fields.id, fields.name("session"), version, fields.text("system", None)
            )
        case "say":
            message = Say(fields.id, fields.text("text"), fields.params(), fields.flag("token_ids"))
        case "generate":
            message = Generate(fields.id, fields.params(), fields.flag("token_ids"))
        case "feed":
            message = fields.feed()
        case "cancel":
            message = Cancel(fields.id)
        case "stats":
            message = Stats(fields.id)
        case "delete":
            message = Delete(fields.id)
        case "close":
            message = Close(fields.id)
        case _:
            known = f"Use one of {', '.join(_TYPES)}."
            raise fields.error("type", kind, "no such type", known, ErrorCode.UNKNOWN_TYPE)
    fields.end(kind)
    return message


def _read_object(frame: str | bytes) -> dict[str, Any]:
    if isinstance(frame, bytes):
        raise _bad_frame(f"<{len(frame)} bytes>", "a binary frame", ErrorCode.BAD_MESSAGE)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise _bad_frame(f"<{len(frame)} characters>", "too long", ErrorCode.BAD_MESSAGE)
    try:
        value = json.loads(frame, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except MessageError:
        raise
    except RecursionError as error:
        raise _bad_frame(frame, "nested too deeply", ErrorCode.BAD_JSON) from error
    except ValueError as error:
        raise _bad_frame(frame, f"not JSON ({error})", ErrorCode.BAD_JSON) from error
    if not isinstance(value, dict):
        raise _bad_frame(frame, "not a JSON object", ErrorCode.BAD_MESSAGE)
    return value


def _bad_frame(shown: str, problem: str, code: ErrorCode) -> MessageError:
    remedy = f"Send one JSON object of at most {MAX_MESSAGE_BYTES} bytes in a text frame."
    # Cut first: writing out a megabyte only to show a line of it would cost every hostile frame.
    return MessageError(code, "message", shown[:200], problem, remedy)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _bad_frame("{...}", "a name occurs twice in an object", ErrorCode.BAD_JSON)
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        raise _bad_frame("{...}", "a name is invalid Unicode", ErrorCode.BAD_JSON) from error
    return fields


def _refuse_constant(name: str) -> None:
    raise _bad_frame(name, "not a JSON number", ErrorCode.BAD_JSON)


def encode(message: ClientMessage | ServerMessage) -> str:
    """The frame of a message. Fields that are `None` are left out."""
    fields = dataclasses.asdict(message, dict_factory=_without_none)
    return json.dumps(
        {"type": message.type, **fields},
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
        default=_enum_value,
    )


def _without_none(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None}


def _enum_value(value: object) -> object:
    if not isinstance(value, Enum):
        raise TypeError(f"{type(value).__name__} has no place in JSON")
    return value.value


_SERVER_MESSAGES: dict[str, type[ServerMessage]] = {
    cls.type: cls
    for cls in (Opened, TextDelta, FeedProgress, Done, StatsReply, ErrorReply, GoingAway)
}
_NESTED: dict[str, Any] = {
    "reason": DoneReason,
    "code": ErrorCode,
    "usage": lambda fields: Usage(**fields),
    "timings": lambda fields: Timings(**fields),
}


def parse_server(frame: str | bytes) -> ServerMessage | None:
    """A message of the server, or `None` for a type that this version does not know.

    Raises:
        ServerError: the other end does not speak this protocol.
    """
    try:
        fields = json.loads(frame)
        cls = _SERVER_MESSAGES.get(fields.pop("type"))
        if cls is None:
            return None
        known = {field.name for field in dataclasses.fields(cls)}
        values = {
            name: _NESTED[name](value) if name in _NESTED else value
            for name, value in fields.items()
            if name in known
        }
        return cls(**{"id": None, **values} if "id" in known else values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(
            f"The other end does not speak streamkv's protocol ({error}). Check the URL."
        ) from error

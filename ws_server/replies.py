"""How a failure looks on the wire: a stable code, what happened, and what to do about it.

The one place that turns exceptions into error messages. An unexpected exception becomes `internal`
without its text, which could hold anything.
"""

from streamkv.errors import (
    ConfigError,
    EngineClosedError,
    InputError,
    JournalError,
    PoolFullError,
    QuotaError,
    SessionError,
    StoreError,
    StoreFullError,
    StreamKVError,
)
from streamkv.ws_server.fields import MessageError
from streamkv.ws_server.messages import ErrorCode, ErrorReply, RequestId

_REFUSALS = {
    ErrorCode.NOT_OPEN: ("No session is open on this connection.", "Send open first."),
    ErrorCode.ALREADY_OPEN: (
        "A session is open on this connection.",
        "Send close first, or use another connection.",
    ),
    ErrorCode.SESSION_IN_USE: (
        "Another connection has this session open.",
        "Wait until it closes, or open another session.",
    ),
    ErrorCode.BUSY: (
        "The request before this one is not done.",
        "Wait for its done, or send cancel and then wait for it.",
    ),
    ErrorCode.GOING_AWAY: (
        "The server is shutting down.",
        "Connect again later and open the session: it resumes.",
    ),
    ErrorCode.INTERNAL: (
        "The server failed on this request; its log says why.",
        "Open the session again: what was acknowledged is kept.",
    ),
}

# The first match counts, so a subclass stands before its base.
_CODES: tuple[tuple[type[StreamKVError], ErrorCode, str], ...] = (
    (ConfigError, ErrorCode.BAD_OPTION, "Change the option."),
    (InputError, ErrorCode.BAD_INPUT, "Change the input."),
    (SessionError, ErrorCode.SESSION_STATE, "Ask for stats to see where the session stands."),
    (PoolFullError, ErrorCode.OUT_OF_ROOM, "Close other sessions, or give the engine more room."),
    (QuotaError, ErrorCode.OUT_OF_ROOM, "Go on in another session."),
    (StoreFullError, ErrorCode.OUT_OF_ROOM, "Make room in the store or on its disk, then go on."),
    (StoreError, ErrorCode.STORAGE, "Run streamkv doctor on the server."),
    (JournalError, ErrorCode.STORAGE, "Make room on the server's disk, then send it again."),
    (EngineClosedError, ErrorCode.GOING_AWAY, "Connect again later: the session resumes."),
)


class Refused(StreamKVError):
    """A request that does not fit the connection's state."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(_REFUSALS[code][0])
        self.code = code


def error_reply(error: Exception, request_id: RequestId | None) -> ErrorReply:
    """The error message for `error`, in answer to `request_id`."""
    if isinstance(error, Refused):
        return ErrorReply(request_id, error.code, *_REFUSALS[error.code])
    if isinstance(error, InputError | ConfigError | QuotaError):
        code = error.code if isinstance(error, MessageError) else _code(error)[0]
        message = str(error).removesuffix(f". {error.remedy}")
        return ErrorReply(request_id, code, message, error.remedy, error.field)
    if isinstance(error, StreamKVError):
        code, remedy = _code(error)
        return ErrorReply(request_id, code, str(error), remedy)
    return ErrorReply(request_id, ErrorCode.INTERNAL, *_REFUSALS[ErrorCode.INTERNAL])


def _code(error: StreamKVError) -> tuple[ErrorCode, str]:
    for cls, code, remedy in _CODES:
        if isinstance(error, cls):
            return code, remedy
    return ErrorCode.INTERNAL, _REFUSALS[ErrorCode.INTERNAL][1]

"""Every failure has a stable code, says what happened and what to do."""

import pytest

from streamkv.errors import (
    ConfigError,
    EngineClosedError,
    InputError,
    JournalError,
    ModelError,
    PoolFullError,
    QuotaError,
    SessionError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StreamKVError,
    UnknownOptionError,
)
from streamkv.ws_server.fields import MessageError
from streamkv.ws_server.messages import ErrorCode, ErrorReply
from streamkv.ws_server.replies import Refused, error_reply


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SessionError("busy"), ErrorCode.SESSION_STATE),
        (PoolFullError("full"), ErrorCode.OUT_OF_ROOM),
        (StoreFullError("full"), ErrorCode.OUT_OF_ROOM),
        (StoreError("broken"), ErrorCode.STORAGE),
        (StoreFormatError("old"), ErrorCode.STORAGE),
        (StoreLockedError("held"), ErrorCode.STORAGE),
        (JournalError("no space"), ErrorCode.STORAGE),
        (EngineClosedError("closed"), ErrorCode.GOING_AWAY),
        (ModelError("odd"), ErrorCode.INTERNAL),
    ],
)
def test_what_went_wrong_is_told_with_its_code(error: StreamKVError, code: ErrorCode) -> None:
    reply = error_reply(error, "a")
    assert (reply.id, reply.code, reply.message, reply.field) == ("a", code, str(error), None)
    assert reply.remedy.endswith(".")


def test_a_bad_field_is_named_and_its_remedy_is_not_said_twice() -> None:
    bad = ("seed", -1, "below zero", "Use 0 or more.")
    expected = ("seed=-1: below zero", "Use 0 or more.", "seed")
    for error, code in (
        (InputError(*bad), ErrorCode.BAD_INPUT),
        (ConfigError(*bad), ErrorCode.BAD_OPTION),
        (UnknownOptionError(*bad), ErrorCode.BAD_OPTION),
        (MessageError(ErrorCode.UNKNOWN_TYPE, *bad), ErrorCode.UNKNOWN_TYPE),
    ):
        assert error_reply(error, 3) == ErrorReply(3, code, *expected)


@pytest.mark.parametrize("error", [ValueError("a secret"), OSError(2, "a secret"), KeyError("a")])
def test_an_unexpected_error_keeps_its_text_to_itself(error: Exception) -> None:
    reply = error_reply(error, 1)
    assert reply.code is ErrorCode.INTERNAL
    assert "secret" not in reply.message + reply.remedy


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_OPEN,
        ErrorCode.ALREADY_OPEN,
        ErrorCode.SESSION_IN_USE,
        ErrorCode.BUSY,
        ErrorCode.GOING_AWAY,
        ErrorCode.INTERNAL,
    ],
)
def test_a_refusal_says_what_to_do_instead(code: ErrorCode) -> None:
    reply = error_reply(Refused(code), None)
    assert reply.code is code
    assert reply.message.endswith(".") and reply.remedy.endswith(".")
    assert str(Refused(code)) == reply.message


def test_a_quota_that_is_used_up_is_told_with_its_field_and_remedy() -> None:
    reply = error_reply(QuotaError("session_tokens", 9, "too many", "Rewind."), "a")
    found = (reply.code, reply.message, reply.remedy, reply.field)
    expected = (ErrorCode.OUT_OF_ROOM, "session_tokens=9: too many", "Rewind.", "session_tokens")
    assert found == expected

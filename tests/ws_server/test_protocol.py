"""The wire format without sockets."""

import json
from typing import Any

import pytest

from streamkv.errors import ServerError
from streamkv.ws_server.fields import MessageError
from streamkv.ws_server.messages import (
    Cancel,
    Close,
    Delete,
    Done,
    DoneReason,
    ErrorCode,
    ErrorReply,
    Feed,
    Generate,
    GoingAway,
    Open,
    Opened,
    Say,
    Stats,
    TextDelta,
    Timings,
    Usage,
)
from streamkv.ws_server.protocol import encode, parse_client, parse_server

CLIENT_MESSAGES = [
    ('{"type":"open","version":1,"session":"diary"}', Open(None, "diary")),
    (
        '{"type":"open","id":1,"version":1,"session":"日記","system":"Be brief."}',
        Open(1, "日記", 1, "Be brief."),
    ),
    (
        '{"type":"say","id":"a","text":"Hi 🙂","params":{"stop":["\\n"],"seed":7},'
        '"token_ids":true}',
        Say("a", "Hi 🙂", {"stop": ("\n",), "seed": 7}, True),
    ),
    ('{"type":"generate","params":{"max_tokens":5}}', Generate(None, {"max_tokens": 5})),
    ('{"type":"feed","text":"a line\\n"}', Feed(None, text="a line\n")),
    ('{"type":"feed","ids":[1,2,3]}', Feed(None, ids=[1, 2, 3])),
    ('{"type":"cancel"}', Cancel(None)),
    ('{"type":"stats","id":"s"}', Stats("s")),
    ('{"type":"delete"}', Delete(None)),
    ('{"type":"close","id":null}', Close(None)),
]


@pytest.mark.parametrize(("frame", "message"), CLIENT_MESSAGES)
def test_a_client_message_is_read(frame: str, message: object) -> None:
    assert parse_client(frame) == message


@pytest.mark.parametrize("message", [message for _, message in CLIENT_MESSAGES])
def test_a_client_message_survives_the_wire(message: Any) -> None:
    assert parse_client(encode(message)) == message


BAD_FRAMES = {
    "empty": ("", "bad_json", "message"),
    "not json": ("{type: open}", "bad_json", "message"),
    "cut off": ('{"type":"say","text":"a', "bad_json", "message"),
    "two objects": ('{"type":"cancel"}{"type":"cancel"}', "bad_json", "message"),
    "nan": ('{"type":"say","text":"a","params":{"temperature":NaN}}', "bad_json", "message"),
    "same name twice": ('{"type":"cancel","type":"close"}', "bad_json", "message"),
    "deep lists": ("[" * 100_000 + "]" * 100_000, "bad_json", "message"),
    "deep objects": ('{"a":' * 100_000, "bad_json", "message"),
    "endless number": ("1" * 100_000, "bad_json", "message"),
    "half a surrogate in a name": ('{"type":"cancel","\\ud800":1}', "bad_json", "message"),
    "binary": (b'{"type":"cancel"}', "bad_message", "message"),
    "a list": ('["cancel"]', "bad_message", "message"),
    "a number": ("3", "bad_message", "message"),
    "too long": ('{"type":"say","text":"' + "a" * (1 << 20) + '"}', "bad_message", "message"),
    "no type": ('{"id":3}', "bad_message", "type"),
    "type is a number": ('{"type":3}', "bad_message", "type"),
    "unknown type": ('{"type":"shout"}', "unknown_type", "type"),
    "unknown field": ('{"type":"cancel","now":true}', "bad_message", "now"),
    "unknown null field": ('{"type":"cancel","now":null}', "bad_message", "now"),
    "id is a list": ('{"type":"cancel","id":[1]}', "bad_message", "id"),
    "id is a flag": ('{"type":"cancel","id":true}', "bad_message", "id"),
    "id too long": ('{"type":"cancel","id":"' + "x" * 65 + '"}', "bad_message", "id"),
    "id too large": ('{"type":"cancel","id":9007199254740992}', "bad_message", "id"),
    "no version": ('{"type":"open","session":"a"}', "bad_message", "version"),
    "other version": (
        '{"type":"open","version":2,"session":"a","tenant":"b"}',
        "unsupported_version",
        "version",
    ),
    "no session": ('{"type":"open","version":1}', "bad_message", "session"),
    "empty session": ('{"type":"open","version":1,"session":""}', "bad_message", "session"),
    "long session": (
        '{"type":"open","version":1,"session":"' + "n" * 129 + '"}',
        "bad_message",
        "session",
    ),
    "no text": ('{"type":"say"}', "bad_message", "text"),
    "text is a list": ('{"type":"say","text":["a"]}', "bad_message", "text"),
    "half a surrogate": ('{"type":"say","text":"\\ud83d"}', "bad_message", "text"),
    "feed of nothing": ('{"type":"feed"}', "bad_message", "text"),
    "feed of both": ('{"type":"feed","text":"a","ids":[1]}', "bad_message", "text"),
    "negative token id": ('{"type":"feed","ids":[1,-1]}', "bad_message", "ids"),
    "token id is a flag": ('{"type":"feed","ids":[true]}', "bad_message", "ids"),
    "token id is a fraction": ('{"type":"feed","ids":[1.5]}', "bad_message", "ids"),
    "params is a list": ('{"type":"generate","params":[1]}', "bad_message", "params"),
    "nested param": (
        '{"type":"generate","params":{"stop":[["a"]]}}',
        "bad_message",
        "params.stop",
    ),
    "too many stops": (
        json.dumps({"type": "generate", "params": {"stop": ["a"] * 65}}),
        "bad_message",
        "params.stop",
    ),
    "long stop": (
        json.dumps({"type": "generate", "params": {"stop": "a" * 1025}}),
        "bad_message",
        "params.stop",
    ),
    "huge number": (
        '{"type":"generate","params":{"temperature":1' + "0" * 400 + "}}",
        "bad_message",
        "params.temperature",
    ),
    "too many params": (
        json.dumps({"type": "generate", "params": {f"p{n}": 1 for n in range(33)}}),
        "bad_message",
        "params",
    ),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_is_refused_by_code_and_field(name: str) -> None:
    frame, code, field = BAD_FRAMES[name]
    with pytest.raises(MessageError) as caught:
        parse_client(frame)
    assert (caught.value.code.value, caught.value.field) == (code, field)
    assert caught.value.remedy
    assert len(str(caught.value)) < 500
    str(caught.value).encode()


def test_an_error_keeps_the_id_of_its_message() -> None:
    with pytest.raises(MessageError) as caught:
        parse_client('{"id":"q7","type":"say"}')
    assert caught.value.request_id == "q7"


def test_none_is_left_out_and_text_stays_readable() -> None:
    message = TextDelta(3, 12, "日本 🙂\n", 6)
    assert encode(message) == (
        '{"type":"delta","id":3,"seq":12,"text":"日本 🙂\\n","token_index":6}'
    )


@pytest.mark.parametrize(
    "message",
    [
        Opened("a", "diary", 12, 30, True, "smollm2-135m"),
        TextDelta(1, 5, "x", 2, token_id=7, logprob=-0.5, top=[[7, -0.5], [9, -1.5]]),
        Done(1, DoneReason.STOP, 40, 99, Usage(30, 10), Timings(0.25)),
        Done(2, DoneReason.CLOSED),
        ErrorReply(None, ErrorCode.BUSY, "One at a time.", "Wait.", "text"),
        GoingAway("diary", 4, 5),
        GoingAway(),
    ],
)
def test_a_server_message_survives_the_wire(message: Any) -> None:
    assert parse_server(encode(message)) == message


def test_a_client_skips_what_a_newer_server_adds() -> None:
    assert parse_server('{"type":"recalled","blocks":[1]}') is None
    assert parse_server('{"type":"going_away","session":"a","token":"t"}') == GoingAway("a")


@pytest.mark.parametrize("frame", ["", "[]", "3", "{}", '{"type":"done"}', '{"type":"delta"}'])
def test_a_server_that_speaks_something_else_is_an_error(frame: str) -> None:
    with pytest.raises(ServerError, match="does not speak"):
        parse_server(frame)

import json

import pytest

from streamkv.errors import InputError
from streamkv.journal_records import (
    Checkpoint,
    Chosen,
    Closed,
    Fed,
    Flushed,
    Generated,
    Given,
    GivenKind,
    Kept,
    ModeSet,
    Record,
    RecordKind,
    Rewound,
    SessionHeader,
    Turn,
    decode_header,
    decode_record,
    encode_record,
    ids_offset,
)

HEADER = SessionHeader(
    model="smollm2-135m",
    weights="00ff",
    vocab_size=49_152,
    window_size=1024,
    num_sink_tokens=4,
    mode="window",
    position_policy="cache",
    salt="",
    created_s=1_700_000_000.25,
)


@pytest.mark.parametrize(
    ("record", "kind", "payload"),
    [
        (Generated((258,)), RecordKind.GENERATED, b"\x02\x01\x00\x00"),
        (Generated((1, 2**32 - 1)), RecordKind.GENERATED, b"\x01\0\0\0\xff\xff\xff\xff"),
        (Generated(()), RecordKind.GENERATED, b""),
        (Flushed((7,)), RecordKind.FLUSHED, b"\x07\0\0\0"),
        (Given(GivenKind.SYSTEM, (9,)), RecordKind.GIVEN, b"\x02\x09\0\0\0"),
        (
            Fed("hé", 1, (5,)),
            RecordKind.FED,
            b"\x01\0\0\0\x03\0\0\0h\xc3\xa9\x05\0\0\0",
        ),
        (Fed("", 0, ()), RecordKind.FED, bytes(8)),
        (Kept(3, 70), RecordKind.KEPT, b"\x03" + bytes(7) + b"\x46" + bytes(7)),
        (Turn({"seed": 2**53}), RecordKind.TURN, b'{"seed":9007199254740992}'),
        (Checkpoint(1, b"ab"), RecordKind.CHECKPOINT, b"\x01" + bytes(7) + b"ab"),
        (Closed(2, b""), RecordKind.CLOSED, b"\x02" + bytes(7)),
        (
            Rewound(5, 258, True),
            RecordKind.REWOUND,
            b"\x05" + bytes(7) + b"\x02\x01" + bytes(6) + b"\x01",
        ),
        (
            ModeSet(3, "recall", 16, 256, "absolute", b"salt"),
            RecordKind.MODE_SET,
            b"\x03" + bytes(7) + b"\x01\x02" + b"\x10\0\0\0" + b"\0\x01\0\0" + b"salt",
        ),
        (
            ModeSet(0, "full", 0, 64, "far", b""),
            RecordKind.MODE_SET,
            bytes(8) + b"\x02\0" + bytes(4) + b"\x40\0\0\0",
        ),
        (
            Chosen(512, 500, (1, 7)),
            RecordKind.CHOSEN,
            b"\0\x02" + bytes(6) + b"\xf4\x01" + bytes(6) + b"\x01\0\0\0\x07\0\0\0",
        ),
        (Chosen(0, 0, ()), RecordKind.CHOSEN, bytes(16)),
    ],
    ids=str,
)
def test_a_record_has_literal_bytes_and_comes_back(
    record: Record, kind: RecordKind, payload: bytes
) -> None:
    assert encode_record(record) == (kind, payload)
    assert decode_record(kind, payload) == record


def test_the_header_comes_back_with_its_version() -> None:
    kind, payload = encode_record(HEADER)
    assert kind == RecordKind.HEADER
    assert decode_header(payload) == (4, HEADER)
    assert decode_record(kind, payload) == HEADER


def test_the_header_of_another_version_is_not_read() -> None:
    assert decode_header(b'{"journal_version": 5, "anything": []}') == (5, None)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_header_of_an_older_version_is_read(version: int) -> None:
    """Those of before version 4 know nothing of imports, quotas and expiry."""
    fields = json.loads(encode_record(HEADER)[1]) | {"journal_version": version}
    for later in ("origin", "session_tokens", "expire_after_s"):
        del fields[later]
    assert decode_header(json.dumps(fields).encode()) == (version, HEADER)


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff"])
def test_text_that_is_not_unicode_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        encode_record(Fed(text, 0, ()))


@pytest.mark.parametrize("ids", [(-1,), (2**32,), (1.5,), ("a",)])
def test_what_is_not_a_token_id_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="ids="):
        encode_record(Generated(ids))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (0, b""),
        (10, b""),
        (RecordKind.FED, b"\x01\0\0"),
        (RecordKind.FED, b"\0\0\0\0\x01\0\0\0\xff"),
        (RecordKind.GIVEN, b""),
        (RecordKind.GIVEN, b"\x09\x01\0\0\0"),
        (RecordKind.GENERATED, b"\x01\0\0"),
        (RecordKind.KEPT, b"\x01"),
        (RecordKind.TURN, b"{"),
        (RecordKind.CHECKPOINT, b"\x01"),
        (RecordKind.CLOSED, b""),
        (RecordKind.MODE_SET, bytes(17)),
        (RecordKind.MODE_SET, bytes(8) + b"\x03" + bytes(9)),
        (RecordKind.MODE_SET, bytes(9) + b"\x03" + bytes(8)),
        (RecordKind.CHOSEN, bytes(15)),
        (RecordKind.CHOSEN, bytes(18)),
        (RecordKind.HEADER, b"{}"),
    ],
)
def test_a_malformed_payload_is_a_value_error(kind: int, payload: bytes) -> None:
    with pytest.raises(ValueError):  # the message is that of struct, json or enum
        decode_record(kind, payload)


@pytest.mark.parametrize(
    "record",
    [Generated((1, 2)), Flushed((3,)), Given(GivenKind.CALLER, (4, 5)), Fed("äb", 1, (6, 7, 8))],
    ids=str,
)
def test_ids_offset_points_at_the_ids(record: Generated | Flushed | Given | Fed) -> None:
    kind, payload = encode_record(record)
    assert len(payload) - ids_offset(kind, payload) == 4 * len(record.ids)


def test_a_record_without_ids_has_none() -> None:
    kind, payload = encode_record(Kept(0, 1))
    assert ids_offset(kind, payload) == len(payload)

"""The records of a journal: what happened to a session, and the bytes that say so.

Payloads, little-endian; `ids` are uint32 up to the end of the payload:

    HEADER      JSON of SessionHeader and the format version
    FED         tail_len u32, text_bytes u32, text utf-8, ids
    GIVEN       kind u8, ids
    GENERATED   ids
    FLUSHED     ids
    KEPT        token_index u64, num_tokens u64
    TURN        JSON object
    CHECKPOINT  token_index u64, digest
    CLOSED      token_index u64, partial_key
    REWOUND     token_index u64, text_chars u64, has_turns u8
    MODE_SET    token_index u64, mode u8, policy u8, num_blocks u32, stride u32, salt
    CHOSEN      token_index u64, made_at u64, block indices u32 ...

Invariant: `decode_record(*encode_record(record)) == record`. Framing, checksums and files are not
known here.
"""

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from streamkv.errors import InputError

JOURNAL_VERSION = 4
"""Version of frames and records that is written; 2 brought REWOUND, 3 MODE_SET and CHOSEN, 4 the
last three fields of the header."""

READ_VERSIONS = (1, 2, 3, 4)
"""Versions that are read; a journal of another one is refused."""

_FED = struct.Struct("<II")
_SPAN = struct.Struct("<QQ")
_PLACE = struct.Struct("<Q")
_REWOUND = struct.Struct("<QQ?")
_MODE_SET = struct.Struct("<QBBII")

# Their places are what is written: new ones come last.
_MODES = ("window", "recall", "full")
_POLICIES = ("far", "cache", "absolute")


class RecordKind(IntEnum):
    """What a record is; the byte in its frame. 0 stays unused, so that zeros are never a record."""

    HEADER = 1
    FED = 2
    GIVEN = 3
    GENERATED = 4
    FLUSHED = 5
    KEPT = 6
    TURN = 7
    CHECKPOINT = 8
    CLOSED = 9
    REWOUND = 10
    MODE_SET = 11
    CHOSEN = 12


class GivenKind(IntEnum):
    """Where ids that were not made from fed text come from."""

    CALLER = 1
    SYSTEM = 2
    TEMPLATE = 3


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """What a session was created with; always the first record.

    Attributes:
        model: name of the model.
        weights: its weights fingerprint, in hex.
        vocab_size: ids in the journal are below it.
        window_size: newest tokens attended.
        num_sink_tokens: first tokens attended for ever, at creation.
        mode: attention mode.
        position_policy: how distances to sink tokens are counted.
        salt: part of its block keys, in hex: its own, or that of its tenant's sessions.
        created_s: seconds since 1970 (UTC).
        system_digest: of the system prompt, in hex; empty if there is none.
        num_shared_tokens: first tokens, a prompt marked shared; blocks that lie wholly in them are
            named without the salt.
        origin: of an imported session, the salt of the one that was exported first, in hex; its
            digests are named by it.
        session_tokens: most tokens that it may have; `None`: as many as the engine allows.
        expire_after_s: seconds of sleep after which it is deleted; `None`: as the engine says, 0:
            never.
    """

    model: str
    weights: str
    vocab_size: int
    window_size: int
    num_sink_tokens: int
    mode: str
    position_policy: str
    salt: str
    created_s: float
    system_digest: str = ""
    num_shared_tokens: int = 0
    origin: str = ""
    session_tokens: int | None = None
    expire_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fed:
    """Text accepted, and the ids that became certain with it.

    Attributes:
        text: the text accepted by this record; may be empty.
        tail_len: how many of the last characters accepted so far are held back, because later text
            may still change their ids.
        ids: ids of what is no longer held back.
    """

    text: str
    tail_len: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """Ids that came from elsewhere than fed text."""

    kind: GivenKind
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """Ids that the model chose, usually one."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flushed:
    """Ids of the whole held-back tail, forced out by a generation or by given ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """`num_tokens` tokens from `token_index` on became sink tokens."""

    token_index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A generation ended. `info` is small JSON: reason, seed and the like."""

    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The KV of all tokens before `token_index` is stored; `digest` names the manifest."""

    token_index: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The session went to sleep; `partial_key` names the stored open block, empty if none is."""

    token_index: int
    partial_key: bytes


@dataclass(frozen=True, slots=True)
class Rewound:
    """The stream ends at `token_index` again; the tokens from there on are forgotten.

    Attributes:
        token_index: tokens that are left, at least one.
        text_chars: characters of fed text that are left, as far as that is known.
        has_turns: whether what is left holds turns of the chat template.
    """

    token_index: int
    text_chars: int
    has_turns: bool


@dataclass(frozen=True, slots=True)
class ModeSet:
    """The tokens from `token_index` on attend by this mode.

    Attributes:
        token_index: the first of them.
        mode: `window`, `recall` or `full`.
        num_blocks: old blocks recalled at once, at most.
        stride: tokens between two choices of them.
        policy: how far away they seem: `far`, `cache` or `absolute`.
        salt: names the blocks apart that are sealed behind `token_index`; empty for a stream that
            never attended to anything but its window.
    """

    token_index: int
    mode: str
    num_blocks: int
    stride: int
    policy: str
    salt: bytes


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens from `token_index` on attend to these old blocks.

    Attributes:
        token_index: the first of them. What was computed of them before is void.
        made_at: tokens that were computed when the choice was made.
        blocks: block indices, ascending.
    """

    token_index: int
    made_at: int
    blocks: tuple[int, ...]


Record = (
    SessionHeader
    | Fed
    | Given
    | Generated
    | Flushed
    | Kept
    | Turn
    | Checkpoint
    | Closed
    | Rewound
    | ModeSet
    | Chosen
)


def encode_record(record: Record) -> tuple[RecordKind, bytes]:
    """Kind and payload of a record.

    Raises:
        InputError: text that is not valid Unicode, or an id outside 0 to 2^32 - 1.
    """
    match record:
        case Generated(ids):
            return RecordKind.GENERATED, _pack_ids(ids)
        case Fed(text, tail_len, ids):
            encoded = _encode_text(text)
            payload = _FED.pack(tail_len, len(encoded)) + encoded + _pack_ids(ids)
            return RecordKind.FED, payload
        case Given(kind, ids):
            return RecordKind.GIVEN, bytes([kind]) + _pack_ids(ids)
        case Flushed(ids):
            return RecordKind.FLUSHED, _pack_ids(ids)
        case Kept(token_index, num_tokens):
            return RecordKind.KEPT, _SPAN.pack(token_index, num_tokens)
        case Turn(info):
            return RecordKind.TURN, _pack_json(info)
        case Checkpoint(token_index, digest):
            return RecordKind.CHECKPOINT, _PLACE.pack(token_index) + digest
        case Closed(token_index, partial_key):
            return RecordKind.CLOSED, _PLACE.pack(token_index) + partial_key
        case Rewound(token_index, text_chars, has_turns):
            return RecordKind.REWOUND, _REWOUND.pack(token_index, text_chars, has_turns)
        case ModeSet(token_index, mode, num_blocks, stride, policy, salt):
            numbers = (_MODES.index(mode), _POLICIES.index(policy), num_blocks, stride)
            return RecordKind.MODE_SET, _MODE_SET.pack(token_index, *numbers) + salt
        case Chosen(token_index, made_at, blocks):
            return RecordKind.CHOSEN, _SPAN.pack(token_index, made_at) + _pack_ids(blocks)
        case SessionHeader():
            fields = dataclasses.asdict(record) | {"journal_version": JOURNAL_VERSION}
            return RecordKind.HEADER, _pack_json(fields)


def decode_record(kind: int, payload: bytes) -> Record:
    """The record of a kind and payload.

    Raises:
        ValueError: not a payload of that kind.
    """
    try:
        return _decode(RecordKind(kind), payload)
    except (struct.error, LookupError, TypeError) as error:
        raise ValueError(f"not the payload of a {RecordKind(kind).name} record") from error


def ids_offset(kind: int, payload: bytes) -> int:
    """Where in the payload the ids begin; its end if this kind holds none."""
    if kind in (RecordKind.GENERATED, RecordKind.FLUSHED):
        return 0
    if kind == RecordKind.FED:
        return _FED.size + int(_FED.unpack_from(payload)[1])
    return 1 if kind == RecordKind.GIVEN else len(payload)


def decode_header(payload: bytes) -> tuple[int, SessionHeader | None]:
    """Format version and header; no header if it is a version that is not read."""
    fields = json.loads(payload)
    version = fields.pop("journal_version")
    return version, SessionHeader(**fields) if version in READ_VERSIONS else None


def _decode(kind: RecordKind, payload: bytes) -> Record:
    match kind:
        case RecordKind.HEADER:
            fields = json.loads(payload)
            del fields["journal_version"]
            return SessionHeader(**fields)
        case RecordKind.FED:
            tail_len, text_bytes = _FED.unpack_from(payload)
            end = _FED.size + text_bytes
            return Fed(payload[_FED.size : end].decode(), tail_len, _unpack_ids(payload[end:]))
        case RecordKind.GIVEN:
            return Given(GivenKind(payload[0]), _unpack_ids(payload[1:]))
        case RecordKind.GENERATED:
            return Generated(_unpack_ids(payload))
        case RecordKind.FLUSHED:
            return Flushed(_unpack_ids(payload))
        case RecordKind.KEPT:
            return Kept(*_SPAN.unpack(payload))
        case RecordKind.TURN:
            return Turn(json.loads(payload))
        case RecordKind.CHECKPOINT:
            return Checkpoint(_PLACE.unpack_from(payload)[0], payload[_PLACE.size :])
        case RecordKind.CLOSED:
            return Closed(_PLACE.unpack_from(payload)[0], payload[_PLACE.size :])
        case RecordKind.REWOUND:
            return Rewound(*_REWOUND.unpack(payload))
        case RecordKind.MODE_SET:
            return _unpack_mode(payload)
        case RecordKind.CHOSEN:
            token_index, made_at = _SPAN.unpack_from(payload)
            return Chosen(token_index, made_at, _unpack_ids(payload[_SPAN.size :]))


def _unpack_mode(payload: bytes) -> ModeSet:
    token_index, mode, policy, num_blocks, stride = _MODE_SET.unpack_from(payload)
    salt = payload[_MODE_SET.size :]
    return ModeSet(token_index, _MODES[mode], num_blocks, stride, _POLICIES[policy], salt)


def _pack_ids(ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise InputError("ids", ids, "not token ids", "Use whole numbers from 0 on.") from error


def _unpack_ids(payload: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(payload) // 4}I", payload)


def _encode_text(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        remedy = 'Clean it first, e.g. text.encode("utf-8", "replace").decode().'
        raise InputError("text", text, "not valid Unicode (a lone surrogate)", remedy) from error


def _pack_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()

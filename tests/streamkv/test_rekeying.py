"""New names of a stream's blocks: those that a stream with the new salt would seal them by."""

import random

import pytest

from streamkv.journal_records import (
    Checkpoint,
    Chosen,
    Closed,
    Given,
    GivenKind,
    Kept,
    ModeSet,
    Record,
    Rewound,
)
from streamkv.rekeying import new_names, renamed
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.keys import Salting, is_partial
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window
from streamkv.window_blocks import WindowBlocks

SIZE = 4
WINDOW = Window(6, ((0, 2),))
OLD_ROOT, NEW_ROOT = BlockKey(b"o" * 16), BlockKey(b"n" * 16)
OLD = Salting(b"old", num_shared_blocks=2)
NEW = Salting(b"new")


def stream(seed: int) -> list[Record]:
    """Records as a session writes them, of any kind that names depend on."""
    chosen = random.Random(seed)
    records: list[Record] = [Given(GivenKind.SYSTEM, tuple(range(9)))]
    num_tokens = 9
    for step in range(40):
        what = chosen.choice(["give", "give", "keep", "rewind", "mode", "choose", "close"])
        ids = tuple(chosen.randrange(99) for _ in range(chosen.randrange(1, 9)))
        if what in ("give", "keep"):
            records.append(Given(GivenKind.CALLER, ids))
            if what == "keep":
                records.append(Kept(num_tokens, len(ids)))
            num_tokens += len(ids)
        elif what == "rewind" and num_tokens > 12:
            num_tokens = chosen.randrange(max(5, num_tokens - 12), num_tokens + 1)
            records.append(Rewound(num_tokens, 0, False))
        elif what == "mode":
            records.append(ModeSet(num_tokens, "recall", 2, 4, "far", bytes([step]) * 16))
        elif what == "choose":
            records.append(Chosen(max(0, num_tokens - 2), num_tokens, (0,)))
        else:
            records.append(Closed(num_tokens, bytes([1, step]) * 8))
    return records


def keys(root: BlockKey, salting: Salting) -> StreamKeys:
    return StreamKeys(root, SIZE, WINDOW, salting)


@pytest.mark.parametrize("seed", range(20))
def test_names_are_those_of_a_stream_that_always_had_the_new_salt(seed: int) -> None:
    records = stream(seed)
    names = new_names(records, keys(OLD_ROOT, OLD), keys(NEW_ROOT, NEW), "diary")
    old, new = keys(OLD_ROOT, OLD), keys(NEW_ROOT, NEW)
    old.read(records)
    new.read(records)
    assert [names[key] for key in old.chain] == new.chain, "in the order of the stream"
    sealed = {key for key in old.own | old.public if not is_partial(key)}
    assert {names[key] for key in sealed} == {key for key in new.own if not is_partial(key)}
    assert set(names) == old.own | old.public
    assert not set(names) & set(names.values())
    assert len(set(names.values())) == len(names), "no two blocks come to have one name"
    assert all(is_partial(key) == is_partial(named) for key, named in names.items())


def test_records_name_the_same_blocks_anew() -> None:
    names = {BlockKey(bytes([n]) * 16): BlockKey(bytes([n + 100]) * 16) for n in (2, 4, 6)}
    two, four, six = names
    blocks = WindowBlocks(24, six, ((0, two), (5, four)))
    record = renamed(Checkpoint(24, blocks.encode()), names, NEW_ROOT)
    assert isinstance(record, Checkpoint)
    assert WindowBlocks.decode(24, record.digest) == WindowBlocks(
        24, names[four], ((0, names[two]), (5, names[four]))
    )
    assert renamed(Closed(9, six), names, NEW_ROOT) == Closed(9, names[six])
    assert renamed(Closed(9, b""), names, NEW_ROOT) == Closed(9, b"")
    unknown = Closed(9, b"u" * 16)
    assert renamed(unknown, names, NEW_ROOT) == unknown, "a miss, never another block"
    given = Given(GivenKind.CALLER, (1, 2))
    assert renamed(given, names, NEW_ROOT) is given

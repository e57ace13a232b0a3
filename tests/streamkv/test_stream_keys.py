"""Names of all blocks that a stream ever had."""

import pytest

from streamkv.journal_records import Chosen, Given, GivenKind, Kept, ModeSet, Record, Rewound
from streamkv.sequence import Sequence
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.keys import Salting
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

ROOT = BlockKey(b"r" * 16)
WINDOW = Window(6, ((0, 2),))
SIZE = 4


def given(*ids: int) -> Given:
    return Given(GivenKind.CALLER, ids)


def keys_of(*records: Record) -> set[BlockKey]:
    found = StreamKeys(ROOT, SIZE, WINDOW)
    found.read(records)
    assert not found.public
    return found.own


def sealed(
    ids: list[int],
    kept: tuple[int, int] | None = None,
    salts: tuple[tuple[int, bytes], ...] = (),
) -> set[BlockKey]:
    """Keys by which a sequence seals these tokens, with salts from some tokens on."""
    sequence = Sequence(1, WINDOW, SIZE, ROOT)
    found = set()
    for token_index, token_id in enumerate(ids):
        sequence.recall_salt = dict(salts).get(token_index, sequence.recall_salt)
        if kept is not None and kept[0] == token_index:
            sequence.change_window(token_index, WINDOW.with_sinks(*kept))
        sequence.append([token_id])
        sequence.table.add(token_index // SIZE, 0) if token_index % SIZE == 0 else None
        found |= {key for _, key in sequence.advance(1)}
    return found


def test_they_are_those_by_which_blocks_are_sealed() -> None:
    ids = list(range(30))
    assert keys_of(given(*ids[:7]), given(*ids[7:])) == sealed(ids)
    kept = keys_of(given(*ids[:14]), given(*ids[14:22]), Kept(14, 8), given(*ids[22:]))
    assert kept == sealed(ids, (14, 22))
    assert len(kept) == 7


def test_what_a_rewind_gave_up_is_among_them() -> None:
    ids = list(range(20))
    found = keys_of(given(*ids), Rewound(10, 0, False), given(*[99] * 10))
    assert found == sealed(ids) | sealed([*ids[:10], *[99] * 10])
    kept = keys_of(
        given(*ids), given(*[5] * 8), Kept(20, 8), Rewound(20, 0, False), given(*[5] * 8)
    )
    assert kept == sealed([*ids, *[5] * 8], (20, 28)) | sealed([*ids, *[5] * 8])


def mode(token_index: int, salt: bytes) -> ModeSet:
    return ModeSet(token_index, "recall", 1, 64, "far", salt)


@pytest.mark.parametrize("since", [0, 1, 3, 4, 7, 8, 14])
def test_a_mode_names_the_blocks_that_end_behind_its_token(since: int) -> None:
    ids, salt = list(range(20)), b"s" * 16
    found = keys_of(given(*ids[:14]), mode(since, salt), given(*ids[14:]))
    assert found >= sealed(ids, salts=((since, salt),))
    assert found <= sealed(ids, salts=((since, salt),)) | sealed(ids[:14])
    assert len(sealed(ids, salts=((since, salt),)) & sealed(ids)) == since // SIZE


def test_a_choice_takes_its_mode_back_to_its_first_token() -> None:
    ids, salt = list(range(20)), b"s" * 16
    found = keys_of(given(*ids[:14]), mode(13, salt), Chosen(7, 13, ()), given(*ids[14:]))
    assert found >= sealed(ids, salts=((7, salt),))


def test_a_rewind_takes_the_salt_back() -> None:
    ids, salt = list(range(20)), b"s" * 16
    records = given(*ids[:14]), mode(13, salt), given(*ids[14:]), Rewound(10, 0, False)
    assert keys_of(*records, given(*ids[10:])) >= sealed(ids) | sealed(ids, salts=((13, salt),))


@pytest.mark.parametrize("num_left", [1, 4, 6, 8, 9, 20])
def test_the_salt_enters_where_a_rewind_left_a_shared_prompt(num_left: int) -> None:
    ids, salting = list(range(20)), Salting(b"s", 2)
    changed = [*ids[:num_left], *[99] * (20 - num_left)]

    def seal(sequence: Sequence, ids: list[int]) -> list[BlockKey]:
        sequence.append(ids)
        for index in range(len(ids) // SIZE):
            sequence.table.add(index, index)
        return [key for _, key in sequence.advance(len(ids))]

    before = seal(Sequence(1, WINDOW, SIZE, ROOT, salting), ids)
    sequence = Sequence(2, WINDOW, SIZE, ROOT, salting)
    sequence.give_up_shared(num_left)
    sequence.restart_at(0, sequence.first_parent, [])
    after = seal(sequence, changed)
    other = seal(Sequence(3, WINDOW, SIZE, ROOT, Salting(b"t", 2)), changed)
    num_public = min(2, num_left // SIZE)
    assert after[:num_public] == before[:num_public]
    assert not set(after[num_public:]) & set(other), "what it goes on with is no one else's"

    found = StreamKeys(ROOT, SIZE, WINDOW, salting)
    found.read([given(*ids), Rewound(num_left, 0, False), given(*changed[num_left:])])
    assert found.public == set(before[:2])
    assert found.own == set(before[2:]) | set(after[num_public:])

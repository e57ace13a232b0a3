import pytest

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
    Turn,
    encode_record,
)
from streamkv.journal_state import INDEX_STRIDE, JournalState, TokenIndex


def state_after(*records: Record) -> JournalState:
    state = JournalState()
    for number, record in enumerate(records):
        state.apply(*encode_record(record), offset=100 * number)
    return state


def test_a_new_state_is_empty() -> None:
    state = JournalState()
    assert (state.num_tokens, state.text_chars, state.tail, state.kept) == (0, 0, "", [])
    assert (state.last_turn, state.last_checkpoint, state.last_closed) == (None, None, None)


def test_every_kind_of_id_counts_as_a_token_and_only_fed_text_as_text() -> None:
    state = state_after(
        Given(GivenKind.SYSTEM, (1, 2, 3)),
        Fed("häß", 0, (4,)),
        Fed("x", 1, ()),
        Flushed((5,)),
        Generated((6,)),
        Turn({}),
    )
    assert state.num_tokens == 6
    assert state.text_chars == 4


def test_the_tail_grows_one_character_at_a_time() -> None:
    state = JournalState()
    for count, char in enumerate("grün🙂", start=1):
        state.apply(*encode_record(Fed(char, count, ())), offset=0)
        assert state.tail == "grün🙂"[:count]
    state.apply(*encode_record(Fed("!", 2, (1, 2))), offset=0)
    assert state.tail == "🙂!"
    assert state.text_chars == 6


def test_a_tail_ends_with_a_flush_or_a_length_of_zero() -> None:
    assert state_after(Fed("abc", 3, ()), Flushed((1,))).tail == ""
    assert state_after(Fed("abc", 3, ()), Fed("", 0, (1,))).tail == ""
    assert state_after(Fed("abc", 3, ()), Turn({}), Kept(0, 1)).tail == "abc"


def test_the_newest_turn_checkpoint_and_close_are_remembered_and_all_kept_ranges() -> None:
    state = state_after(
        Turn({"n": 1}),
        Kept(0, 4),
        Checkpoint(8, b"x"),
        Closed(9, b"k"),
        Turn({"n": 2}),
        Kept(10, 2),
        Checkpoint(12, b"y"),
    )
    assert state.last_turn == Turn({"n": 2})
    assert state.last_checkpoint == Checkpoint(12, b"y")
    assert state.last_closed == Closed(9, b"k")
    assert state.kept == [Kept(0, 4), Kept(10, 2)]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (RecordKind.FED, b"\x05\0\0\0\x01\0\0\0a"),
        (RecordKind.FED, b"\0\0\0\0\x09\0\0\0a"),
        (RecordKind.GENERATED, b"\x01\0\0\0\x02"),
        (RecordKind.HEADER, b"{}"),
        (0, b""),
        (77, b""),
    ],
)
def test_a_record_that_cannot_follow_is_a_value_error(kind: int, payload: bytes) -> None:
    with pytest.raises(ValueError):  # the message is that of struct, json or enum
        JournalState().apply(kind, payload, offset=0)


def test_the_index_has_one_entry_for_each_stride_of_single_tokens() -> None:
    index = TokenIndex()
    for token in range(3 * INDEX_STRIDE):
        index.note(token, 1, 13 * token)
    assert len(index) == 3
    assert index.find(0) == index.find(INDEX_STRIDE - 1) == (0, 0)
    assert index.find(INDEX_STRIDE) == (INDEX_STRIDE, 13 * INDEX_STRIDE)
    assert index.find(10**9) == (2 * INDEX_STRIDE, 26 * INDEX_STRIDE)


def test_a_record_that_spans_strides_has_one_entry() -> None:
    index = TokenIndex()
    index.note(0, INDEX_STRIDE - 1, 1)
    index.note(INDEX_STRIDE - 1, 5 * INDEX_STRIDE, 2)
    index.note(6 * INDEX_STRIDE - 1, 1, 3)
    index.note(6 * INDEX_STRIDE, 1, 4)
    assert len(index) == 3
    assert index.find(INDEX_STRIDE - 2) == (0, 1)
    assert index.find(5 * INDEX_STRIDE) == (INDEX_STRIDE - 1, 2)
    assert index.find(6 * INDEX_STRIDE) == (6 * INDEX_STRIDE, 4)


def test_tokens_are_found_in_stretches_that_end_where_a_rewind_cut_them() -> None:
    index = TokenIndex()
    index.note(0, 100, 1)
    index.cut(50)
    index.note(50, 30, 2)
    index.cut(60)
    index.note(60, 10, 3)
    index.note(70, 10, 4)
    assert list(index.stretches(40, 75)) == [(40, 50, 0, 1), (50, 60, 50, 2), (60, 75, 60, 3)]
    assert list(index.stretches(60, 61)) == [(60, 61, 60, 3)]
    index.cut(50)
    assert list(index.stretches(0, 50)) == [(0, 50, 0, 1)]


def test_a_rewind_takes_back_what_is_about_later_tokens() -> None:
    state = JournalState()
    records: list[Record] = [
        Given(GivenKind.CALLER, (1,) * 10),
        Kept(4, 2),
        Kept(8, 2),
        Checkpoint(7, b""),
        Closed(8, b"k"),
        Fed("held", 4, ()),
    ]
    for offset, record in enumerate([*records, Rewound(8, 3, True)]):
        state.apply(*encode_record(record), offset)
    assert (state.num_tokens, state.text_chars, state.tail, state.has_turns) == (8, 3, "", True)
    assert state.kept == [Kept(4, 2)]
    assert (state.last_checkpoint, state.last_closed) == (Checkpoint(7, b""), Closed(8, b"k"))
    state.apply(*encode_record(Rewound(7, 3, False)), 9)
    # The last token stays pending, so a resume needs a checkpoint before it.
    assert (state.last_checkpoint, state.last_closed) == (None, None)


@pytest.mark.parametrize(
    "record", [Rewound(0, 0, False), Rewound(11, 0, False), Rewound(5, 1, False)]
)
def test_a_rewind_to_where_the_stream_never_was_is_damage(record: Rewound) -> None:
    state = JournalState()
    state.apply(*encode_record(Given(GivenKind.CALLER, (1,) * 10)), 0)
    with pytest.raises(ValueError, match="rewound to token"):
        state.apply(*encode_record(record), 1)


def ids(count: int) -> Given:
    return Given(GivenKind.CALLER, tuple(range(count)))


def test_modes_and_choices_are_remembered() -> None:
    mode = ModeSet(0, "recall", 3, 64, "far", b"s" * 16)
    state = state_after(mode, ids(200), Chosen(128, 64, (0,)), Chosen(192, 128, (0, 1)))
    assert state.recall.newest == mode
    assert state.recall.choice_at(191) == Chosen(128, 64, (0,))
    assert state.recall.choice_at(192) == Chosen(192, 128, (0, 1))


def test_a_choice_for_tokens_to_come_leaves_the_checkpoint_as_it_is() -> None:
    state = state_after(ids(200), Checkpoint(128, b"x"), Closed(130, b"k"), Chosen(199, 199, ()))
    assert state.last_checkpoint == Checkpoint(128, b"x") and state.last_closed is not None
    assert state.computed_until is None


def test_a_choice_for_tokens_already_computed_voids_what_lies_beyond() -> None:
    for kept, expected in ((128, Checkpoint(128, b"x")), (192, None)):
        records = ids(200), Checkpoint(kept, b"x"), Closed(190, b"k"), Chosen(150, 199, (0,))
        state = state_after(*records)
        assert (state.last_checkpoint, state.last_closed) == (expected, None)
        assert state.computed_until == 150
    state = state_after(*records, Chosen(160, 199, (1,)), Chosen(140, 199, (2,)))
    assert state.computed_until == 140
    state = state_after(*records, Checkpoint(192, b"y"))
    assert (state.last_checkpoint, state.computed_until) == (Checkpoint(192, b"y"), None)


def test_a_rewind_forgets_what_later_tokens_chose() -> None:
    """What it left was computed with that, and has to be computed anew."""
    records = ids(300), Chosen(128, 64, (0,)), Chosen(240, 280, (1,)), Checkpoint(240, b"x")
    state = state_after(*records, Rewound(280, 0, False))
    assert list(state.recall.choices(0)) == [Chosen(128, 64, (0,))]
    assert (state.last_checkpoint, state.computed_until) == (Checkpoint(240, b"x"), 240)
    state = state_after(*records, Rewound(281, 0, False))
    assert state.recall.choice_at(280) == Chosen(240, 280, (1,))
    assert state.computed_until is None
    assert list(state.rewinds) == [281]


def test_what_was_decided_beyond_the_stream_is_damage() -> None:
    with pytest.raises(ValueError, match="decided at token 201 of 200"):
        state_after(ids(200), Chosen(10, 201, ()))
    with pytest.raises(ValueError, match="decided at token 201 of 200"):
        state_after(ids(200), ModeSet(201, "window", 0, 64, "far", b""))


def test_an_answer_is_open_from_its_first_token_until_something_else_happens() -> None:
    begun = ids(3), Generated((1,))
    assert state_after(*begun).in_answer
    assert state_after(*begun, Checkpoint(0, b""), Chosen(70, 4, ()), Turn({})).in_answer
    mode = ModeSet(4, "window", 0, 64, "far", b"")
    for record in (ids(1), Fed("a", 1, ()), Rewound(2, 0, False), mode):
        assert not state_after(*begun, record).in_answer

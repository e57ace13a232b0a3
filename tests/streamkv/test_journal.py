import dataclasses
import json
import logging
import os
import random
import shutil
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.errors import (
    InputError,
    JournalError,
    SessionError,
    StoreFormatError,
    StreamKVError,
)
from streamkv.journal import Journal, delete_journal, read_header
from streamkv.journal_frames import HEADER_SEED, MAGIC, MAX_PAYLOAD_BYTES, encode_frame
from streamkv.journal_records import (
    Checkpoint,
    Closed,
    Fed,
    Flushed,
    Generated,
    Given,
    GivenKind,
    Kept,
    Record,
    Rewound,
    SessionHeader,
    Turn,
)
from streamkv.journal_state import INDEX_STRIDE

HEADER = SessionHeader(
    model="smollm2-135m",
    weights="00ff",
    vocab_size=49_152,
    window_size=1024,
    num_sink_tokens=4,
    mode="window",
    position_policy="cache",
    salt="5a17",
    created_s=1_700_000_000.25,
)

RECORDS: list[Record] = [
    Given(GivenKind.SYSTEM, (1, 2, 3)),
    Kept(0, 3),
    Fed("Grüße, 東", 2, (10, 11)),
    Fed("京🙂", 3, (12,)),
    Flushed((13, 14)),
    Given(GivenKind.TEMPLATE, (15,)),
    Generated((16,)),
    Generated((17, 18)),
    Turn({"reason": "stop", "seed": 9_007_199_254_740_991}),
    Checkpoint(9, bytes(range(16))),
    Turn({"reason": "stop", "seed": 1}),
    Closed(11, b"partial-key-0123"),
]


def write_until_killed(path: Path, acknowledgements: int) -> None:
    """Write token after token, and how many there are after each to the pipe."""
    with Journal.open(path) as journal:
        for token in range(journal.state.num_tokens, 10_000_000):
            if token % 10 == 0:
                journal.append(Fed("é" * (token % 97), 0, (token % 49_152,)))
            else:
                journal.append(Generated((token % 49_152,)))
            os.write(acknowledgements, (token + 1).to_bytes(4, "little"))


def kill_writer_after(path: Path, num_tokens: int) -> int:
    """Run a writer, kill it after it acknowledged some tokens; returns how many it did in all."""
    reader, writer = os.pipe()
    # A fork: a fresh interpreter would spend its time on imports.
    child = os.fork()
    if child == 0:
        try:
            write_until_killed(path, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        acknowledgements = pipe.read(4 * num_tokens)
        os.kill(child, signal.SIGKILL)
        acknowledgements += pipe.read()
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return int.from_bytes(acknowledgements[-4:], "little")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "diary.journal"


def write(path: Path, records: list[Record]) -> list[int]:
    """Write a journal; returns the file size after the header and after each record."""
    with Journal.create(path, HEADER) as journal:
        sizes = [journal.num_bytes]
        for record in records:
            journal.append(record)
            sizes.append(journal.num_bytes)
    return sizes


def read(path: Path) -> list[Record]:
    with Journal.open(path) as journal:
        return list(journal.scan())


def test_every_record_comes_back_in_the_same_process_and_after_reopening(path: Path) -> None:
    with Journal.create(path, HEADER) as journal:
        for record in RECORDS:
            journal.append(record)
        assert list(journal.scan()) == [HEADER, *RECORDS]
    assert read(path) == [HEADER, *RECORDS]


def test_the_state_is_the_same_after_reopening(path: Path) -> None:
    with Journal.create(path, HEADER) as journal:
        for record in RECORDS:
            journal.append(record)
        written = journal.state
    with Journal.open(path) as journal:
        state = journal.state
        assert journal.header == HEADER
        assert journal.torn_bytes == 0
    for found in (written, state):
        assert found.num_tokens == 12
        assert found.text_chars == 10
        assert found.tail == ""
        assert found.kept == [Kept(0, 3)]
        assert found.last_turn == Turn({"reason": "stop", "seed": 1})
        assert found.last_checkpoint == Checkpoint(9, bytes(range(16)))
        assert found.last_closed == Closed(11, b"partial-key-0123")


def test_a_token_costs_thirteen_bytes_and_no_sync(path: Path) -> None:
    with Journal.create(path, HEADER) as journal:
        before = path.stat().st_size
        journal.append(Generated((7,)))
        assert path.stat().st_size == before + 13 == journal.num_bytes


def test_the_file_is_private(path: Path) -> None:
    write(path, [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_journal_reopens_empty(path: Path) -> None:
    write(path, [])
    with Journal.open(path) as journal:
        assert list(journal.scan()) == [HEADER]
        assert journal.ids(0, 0).tolist() == []
        journal.append(Generated((5,)))
    assert read(path) == [HEADER, Generated((5,))]


def test_a_turn_of_no_token_is_a_turn(path: Path) -> None:
    write(path, [Generated(()), Turn({"reason": "stop", "num_tokens": 0})])
    with Journal.open(path) as journal:
        assert journal.state.num_tokens == 0
        assert journal.state.last_turn == Turn({"reason": "stop", "num_tokens": 0})


@pytest.mark.parametrize("cut_from", [0, 5])
def test_a_journal_cut_at_any_byte_opens_with_the_longest_whole_prefix(
    path: Path, cut_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = write(path, RECORDS)
    whole = path.read_bytes()
    for size in range(sizes[cut_from], sizes[-1]):
        path.write_bytes(whole[:size])
        count = sum(1 for end in sizes if end <= size) - 1
        caplog.clear()
        with Journal.open(path) as journal:
            assert list(journal.scan()) == [HEADER, *RECORDS[:count]]
            assert journal.torn_bytes == size - sizes[count]
            assert len(caplog.records) == (1 if journal.torn_bytes else 0)
            assert path.stat().st_size == size
            journal.append(Turn({"after": size}))
            assert path.stat().st_size == journal.num_bytes
        assert read(path) == [HEADER, *RECORDS[:count], Turn({"after": size})]


def test_a_journal_cut_inside_its_header_is_refused_with_a_remedy(path: Path) -> None:
    sizes = write(path, RECORDS)
    whole = path.read_bytes()
    for size in range(sizes[0]):
        path.write_bytes(whole[:size])
        with pytest.raises(JournalError, match=r"not a journal|damaged record at byte 8"):
            Journal.open(path)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_flipped_byte_is_an_error_or_a_torn_tail_and_never_another_record(
    path: Path, flip: int
) -> None:
    sizes = write(path, RECORDS)
    whole = path.read_bytes()
    for place in range(sizes[-1]):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        if place < sizes[-2]:
            start = max((end for end in sizes if end <= place), default=8)
            problem = "not a journal" if place < 8 else f"damaged record at byte {start} .*truncate"
            with pytest.raises(JournalError, match=problem):
                Journal.open(path)
        else:
            assert read(path) == [HEADER, *RECORDS[:-1]]


def test_a_damaged_middle_keeps_the_file_and_its_remedy_works(path: Path) -> None:
    sizes = write(path, RECORDS)
    damaged = bytearray(path.read_bytes())
    damaged[sizes[4] + 6] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match=f"truncate -s {sizes[4]} '{path}'"):
        Journal.open(path)
    assert path.read_bytes() == damaged
    os.truncate(path, sizes[4])
    assert read(path) == [HEADER, *RECORDS[:4]]


def test_a_zeroed_page_in_the_middle_is_damage_and_at_the_end_a_torn_tail(path: Path) -> None:
    sizes = write(path, [Generated((token,)) for token in range(1000)])
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    with pytest.raises(JournalError, match="a whole record follows at byte"):
        Journal.open(path)
    path.write_bytes(whole[:8192] + bytes(len(whole) - 8192))
    with Journal.open(path) as journal:
        assert journal.state.num_tokens == sum(1 for end in sizes if end <= 8192) - 1


def test_bytes_of_another_journal_are_not_taken_for_records(path: Path, tmp_path: Path) -> None:
    write(path, RECORDS)
    other = tmp_path / "other.journal"
    with Journal.create(other, dataclasses.replace(HEADER, salt="0000")) as journal:
        start = journal.num_bytes
        for record in RECORDS:
            journal.append(record)
    path.write_bytes(path.read_bytes()[:start] + other.read_bytes()[start:])
    assert read(path) == [HEADER]


def test_half_a_character_at_the_end_is_cut_with_its_record(path: Path) -> None:
    sizes = write(path, [Fed("ok", 0, (1,)), Fed("a🙂", 2, ())])
    os.truncate(path, sizes[-1] - 6)
    with Journal.open(path) as journal:
        journal.append(Fed("🙂", 1, ()))
        assert (journal.state.tail, journal.state.text_chars) == ("🙂", 3)
    assert read(path) == [HEADER, Fed("ok", 0, (1,)), Fed("🙂", 1, ())]


def test_text_fed_one_character_at_a_time_leaves_its_tail_after_a_crash(path: Path) -> None:
    text = "naïve 東京 🙂🙃 end"
    with Journal.create(path, HEADER) as journal:
        for count, char in enumerate(text, start=1):
            held = min(count, 7)
            journal.append(Fed(char, held, (count,) if count > 7 else ()))
            shutil.copyfile(path, path.with_suffix(".copy"))
            with Journal.open(path.with_suffix(".copy")) as copy:
                assert copy.state.tail == text[count - held : count]
                assert copy.state.text_chars == count
                assert copy.state.num_tokens == max(0, count - 7)


@pytest.mark.parametrize("seed", range(6))
def test_a_writer_killed_at_any_moment_loses_nothing_that_it_acknowledged(
    path: Path, seed: int
) -> None:
    write(path, [])
    choice = random.Random(seed)
    for _ in range(3):
        acknowledged = kill_writer_after(path, choice.randrange(1, 1500))
        with Journal.open(path) as journal:
            state = journal.state
            assert acknowledged <= state.num_tokens <= acknowledged + 1
            expected = np.arange(state.num_tokens) % 49_152
            assert np.array_equal(journal.ids(0, state.num_tokens), expected)
            assert state.text_chars == sum(t % 97 for t in range(0, state.num_tokens, 10))


def test_a_full_disk_refuses_the_record_and_goes_on_when_space_returns(path: Path) -> None:
    from resource import RLIMIT_FSIZE, getrlimit, setrlimit

    with Journal.create(path, HEADER) as journal:
        journal.append(Fed("abc", 2, (1,)))
        before = getrlimit(RLIMIT_FSIZE)
        setrlimit(RLIMIT_FSIZE, (journal.num_bytes + 10, before[1]))
        try:
            for _ in range(2):
                with pytest.raises(JournalError, match="Nothing of this step was accepted"):
                    journal.append(Fed("def", 3, (2,)))
        finally:
            setrlimit(RLIMIT_FSIZE, before)
        assert (journal.state.num_tokens, journal.state.text_chars) == (1, 3)
        assert journal.state.tail == "bc"
        journal.append(Fed("def", 4, (3,)))
        journal.sync()
    assert read(path) == [HEADER, Fed("abc", 2, (1,)), Fed("def", 4, (3,))]


id_lists = st.lists(st.integers(0, 49_151), max_size=9).map(tuple)
id_records = st.one_of(
    id_lists.map(Generated),
    id_lists.map(lambda ids: Given(GivenKind.CALLER, ids)),
    id_lists.map(Flushed),
    st.tuples(st.text(max_size=5), id_lists).map(lambda pair: Fed(pair[0], 0, pair[1])),
    st.integers(0, 9).map(lambda token_index: Checkpoint(token_index, b"digest")),
)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(id_records, max_size=25), data=st.data())
def test_ids_of_any_range_are_those_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "a.journal"
    write(path, records)
    ids = [token_id for record in records for token_id in getattr(record, "ids", ())]
    start = data.draw(st.integers(0, len(ids)))
    end = data.draw(st.integers(start, len(ids)))
    with Journal.open(path) as journal:
        assert journal.state.num_tokens == len(ids)
        assert journal.ids(start, end).tolist() == ids[start:end]


@pytest.mark.parametrize("record_size", [1, 3, INDEX_STRIDE - 1, INDEX_STRIDE, 9000])
def test_ids_are_found_on_both_sides_of_every_index_entry(path: Path, record_size: int) -> None:
    total = 5 * INDEX_STRIDE // record_size * record_size
    ids = np.arange(total) * 7919 % 49_152
    with Journal.create(path, HEADER) as journal:
        for start in range(0, total, record_size):
            journal.append(Generated(tuple(ids[start : start + record_size].tolist())))
        for edge in range(INDEX_STRIDE, total, INDEX_STRIDE):
            found = journal.ids(edge - 2, edge + 2)
            assert found.dtype == np.uint32
            assert np.array_equal(found, ids[edge - 2 : edge + 2])
        assert np.array_equal(journal.ids(0, total), ids)


def test_a_million_tokens_are_remembered_by_a_few_hundred_numbers(path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 49_152, 1_000_000)
    with Journal.create(path, HEADER) as journal:
        for start in range(0, 900_000, 500):
            journal.append(Fed("", 0, tuple(ids[start : start + 500].tolist())))
        for token_id in ids[900_000:].tolist():
            journal.append(Generated((token_id,)))
    with Journal.open(path) as journal:
        assert journal.state.num_tokens == 1_000_000
        assert len(journal.state.index) <= 1_000_000 // INDEX_STRIDE + 1
        for start in (0, 123_456, 899_999, 900_001, 999_000):
            assert np.array_equal(journal.ids(start, start + 1000), ids[start : start + 1000])


@pytest.mark.parametrize("span", [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_a_range_outside_the_stream_is_refused(path: Path, span: tuple[int, int]) -> None:
    write(path, [Generated((1, 2, 3))])
    with Journal.open(path) as journal, pytest.raises(InputError, match="end <= 3"):
        journal.ids(*span)


@pytest.mark.parametrize("token_id", [-1, 49_152, 2**32])
def test_an_id_outside_the_vocabulary_is_refused_and_nothing_is_written(
    path: Path, token_id: int
) -> None:
    with Journal.create(path, HEADER) as journal:
        before = path.read_bytes()
        with pytest.raises(InputError, match="Use token ids from 0 to 49151"):
            journal.append(Generated((5, token_id)))
        assert path.read_bytes() == before
        assert journal.state.num_tokens == 0


def test_a_payload_of_exactly_the_limit_is_written_and_one_byte_more_is_refused(
    path: Path,
) -> None:
    with Journal.create(path, HEADER) as journal:
        longest = MAX_PAYLOAD_BYTES - 8
        journal.append(Fed("x" * longest, 0, ()))
        with pytest.raises(InputError, match="at most 1048576 bytes at a time"):
            journal.append(Fed("x" * (longest + 1), 0, ()))
        assert journal.state.text_chars == longest
    with Journal.open(path) as journal:
        assert journal.state.text_chars == longest


def test_text_that_is_not_unicode_is_refused_and_the_journal_goes_on(path: Path) -> None:
    with Journal.create(path, HEADER) as journal:
        with pytest.raises(InputError, match="lone surrogate"):
            journal.append(Fed("\udc80", 0, ()))
        journal.append(Fed("fine", 0, (1,)))
    assert read(path) == [HEADER, Fed("fine", 0, (1,))]


def test_other_ids_before_the_tail_is_flushed_are_our_own_bug(path: Path) -> None:
    with Journal.create(path, HEADER) as journal:
        journal.append(Fed("abc", 1, (1,)))
        with pytest.raises(AssertionError, match="flushed before other ids"):
            journal.append(Generated((2,)))
        with pytest.raises(AssertionError):
            journal.append(Fed("d", 3, ()))


def test_a_second_opener_is_told_who_has_the_session(path: Path) -> None:
    with Journal.create(path, HEADER):
        with pytest.raises(SessionError, match=rf"open already, in this process \({os.getpid()}\)"):
            Journal.open(path)
        with pytest.raises(SessionError, match="open already"):
            delete_journal(path)
        assert path.exists()
    Journal.open(path).close()


def test_a_journal_that_fails_to_open_is_not_left_locked(path: Path) -> None:
    write(path, RECORDS)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(JournalError, match="damaged record"):
            Journal.open(path)
    delete_journal(path)
    assert not path.exists()


def test_a_journal_of_another_version_is_refused(path: Path) -> None:
    frame = encode_frame(1, b'{"journal_version":5}', len(MAGIC), HEADER_SEED)
    path.write_bytes(MAGIC + frame)
    with pytest.raises(StoreFormatError, match="journal version 5, this streamkv reads 1 to 4"):
        Journal.open(path)


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", b'{"journal_version":1}', b'{"journal_version":1,"x":2}', b"\xff"],
)
def test_a_header_that_says_something_else_is_refused(path: Path, payload: bytes) -> None:
    path.write_bytes(MAGIC + encode_frame(1, payload, len(MAGIC), HEADER_SEED))
    with pytest.raises(JournalError, match="damaged record at byte 8"):
        Journal.open(path)


@pytest.mark.parametrize("content", [b"", b"strea", b"{}\n" * 50, bytes(4096)])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(JournalError, match="not a journal of streamkv"):
        Journal.open(path)
    assert path.read_bytes() == content


def test_a_whole_record_that_cannot_follow_is_damage(path: Path) -> None:
    header_end = write(path, [])[0]
    seed = int.from_bytes(path.read_bytes()[-4:], "little")
    with path.open("ab") as file:
        file.write(encode_frame(2, b"\x05\0\0\0\x01\0\0\0a", header_end, seed))
    with pytest.raises(JournalError, match=f"byte {header_end} \\(5 characters held back of 1"):
        Journal.open(path)


def test_creating_over_a_session_and_opening_a_missing_one_are_refused(path: Path) -> None:
    with pytest.raises(JournalError, match="Create the session first"):
        Journal.open(path)
    write(path, RECORDS)
    with pytest.raises(JournalError, match="exists already"):
        Journal.create(path, HEADER)
    assert read(path) == [HEADER, *RECORDS]


def test_a_deleted_journal_is_gone_and_its_name_is_free(path: Path) -> None:
    journal = Journal.create(path, HEADER)
    journal.delete()
    assert list(path.parent.iterdir()) == []
    write(path, [Generated((1,))])
    delete_journal(path)
    with pytest.raises(JournalError, match="no such journal"):
        delete_journal(path)


def test_a_closed_journal_refuses_every_call_and_closes_again(path: Path) -> None:
    journal = Journal.create(path, HEADER)
    journal.close()
    journal.close()
    for call in (
        lambda: journal.append(Generated((1,))),
        journal.sync,
        lambda: journal.ids(0, 0),
        lambda: list(journal.scan()),
        journal.delete,
        lambda: journal.num_bytes,
    ):
        with pytest.raises(StreamKVError, match="was closed"):
            call()


def test_damage_after_opening_is_an_error_and_never_an_answer(path: Path) -> None:
    sizes = write(path, RECORDS)
    with Journal.open(path) as journal:
        with path.open("r+b") as file:
            file.seek(sizes[3] + 14)
            file.write(b"?")
        with pytest.raises(JournalError, match=f"damaged record at byte {sizes[3]}"):
            journal.ids(0, 12)
        with pytest.raises(JournalError, match=f"damaged record at byte {sizes[3]}"):
            list(journal.scan())
        os.truncate(path, sizes[5])
        with pytest.raises(JournalError, match="cannot be read"):
            list(journal.scan())


def test_a_scan_can_be_abandoned_and_sees_what_was_there_when_it_began(path: Path) -> None:
    write(path, RECORDS)
    with Journal.open(path) as journal:
        scan = journal.scan()
        assert next(scan) == HEADER
        assert next(scan) == RECORDS[0]
        journal.append(Generated((20,)))
        assert list(scan) == RECORDS[1:]


def test_opening_a_sound_journal_logs_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    write(path, RECORDS)
    assert read(path) == [HEADER, *RECORDS]
    assert caplog.records == []


def test_a_journal_is_read_beside_the_process_that_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "s.journal"
    with Journal.create(path, HEADER) as writer:
        writer.append(Given(GivenKind.CALLER, (1, 2, 3)))
        with Journal.read_beside(path) as reader:
            assert reader.state.num_tokens == 3
            assert reader.ids(0, 3).tolist() == [1, 2, 3]
            with pytest.raises(JournalError):
                reader.append(Given(GivenKind.CALLER, (4,)))
        writer.append(Given(GivenKind.CALLER, (5,)))
        assert writer.ids(0, 4).tolist() == [1, 2, 3, 5]


def test_the_header_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "shared.journal"
    header = dataclasses.replace(HEADER, num_shared_tokens=130)
    with Journal.create(path, header) as journal:
        journal.append(Fed("Grüße", 0, (10, 11)), Generated((12, 13, 14, 15)))
        assert read_header(path) == header, "whoever has it open"
    with path.open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(bytes(20))
    assert read_header(path) == header
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match="not a journal"):
        read_header(path)
    with pytest.raises(JournalError):
        read_header(tmp_path / "none.journal")


def test_a_header_of_before_there_were_shared_prompts_shares_none(tmp_path: Path) -> None:
    fields = dataclasses.asdict(HEADER)
    del fields["num_shared_tokens"]
    payload = json.dumps(fields | {"journal_version": 1}).encode()
    path = tmp_path / "old.journal"
    path.write_bytes(MAGIC + encode_frame(1, payload, len(MAGIC), HEADER_SEED))
    with Journal.open(path) as journal:
        assert journal.header == HEADER
        assert journal.header.num_shared_tokens == 0


def test_ids_are_those_of_the_stream_after_rewinds(path: Path) -> None:
    chosen, ids = random.Random(5), list[int]()
    with Journal.create(path, HEADER) as journal:
        for _ in range(300):
            if ids and chosen.random() < 0.2:
                ids = ids[: chosen.randrange(1, len(ids) + 1)]
                journal.append(Rewound(len(ids), 0, False))
            fed = tuple(chosen.randrange(90) for _ in range(chosen.choice([1, 3, 3000])))
            journal.append(Given(GivenKind.CALLER, fed))
            ids += fed
        for again in (journal, Journal.read_beside(path)):
            assert again.state.num_tokens == len(ids)
            assert again.ids(0, len(ids)).tolist() == ids
            for _ in range(50):
                start = chosen.randrange(len(ids))
                end = chosen.randrange(start, min(start + 9000, len(ids)))
                assert again.ids(start, end).tolist() == ids[start:end]
        again.close()


def test_a_fork_holds_everything_and_goes_its_own_way(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.journal"
    with Journal.create(path, HEADER) as journal:
        for record in RECORDS:
            journal.append(record)
        with journal.fork(other) as fork:
            assert list(fork.scan()) == list(journal.scan())
            assert path.read_bytes() == other.read_bytes()
            fork.append(Generated((1,)))
            journal.append(Generated((2,)))
            with pytest.raises(JournalError, match="exists already"):
                journal.fork(other)
    assert read(other) == [HEADER, *RECORDS, Generated((1,))]
    assert read(path) == [HEADER, *RECORDS, Generated((2,))]
    delete_journal(path)
    assert read(other)[-1] == Generated((1,))

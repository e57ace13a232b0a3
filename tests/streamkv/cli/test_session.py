"""Listing, showing, removing and feeding sessions."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import Run

from streamkv import Engine, EngineConfig
from streamkv.accepted_text import accepted_text
from streamkv.cli.feed_notes import FeedNote, FeedNotes
from streamkv.journal import Journal
from streamkv.store import journal_path, notes_path

LINE = "The window holds the newest tokens.\n"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{n} {LINE}" for n in range(60)))
    return path


def fed_text(store: Path, name: str = "a") -> str:
    """The text that a session has accepted, by its journal."""
    with Journal.read_beside(journal_path(store, name)) as journal:
        return "".join(getattr(record, "text", "") for record in journal.scan())


def test_an_empty_store_lists_nothing(run: Run, where: list[str], store: Path) -> None:
    assert run("session", "ls", *where).out == f"No sessions in {store}.\n"
    assert run("session", "ls", *where, "--json").json == {"store": str(store), "sessions": []}


def test_sessions_are_listed_and_shown(
    run: Run, small: list[str], where: list[str], book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    listed = run("session", "ls", *where)
    header, row = listed.out.splitlines()
    assert header.split() == ["name", "tokens", "characters", "fed", "state", "changed", "expires"]
    assert row.split()[0] == "a" and "sleeping" in row
    shown = run("session", "show", "a", *where, "--json").json
    assert shown["text_chars"] == len(book.read_text())
    assert shown["window_size"] == 128
    assert 0 < shown["checkpoint_token_index"] <= shown["num_tokens"]
    assert "stored up to token" in run("session", "show", "a", *where).out


def test_what_a_session_needs_to_be_opened_again_is_shown(
    run: Run, small: list[str], where: list[str], book: Path
) -> None:
    recalling = ["--window", "192", "--recall-blocks", "3", "--attention", "recall"]
    run("session", "feed", "a", book, *small, *recalling)
    shown = run("session", "show", "a", *where, "--json").json
    assert (shown["mode"], shown["recall_blocks"]) == ("recall", 3)
    assert "--recall-blocks 3 or more" in run("session", "show", "a", *where).out
    refused = run("session", "feed", "a", book, *small, "--window", "192")
    assert refused.code == 2 and "on the command line --recall-blocks 3." in refused.err
    run("session", "feed", "b", book, *small)
    shown = run("session", "show", "b", *where, "--json").json
    assert (shown["mode"], shown["recall_blocks"]) == ("window", 0)


def test_an_unknown_session_is_2(run: Run, where: list[str]) -> None:
    ran = run("session", "show", "zz", *where)
    assert ran.code == 2
    assert "no such session" in ran.err


def test_a_damaged_journal_is_said_and_removed_without_the_model(
    run: Run, small: list[str], where: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    journal_path(store, "a").write_bytes(b"nonsense" * 10)
    assert "damaged: " in run("session", "ls", *where).out
    assert run("session", "rm", "a", "--yes", *where).code == 0
    assert run("session", "ls", *where, "--json").json["sessions"] == []
    assert run("cache", "ls", *where, "--json").json["num_locked"] == 0


def test_a_removed_session_leaves_no_block(
    run: Run, small: list[str], where: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    assert run("cache", "ls", *where, "--json").json["num_blocks"] > 0
    refused = run("session", "rm", "a", *small)
    assert refused.code == 2 and "Add --yes." in refused.err
    assert run("session", "rm", "a", "--yes", *small, "--json").json["deleted"] == "a"
    assert run("cache", "ls", *where, "--json").json["num_blocks"] == 0
    assert not notes_path(store, "a").exists()


def test_feeding_reads_everything_once(run: Run, small: list[str], store: Path, book: Path) -> None:
    ran = run("session", "feed", "a", book, *small, "--json")
    assert ran.code == 0
    assert ran.json["num_chars"] == len(book.read_text())
    assert fed_text(store) == book.read_text()
    again = run("session", "feed", "a", book, *small)
    assert again.code == 0 and "read before, nothing new" in again.err
    assert fed_text(store) == book.read_text()
    run("session", "feed", "a", book, *small, "--again")
    assert fed_text(store) == 2 * book.read_text()


def test_sessions_of_a_tenant_read_a_file_once_for_all(
    run: Run, small: list[str], tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    run("session", "feed", "a", long, *small, "--tenant", "acme")
    ran = run("session", "feed", "b", long, *small, "--tenant", "acme", "--json")
    assert ran.json["num_reused"] == (ran.json["session_tokens"] - 1) // 64 * 64 > 0
    ran = run("session", "feed", "c", long, *small, "--tenant", "acme")
    assert f"{long}: 1,800 characters, " in ran.err and " of them stored already), " in ran.err
    ran = run("session", "feed", "d", long, *small, "--tenant", "other", "--json")
    assert ran.json["num_reused"] == 0
    ran = run("session", "feed", "a", long, *small, "--tenant", "other")
    assert ran.code != 0 and "not created for tenant 'other'" in ran.err


def test_a_file_that_has_grown_goes_on_where_it_ended(
    run: Run, small: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    with book.open("a") as file:
        file.write("The end.\n")
    ran = run("session", "feed", "a", book, *small, "--json")
    assert ran.json["num_chars"] == len("The end.\n")
    assert fed_text(store) == book.read_text()


def test_a_file_that_has_changed_is_refused(
    run: Run, small: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    before = book.read_text()
    book.write_text("Another " + before)
    ran = run("session", "feed", "a", book, *small)
    assert ran.code == 2 and "--again" in ran.err
    assert fed_text(store) == before


def test_a_journal_that_lost_its_end_is_read_on_from_there(
    run: Run, small: list[str], store: Path, book: Path
) -> None:
    """What the notes say was read, and the journal does not hold, is read again."""
    book.write_text("".join(f"Line {number} of the book.\n" for number in range(1500)))
    run("session", "feed", "a", book, *small)
    path = journal_path(store, "a")
    with Journal.read_beside(path) as journal:
        whole = journal.state.text_chars
    os.truncate(path, path.stat().st_size * 2 // 3)
    ran = run("session", "feed", "a", book, *small, "--json")
    assert ran.code == 0 and "gave up" in ran.err
    assert 0 < ran.json["num_chars"] < whole == len(book.read_text())
    assert fed_text(store) == book.read_text()


def test_a_session_can_be_deleted_with_options_that_open_no_engine(
    run: Run, small: list[str], where: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    ran = run("session", "rm", "a", "--yes", *where, "--window", "1000000")
    assert ran.code == 0 and "No engine opens" in ran.err
    assert not journal_path(store, "a").exists()
    assert run("session", "feed", "a", book, *small).code == 0
    assert fed_text(store) == book.read_text()


def test_a_bad_file_among_several_keeps_the_good_ones_from_being_read(
    run: Run, small: list[str], store: Path, book: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.bin").write_bytes(bytes(range(256)))
    ran = run("session", "feed", "a", book, tmp_path / "bad.bin", *small)
    assert ran.code == 2 and "not UTF-8" in ran.err
    assert not journal_path(store, "a").exists()
    ran = run("session", "feed", "a", tmp_path, *small)
    assert ran.code == 2 and "a directory" in ran.err


def feed_until_killed(tiny_model_dir: Path, store: Path, book: Path, num_chars: int) -> None:
    """Leave what a feed leaves that was killed after `num_chars` characters."""
    config = EngineConfig(window_size=128, store=str(store))
    with Engine(str(tiny_model_dir), config) as engine, engine.session("a") as session:
        session.feed("Before.\n").run()
        with Journal.read_beside(journal_path(store, "a")) as journal:
            notes = FeedNotes(notes_path(store, "a"), journal.header.created_s.hex())
        notes.write(FeedNote(notes.session, str(book.resolve()), 0, session.text_chars))
        session.feed(book.read_text()[:num_chars]).run()


def test_a_killed_feed_goes_on_at_the_first_character_that_is_missing(
    run: Run, small: list[str], store: Path, book: Path, tiny_model_dir: Path
) -> None:
    feed_until_killed(tiny_model_dir, store, book, 1000)
    ran = run("session", "feed", "a", book, *small)
    assert ran.code == 0
    assert "goes on at character 1,000 of" in ran.err
    assert fed_text(store) == "Before.\n" + book.read_text()


def test_a_killed_feed_of_a_file_that_changed_is_refused(
    run: Run, small: list[str], store: Path, book: Path, tiny_model_dir: Path
) -> None:
    feed_until_killed(tiny_model_dir, store, book, 1000)
    book.write_text(book.read_text().replace("7 The", "7 A", 1))
    assert run("session", "feed", "a", book, *small).code == 2


def test_notes_of_a_removed_session_do_not_count(
    run: Run, small: list[str], where: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    notes = notes_path(store, "a").read_text()
    run("session", "rm", "a", "--yes", *small)
    notes_path(store, "a").write_text(notes)
    run("session", "feed", "a", book, *small)
    assert fed_text(store) == book.read_text()


def test_several_files_are_read_in_order(
    run: Run, small: list[str], store: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name}\n")
    ran = run("session", "feed", "a", tmp_path / "one", tmp_path / "two", *small, "--json")
    assert [line["num_chars"] for line in ran.json_lines] == [4, 4]
    assert fed_text(store) == "one\ntwo\n"


def test_standard_input_is_a_file(run: Run, small: list[str], store: Path) -> None:
    ran = run("session", "feed", "a", "-", *small, stdin="from a pipe\n")
    assert ran.code == 0
    assert fed_text(store) == "from a pipe\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 au lait", "not UTF-8 (near byte 3)"),
        (b"", "it is empty"),
        (None, "no such file"),
    ],
)
def test_a_bad_file_is_2_and_feeds_nothing(
    run: Run, small: list[str], store: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    ran = run("session", "feed", "a", tmp_path / "bad.txt", *small)
    assert ran.code == 2
    assert message in ran.err
    assert not journal_path(store, "a").exists(), "not even a session was made"


class InterruptedInput(io.StringIO):
    """A pipe during which Ctrl-C is pressed."""

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        yield "first\n"
        raise KeyboardInterrupt


def test_ctrl_c_while_feeding_says_how_to_go_on(run: Run, small: list[str], store: Path) -> None:
    ran = run("session", "feed", "a", "-", *small, stdin=InterruptedInput())
    assert ran.code == 130
    assert "Go on with: streamkv session feed a ..." in ran.err
    assert fed_text(store) == "first\n"


def test_a_fork_has_read_the_same_files(
    run: Run, small: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    num_tokens = run("session", "show", "a", *small[:4], "--json").json["num_tokens"]
    forked = run("session", "fork", "a", "b", *small, "--json").json
    assert forked == {"session": "a", "fork": "b", "num_tokens": num_tokens}
    again = run("session", "feed", "b", book, *small)
    assert again.code == 0 and "read before, nothing new" in again.err
    assert run("session", "rm", "a", "--yes", *small).code == 0
    shown = run("session", "show", "b", *small[:4], "--json").json
    assert shown["num_tokens"] == num_tokens
    assert "goes on from token" in run("session", "fork", "b", "c", *small).out


def test_a_fork_of_none_or_into_one_is_2(run: Run, small: list[str], book: Path) -> None:
    assert "no such session" in run("session", "fork", "zz", "b", *small).err
    run("session", "feed", "a", book, *small)
    for name in ("a", "a/b"):
        ran = run("session", "fork", "a", name, *small)
        assert (ran.code, ran.out) == (2, "")
        assert name in ran.err


def test_a_file_goes_on_where_its_session_was_rewound_to(
    run: Run, small: list[str], store: Path, book: Path
) -> None:
    run("session", "feed", "a", book, *small)
    refused = run("session", "rewind", "a", "100", *small)
    assert refused.code == 2 and "Add --yes." in refused.err
    rewound = run("session", "rewind", "a", "100", *small, "--yes", "--json").json
    assert (rewound["session"], rewound["num_tokens"]) == ("a", 100)
    assert 100 < rewound["text_chars"] < len(book.read_text())
    assert rewound["num_forgotten"] > 100
    again = run("session", "feed", "a", book, *small)
    assert f"goes on at character {rewound['text_chars']:,} of" in again.err
    with Journal.read_beside(journal_path(store, "a")) as journal:
        assert "".join(accepted_text(journal.scan)) == book.read_text()
        assert journal.state.text_chars == len(book.read_text())
    assert "are forgotten" in run("session", "rewind", "a", "50", *small, "--yes").out


@pytest.mark.parametrize("token_index", ["0", "-3", "1000000", "many"])
def test_a_token_that_is_none_is_2(
    run: Run, small: list[str], book: Path, token_index: str
) -> None:
    run("session", "feed", "a", book, *small)
    ran = run("session", "rewind", "a", *small, "--yes", "--", token_index)
    assert (ran.code, ran.out) == (2, "")

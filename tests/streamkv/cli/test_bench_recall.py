"""`streamkv bench recall` from the command line to its three files."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Ran, Run

from streamkv.recall_bench import heatmap
from streamkv.recall_bench.answers import read_answers

TIMES = ("feed_s", "answer_s")
SMALL = ["--window", 64, "--lengths", "100,160", "--depths", "0.1,0.9", "--compile", "off"]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts of more than 1,000 tokens each."""
    directory = tmp_path_factory.mktemp("books")
    for name in ("fox.md", "hen.txt"):
        line = f"The quick {name[:3]} jumps over the lazy dog, and the dog sleeps on in the sun."
        (directory / name).write_text("".join(f"{line} It is line {n}.\n" for n in range(60)))
    return directory


@pytest.fixture
def bench(run: Run, tiny_model_dir: Path, books: Path, tmp_path: Path) -> Any:
    """`bench("--questions", 3)`: a run of the tiny model."""

    def command(*args: object) -> Ran:
        fixed = ["--model", tiny_model_dir, "--data", books, "--out", tmp_path]
        return run("bench", "recall", *fixed, *SMALL, *args)

    return command


def untimed(path: Path) -> list[dict[str, object]]:
    """Every answer but for its times, in one order."""
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "answer":
            found.append({name: record[name] for name in record if name not in TIMES})
    return sorted(found, key=lambda item: (item["length"], item["index"], item["mode"]))


def test_every_mode_is_asked_the_same_questions(bench: Any, tmp_path: Path) -> None:
    made = bench("--questions", 3, "--modes", "window,dense", "--json").json
    answers = read_answers(tmp_path / "recall.jsonl").answers
    asked = {
        mode: {
            (a.length, a.index, a.number, a.source, a.needle_start)
            for a in answers
            if a.mode == mode
        }
        for mode in ("window", "dense")
    }
    assert asked["window"] == asked["dense"]
    assert {(length, index) for length, index, *_ in asked["dense"]} == {
        (length, index) for length in (100, 160) for index in range(3)
    }
    assert len(answers) == 12
    assert {a.beyond_window for a in answers if a.mode == "dense"} == {False}
    assert {a.beyond_window for a in answers if a.mode == "window" and a.depth == 0.1} == {True}
    assert made["benchmark"] == "recall"
    assert made["setting"]["window_size"] == 64
    assert made["figures"]["dense_160_found"]["asked"] == 3
    assert made["figures"]["window_160_feed_tokens_per_s"]["unit"] == "tokens/s"
    assert {(c["mode"], c["length"], c["depth"]): c["asked"] for c in made["cells"]} == {
        (mode, length, depth): count
        for mode in ("window", "dense")
        for length in (100, 160)
        for depth, count in ((0.1, 2), (0.9, 1))
    }
    assert json.loads((tmp_path / "recall.json").read_text()) == made


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(bench: Any, tmp_path: Path) -> None:
    args = ["--questions", 4, "--modes", "window,dense"]
    assert bench(*args, "--name", "whole").code == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for share in (0.2, 0.55, 0.9):
        (tmp_path / "cut.jsonl").write_bytes(whole[: int(share * len(whole))])
        assert bench(*args, "--name", "cut", "--resume").code == 0
        assert untimed(tmp_path / "cut.jsonl") == untimed(tmp_path / "whole.jsonl")
    before = (tmp_path / "cut.jsonl").read_bytes()
    assert bench(*args, "--name", "cut", "--resume").code == 0
    added = (tmp_path / "cut.jsonl").read_bytes()[len(before) :].splitlines()
    assert [json.loads(line)["kind"] for line in added] == ["run"]


def test_a_run_grows_by_lengths_questions_and_modes(bench: Any, tmp_path: Path) -> None:
    assert bench("--questions", 2, "--modes", "dense").code == 0
    grown = ["--lengths", "160,90", "--questions", 3, "--modes", "window,dense"]
    made = bench(*grown, "--resume", "--json").json
    assert made["setting"]["lengths"] == [90, 100, 160]
    assert made["figures"]["dense_100_found"]["asked"] == 2
    assert made["figures"]["dense_160_found"]["asked"] == 3
    assert made["figures"]["window_90_found"]["asked"] == 3
    assert "window_100_found" not in made["figures"]


def test_what_dense_cannot_hold_is_not_possible_rather_than_0(bench: Any, tmp_path: Path) -> None:
    args = ["--modes", "dense,window", "--questions", 1, "--lengths", "100,1500", "--join"]
    made = bench(*args, "--json", "--sinks", 2700).json
    [refused] = made["not_possible"]
    assert (refused["mode"], refused["length"]) == ("dense", 1500)
    assert "beyond the trained length of 4,096" in refused["reason"]
    assert "dense_1500_found" not in made["figures"]
    shown = bench("--redraw", tmp_path / "recall.jsonl").out
    assert "not possible" in shown


def test_tables_for_people_have_intervals_and_depths(bench: Any) -> None:
    ran = bench("--questions", 2, "--modes", "dense")
    lines = ran.out.splitlines()
    assert lines[0].split()[:4] == ["length", "mode", "found", "share"]
    assert lines[1].split()[:7] == ["100", "dense", "0/2", "0%", "0%", "to", "66%"]
    assert "dense: depth  100  160" in lines
    assert "0.1           0/1  0/1" in lines
    assert "Written: " in ran.err


@pytest.mark.skipif(not heatmap.has_matplotlib(), reason="matplotlib is not installed")
def test_a_finished_run_is_drawn_again(bench: Any, run: Run, tmp_path: Path) -> None:
    assert bench("--questions", 1, "--modes", "dense").code == 0
    files = {name: (tmp_path / f"recall.{name}") for name in ("png", "json")}
    report = files["json"].read_text()
    for path in files.values():
        path.unlink()
    assert run("bench", "recall", "--redraw", tmp_path / "recall.jsonl").code == 0
    assert files["json"].read_text() == report
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_that_nothing_was_drawn(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heatmap, "has_matplotlib", lambda: False)
    ran = bench("--questions", 1, "--modes", "dense")
    assert ran.code == 0
    assert "No picture was drawn" in ran.err
    assert "pip install" in ran.err
    assert not (tmp_path / "recall.png").exists()
    assert (tmp_path / "recall.json").exists()


def test_without_data_it_says_what_text_it_is(
    run: Run, tiny_model_dir: Path, tmp_path: Path
) -> None:
    args = ["--model", tiny_model_dir, "--out", tmp_path, *SMALL, "--lengths", 100]
    ran = run("bench", "recall", *args, "--questions", 1, "--modes", "dense")
    assert ran.code == 0
    assert "note: text: Python's language reference" in ran.out
    assert "not comparable with published figures" in ran.out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--data", "/nowhere"], "data='/nowhere': not a directory. Give a directory with .md"),
        (["--lengths", "9000"], "no text in it has"),
        (["--lengths", "12"], "lengths=12: no room for the needle and a text. Use at least"),
        (["--lengths", "1k"], "lengths='1k': not a list of numbers. Write numbers with commas"),
        (["--lengths", ","], "lengths='': no length"),
        (["--lengths", "-5"], "lengths=-5: out of range"),
        (["--depths", "0.5,1.5"], "depths=1.5: outside 0 to 1. Use numbers from 0"),
        (["--depths", "nan"], "depths=nan: outside 0 to 1"),
        (["--questions", "0"], "questions=0: out of range"),
        (
            ["--modes", "window,far"],
            "modes='far': not a mode. Use some of window, recall, full, dense",
        ),
        (["--feed-in", "full"], "feed_in='full': not a mode to read in"),
        (["--recall-blocks", "-1"], "--recall-blocks=-1: out of range"),
        (["--window-size", "12"], "--window=12: smaller than one block"),
        (["--redraw", "/nowhere.json"], "redraw='/nowhere.json': no .jsonl. Give the"),
        (["--redraw", "/nowhere.jsonl"], "answers='/nowhere.jsonl': No such file"),
    ],
)
def test_what_makes_no_sense_is_2_and_named(
    bench: Any, tmp_path: Path, args: list[str], told: str
) -> None:
    ran = bench("--modes", "dense", *args)
    assert ran.code == 2
    assert f"error: {told}" in ran.err or told in ran.err
    assert list(tmp_path.glob("recall*")) == []


def test_full_read_in_full_answers_as_dense_does(bench: Any, tmp_path: Path) -> None:
    bench("--questions", 2, "--modes", "full,dense", "--feed-in", "same")
    answers = read_answers(tmp_path / "recall.jsonl").answers
    texts = {
        mode: {(a.length, a.index): a.text for a in answers if a.mode == mode}
        for mode in ("full", "dense")
    }
    assert texts["full"] == texts["dense"] and len(texts["full"]) == 4
    assert {a.fed_in for a in answers} == {"full", "dense"}


def test_all_modes_are_asked_together_and_full_reads_in_window(bench: Any, tmp_path: Path) -> None:
    four = ["--modes", "window,recall,full,dense", "--window", 192, "--lengths", 500]
    made = bench("--questions", 2, *four, "--recall-blocks", 2, "--json").json
    answers = read_answers(tmp_path / "recall.jsonl").answers
    assert sorted(a.mode for a in answers) == sorted(["window", "recall", "full", "dense"] * 2)
    assert {a.fed_in for a in answers if a.mode == "full"} == {"window"}
    assert {a.recalled_blocks for a in answers if a.mode == "full"} == {None}
    assert made["figures"]["full_500_found"]["asked"] == 2


def test_answers_are_neither_overwritten_nor_mixed(bench: Any, tmp_path: Path) -> None:
    assert bench("--questions", 1, "--modes", "dense").code == 0
    before = (tmp_path / "recall.jsonl").read_bytes()
    again = bench("--questions", 1, "--modes", "dense")
    assert (again.code, "it exists. Go on with --resume" in again.err) == (2, True)
    other = bench("--questions", 1, "--modes", "dense", "--resume", "--seed", 5)
    assert (other.code, "its seed is 0, not 5" in other.err) == (2, True)
    assert (tmp_path / "recall.jsonl").read_bytes() == before

"""Exporting and importing sessions by commands."""

from pathlib import Path

from cli_runner import Run

from streamkv import Engine, EngineConfig

TEXT = "".join(f"{n} The window holds the newest tokens.\n" for n in range(60))


def feed(run: Run, tmp_path: Path, small: list[str], *more: str) -> None:
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    assert run("session", "feed", "a", book, *small, *more).code == 0


def test_a_session_is_taken_to_another_store(
    run: Run, small: list[str], where: list[str], tmp_path: Path, tiny_model_dir: Path
) -> None:
    feed(run, tmp_path, small)
    file = tmp_path / "a.skv"
    ran = run("session", "export", "a", file, *where, "--json")
    assert ran.code == 0
    assert (ran.json["file"], ran.json["num_bytes"]) == (str(file), file.stat().st_size)
    assert ran.json["num_blocks"] > 0 and not ran.json["needs_old"]
    there = ["--model", str(tiny_model_dir), "--store", str(tmp_path / "there")]
    ran = run("session", "import", file, "b", *there, "--json")
    assert (ran.code, ran.json["name"], ran.json["text_chars"]) == (0, "b", len(TEXT))
    shown = run("session", "show", "b", *there, "--json").json
    assert shown["checkpoint_token_index"] > 0
    assert "came with" in run("session", "import", file, *there).out
    assert [view["name"] for view in run("session", "ls", *there, "--json").json["sessions"]] == [
        "a",
        "b",
    ]
    refused = run("session", "import", file, *there)
    assert refused.code == 2 and "there is a session of this name" in refused.err


def test_a_file_is_replaced_only_when_it_is_said(
    run: Run, small: list[str], where: list[str], tmp_path: Path
) -> None:
    feed(run, tmp_path, small)
    file = tmp_path / "a.skv"
    file.write_text("mine")
    refused = run("session", "export", "a", file, *where)
    assert refused.code == 2 and "--force" in refused.err
    assert file.read_text() == "mine"
    assert run("session", "export", "a", file, *where, "--force").code == 0
    assert run("session", "export", "b", file, *where, "--force").code == 4
    assert file.stat().st_size > 1000, "what was there stays"


def test_it_is_exported_beside_an_engine_and_with_all_blocks_alone(
    run: Run, small: list[str], where: list[str], store: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    recalling = ["--window", "192", "--recall-blocks", "3", "--attention", "recall"]
    feed(run, tmp_path, small, *recalling)
    ran = run("session", "export", "a", tmp_path / "lean.skv", *where)
    assert ran.code == 0 and "with --all they are" in ran.err
    ran = run("session", "export", "a", tmp_path / "all.skv", *where, "--all", "--json")
    assert ran.code == 0 and ran.json["num_blocks"] > 8
    config = EngineConfig(window_size=192, store=str(tmp_path / "held"))
    with Engine(str(tiny_model_dir), config):
        held = ["--model", str(tiny_model_dir), "--store", str(tmp_path / "held")]
        refused = run("session", "import", tmp_path / "lean.skv", *held)
        assert refused.code == 4 and "is open in" in refused.err


def test_a_damaged_file_is_2(run: Run, small: list[str], where: list[str], tmp_path: Path) -> None:
    feed(run, tmp_path, small)
    file = tmp_path / "a.skv"
    assert run("session", "export", "a", file, *where).code == 0
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    ran = run("session", "import", file, "b", *where)
    assert ran.code == 2 and "a checksum is wrong" in ran.err

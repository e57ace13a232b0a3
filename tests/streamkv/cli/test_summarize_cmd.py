from pathlib import Path

from cli_runner import Run


def test_a_transcript_is_summarised_once(run: Run, where: list[str], tmp_path: Path) -> None:
    file = tmp_path / "talk.txt"
    file.write_text("Ann: We ship on Friday.\nBob: I test on Thursday.\n")
    window = ["--window", "1024"]
    ran = run("summarize", file, *where, *window, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["num_lines"] == 2
    assert (tmp_path / "talk.txt.summary.md").is_file()
    again = run("summarize", file, *where, *window, "--json", "--format", "json")
    assert again.json["num_resumed"] == ran.json["num_segments"]
    assert (tmp_path / "talk.txt.summary.json").is_file()


def test_a_missing_transcript_is_2(run: Run, where: list[str], tmp_path: Path) -> None:
    ran = run("summarize", tmp_path / "none.srt", *where)
    assert ran.code == 2
    assert "no such file" in ran.err

import logging

import pytest

from streamkv.cli.console import Output, print_error, printable, warnings_as_lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rich take its outputs for terminals."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("first\n   second")
    assert capsys.readouterr().err == "error: first second\n"


def test_an_error_is_red_on_a_terminal(capsys: pytest.CaptureFixture[str], terminal: None) -> None:
    print_error("bad")
    assert capsys.readouterr().err == "\x1b[31merror: bad\x1b[0m\n"


def test_no_color_is_respected(
    capsys: pytest.CaptureFixture[str], terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    print_error("bad")
    assert "31m" not in capsys.readouterr().err


def test_json_silences_lines_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True)
    output.line("for people")
    output.note("for people")
    output.columns([("a", "b")])
    output.fragment("text")
    output.json({"a": "é"})
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ('{"a": "é"}\n', "")


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Output().columns([("a", 1), ("bbb", 22)], ("name", "n"))
    assert capsys.readouterr().out == "name  n\na     1\nbbb   22\n"


def test_no_rows_have_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    Output().columns([], ("name", "n"))
    assert capsys.readouterr().out == ""


def test_long_lines_and_markup_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[red]" + "x" * 300
    Output().line(text)
    assert capsys.readouterr().out == text + "\n"


def test_text_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], terminal: None) -> None:
    Output().fragment("a\x1b]0;title\x07b\x9b31mc\r\n\td")
    assert capsys.readouterr().out == "a]0;titleb31mc\n\td"
    assert printable("ok\n") == "ok\n"


def test_a_pipe_gets_the_text_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    Output().fragment("a\x1bb\r\n")
    assert capsys.readouterr().out == "a\x1bb\r\n"


def test_warnings_of_the_library_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_lines():
        logging.getLogger("streamkv.journal").warning("torn %d", 3)
    assert capsys.readouterr().err == "warning: torn 3\n"

import io
import sys

import pytest
import typer

from streamkv.cli.confirm import confirm
from streamkv.errors import InputError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_yes_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    confirm("Delete it?", yes=True)


def test_where_nobody_can_be_asked_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(InputError, match="Add --yes"):
        confirm("Delete it?", yes=False)


def test_a_person_decides_and_the_default_is_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    confirm("Delete it?", yes=False)
    for answer in ("n\n", "\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        with pytest.raises(typer.Abort):
            confirm("Delete it?", yes=False)
    printed = capsys.readouterr()
    assert printed.out.strip() == "" and "Delete it?" in printed.err

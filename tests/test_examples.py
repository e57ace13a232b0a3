"""The examples run as they stand, only on a smaller model."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def load(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]  # returns a local function
    """Imports an example and gives it the tiny model and a store of its own."""

    def load_example(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "MODEL", str(tiny_model_dir))
        if hasattr(module, "STORE"):
            monkeypatch.setattr(module, "STORE", str(tmp_path / "store"))
        return module

    return load_example


def test_every_example_is_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 3
    assert max(lengths.values()) <= 40


def test_infinite_iterator(load, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]  # as above
    load("infinite_iterator").main(num_questions=1)
    assert capsys.readouterr().out.startswith("after 1")


def test_endless_chat_goes_on_where_it_was(  # type: ignore[no-untyped-def]  # as above
    load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = load("endless_chat")
    for _ in range(2):
        answers = itertools.chain(["hello"], itertools.repeat(""))
        monkeypatch.setattr("builtins.input", lambda prompt, answers=answers: next(answers))
        chat.main()
    counts = [
        int(line.split()[0])
        for line in capsys.readouterr().out.splitlines()
        if "tokens so far" in line
    ]
    assert counts[0] < counts[1]


def test_surprising_lines_are_printed(load, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]  # as above
    lines = ["the dog sleeps\n"] * 12 + ["\n", "XQZ 99 %% zzz\n"]
    load("surprising_lines").main(lines, top=0.01)
    assert "nats a token" in capsys.readouterr().out

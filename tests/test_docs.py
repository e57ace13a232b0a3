"""The README and the guide: their samples run as they stand, and name what exists.

The samples of a page run in one namespace from top to bottom, only on the tiny model, in a home
directory of their own, and with a server of the test behind the address they connect to.
"""

import ast
import asyncio
import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer.main

from streamkv import Engine, EngineConfig, SamplingParams, errors
from streamkv.cli.app import make_app
from streamkv.cli.exit_codes import ExitCode
from streamkv.model_cache import cache_root
from streamkv.ws_server.server import aserve

ROOT = Path(__file__).parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
SAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`[^`\n]*?\bstreamkv ([a-z][a-z ]*)|^ {4}streamkv ([a-z][a-z ]*)", re.MULTILINE)
SERVER = "ws://127.0.0.1:8765"


def samples(page: Path) -> str:
    """All Python samples of a page, each on the lines it has there."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for found in SAMPLE.finditer(text):
        first = text.count("\n", 0, found.start(1))
        sample = found.group(1).splitlines()
        lines[first : first + len(sample)] = sample
    return "\n".join(lines)


def named_commands(page: Path) -> set[str]:
    """What a page writes as `streamkv ...`: its lower-case words."""
    found = NAMED.findall(page.read_text(encoding="utf-8"))
    return {(quoted or indented).strip() for quoted, indented in found}


def command_names() -> set[str]:
    """Every command, and every group followed by one of its commands."""
    names: set[str] = set()
    for name, command in typer.main.get_group(make_app()).commands.items():
        names.add(name)
        names |= {f"{name} {below}" for below in getattr(command, "commands", {})}
    return names


@contextmanager
def serving(model_dir: Path) -> Iterator[str]:
    """The address of a server of the tiny model, on a thread of its own."""
    urls: list[str] = []
    ready = threading.Event()

    def tell(url: str) -> None:
        urls.append(url)
        ready.set()

    with Engine(str(model_dir), EngineConfig(window_size=128)) as engine:
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        served = aserve(engine, port=0, ready=tell, stop=stop)
        thread = threading.Thread(target=loop.run_until_complete, args=(served,))
        thread.start()
        try:
            assert ready.wait(30)
            yield urls[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


@pytest.fixture
def tiny_home(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory of its own, in which the default model is the tiny one."""
    monkeypatch.setenv("STREAMKV_CACHE", str(cache_root()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("streamkv.model_files._resolve_default", lambda say: tiny_model_dir)
    return tmp_path


def test_the_readme_s_sample_runs_and_resumes(
    tiny_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compile(samples(README), str(README), "exec")
    journal = tiny_home / ".local/share/streamkv/diary/sessions/diary.journal"
    sizes = []
    for _ in range(2):
        exec(code, {"__name__": "readme"})
        sizes.append(journal.stat().st_size)
    assert "tokens read" in capsys.readouterr().out
    assert sizes[0] < sizes[1]


def test_the_guide_s_samples_run_from_top_to_bottom(tiny_home: Path, tiny_model_dir: Path) -> None:
    with serving(tiny_model_dir) as url:
        text = samples(GUIDE)
        assert text.count(SERVER) == 1
        exec(compile(text.replace(SERVER, url), str(GUIDE), "exec"), {"__name__": "guide"})
    sessions = tiny_home / ".local/share/streamkv/guide/sessions"
    names = sorted(path.stem for path in sessions.iterdir())
    assert names == ["ann", "async talk", "bob", "book", "diary", "story"]


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    known, named = command_names(), named_commands(page)
    groups = {name.split()[0] for name in known if " " in name}
    # What follows the name of a group is a command; of a command, an argument.
    called = {" ".join(words.split()[: 2 if words.split()[0] in groups else 1]) for words in named}
    assert {"chat", "serve"} <= called
    assert called - known == set()


def test_the_readme_names_every_command() -> None:
    groups = {name.split()[0] for name in command_names()}
    assert groups - {words.split()[0] for words in named_commands(README)} == set()


@pytest.mark.parametrize("options", [EngineConfig, SamplingParams])
def test_the_guide_says_every_option_and_its_default(options: type) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for field in dataclasses.fields(options):
        shown = re.escape(str(field.default))
        assert re.search(rf"^\| `{field.name}` \| `?{shown}`? \|", guide, re.MULTILINE), field.name


def test_the_guide_says_every_exit_status() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", guide, re.MULTILINE)}
    assert rows == {code.value for code in ExitCode}


def test_the_guide_explains_every_error() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    assert [name for name in kinds if f"`{name}`" not in guide] == []


def test_every_file_that_the_readme_links_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_has_room_for_the_demo_and_the_figures() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    for name in ("demo output", "figures"):
        assert lines.count(f"<!-- {name} -->") == lines.count(f"<!-- /{name} -->") == 1


def test_the_guide_quotes_messages_that_exist() -> None:
    """Each part of a quoted message, between what changes in it, stands in the product's source."""
    folders = ("kernels", "tiers", "streamkv", "ws_server")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    constants = [node.value for tree in trees for node in ast.walk(tree) if _is_text(node)]
    guide = GUIDE.read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)`", guide.partition("## Troubleshooting")[2], re.MULTILINE)
    assert len(messages) >= 20
    parts = [part.strip(" '") for message in messages for part in message.split("...")]
    missing = [part for part in parts if not any(part in constant for constant in constants)]
    assert missing == []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)

"""Where the demo keeps things, and where it stops in a text."""

from pathlib import Path

import pytest

from streamkv.cli.demo_job import GoOn, Read
from streamkv.cli.demo_settings import COPY_STORE, DemoSettings
from streamkv.cli.text_file import TextFile


@pytest.fixture
def settings(tmp_path: Path) -> DemoSettings:
    path = tmp_path / "text.txt"
    path.write_text("First line.\nSecond, a longer one.\nThird")
    text = TextFile.check(path)
    return DemoSettings("tiny", "a text", text, 128, 4, 1 << 20, 60.0, tmp_path)


@pytest.mark.parametrize(
    ("start", "num_chars", "end"),
    [(0, 100, 12), (11, 100, 12), (12, 100, 34), (12, 10, 22), (34, 100, 39), (39, 5, 39)],
)
def test_a_stretch_ends_with_a_line_if_one_ends_soon(
    settings: DemoSettings, start: int, num_chars: int, end: int
) -> None:
    assert settings.line_end(start, num_chars) == end


def test_a_job_names_one_of_the_stores(settings: DemoSettings, tmp_path: Path) -> None:
    job = settings.job(COPY_STORE, Read(30), GoOn(50))
    assert job.store == str(tmp_path / "undisturbed")
    assert job.steps == (Read(30), GoOn(50))
    assert (job.window_size, job.num_sink_tokens, job.ssd_bytes) == (128, 4, 1 << 20)
    assert settings.journal(COPY_STORE) == tmp_path / "undisturbed" / "sessions" / "demo.journal"

"""A demo on the tiny model, run once; several tests look at it, or tamper with its copy."""

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from streamkv.cli import demo_kill
from streamkv.cli.console import Output
from streamkv.cli.demo_settings import COPY_STORE, DemoSettings
from streamkv.cli.demo_story import Outcome, Story
from streamkv.cli.text_file import TextFile
from streamkv.session_copy import SessionCopy, copy_session

TEXT = "".join(
    f"Entry {number}: the {animal} sleeps in the sun,\tand nothing is forgotten.\r\n"
    for number, animal in zip(range(1000), itertools.cycle(["dog", "fox", "café 🙂"]), strict=False)
)


@dataclass(frozen=True)
class DemoRun:
    """A demo that passed, and its copy as it was before the undisturbed run."""

    settings: DemoSettings
    outcome: Outcome
    pristine: Path

    def renew_copy(self) -> Path:
        """Put the copy back as it was taken; returns its store."""
        store = self.settings.store(COPY_STORE)
        shutil.rmtree(store)
        shutil.copytree(self.pristine, store)
        return store


def run_demo(model: Path, directory: Path) -> DemoRun:
    """Run the demo with a window of 128 tokens and all the time it wants."""
    path = directory / "text.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    settings = DemoSettings(
        str(model), "entries", TextFile.check(path), 128, 4, 64 << 20, 1e6, directory
    )
    pristine = directory / "pristine"

    def copy_twice(source: Path, target: Path, name: str) -> SessionCopy:
        copied = copy_session(source, target, name)
        shutil.copytree(target, pristine)
        return copied

    with patch.object(demo_kill, "copy_session", copy_twice):
        outcome = Story(settings, Output(as_json=True)).run()
    return DemoRun(settings, outcome, pristine)

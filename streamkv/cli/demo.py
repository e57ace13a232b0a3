"""`streamkv demo`: read a text far longer than the window, be killed, resume, lose nothing.

Invariant: exit status 0 means that every claim was checked in this run and held, 1 that one did
not hold. What was stored is removed at the end, whatever the end, unless --keep is given.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from streamkv.cli.console import Output, print_error
from streamkv.cli.demo_plan import MIN_CHARS_PER_WINDOW_TOKEN
from streamkv.cli.demo_settings import DemoSettings
from streamkv.cli.exit_codes import ExitCode
from streamkv.cli.options import JsonOption, ModelOption
from streamkv.cli.text_file import TextFile
from streamkv.config import format_size
from streamkv.errors import ConfigError, InputError, StoreError
from streamkv.model_files import DEFAULT_MODEL

MAX_STORE_BYTES = 512 << 20
MIN_STORE_BYTES = 128 << 20


def demo(
    file: Annotated[
        Path | None,
        typer.Argument(help="A text; without one, the reference that CPython carries."),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    window: Annotated[int, typer.Option("--window", help="Newest tokens attended.")] = 508,
    sinks: Annotated[int, typer.Option("--sinks", help="First tokens attended for ever.")] = 4,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Read only as much as fits in this time.")
    ] = 240.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the store, and say where.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read a long text through a small window, be killed, resume, and prove that nothing was lost.

    Takes under five minutes and at most 1 GiB of the temporary directory. Exit status 1: a check
    did not hold.
    """
    from streamkv.cli.demo_checks import CheckFailed
    from streamkv.cli.demo_child import ChildError
    from streamkv.cli.demo_story import Story
    from streamkv.cli.demo_verdict import say_verdict, summary

    output = Output(as_json)
    with _directory(keep, output) as directory:
        settings = _settings(file, model, window, sinks, seconds, directory)
        _introduce(settings, output)
        try:
            outcome = Story(settings, output).run()
        except CheckFailed as failure:
            output.json({"ok": False, "problem": str(failure)})
            print_error(f"a check of the demo failed: {failure}.")
            raise typer.Exit(ExitCode.FOUND_PROBLEM) from failure
        except ChildError as error:
            print_error(str(error))
            raise typer.Exit(error.exit_code) from error
        say_verdict(outcome, settings, output)
        output.json(summary(outcome, settings))


def _settings(
    file: Path | None, model: str, window: int, sinks: int, seconds: float, directory: Path
) -> DemoSettings:
    if not seconds > 0:
        raise ConfigError("seconds", seconds, "not a time", "Use a number of seconds above 0.")
    title = file.name if file else "the Python language reference (pydoc_data.topics)"
    text = TextFile.check(file or _write_reference(directory))
    wanted = MIN_CHARS_PER_WINDOW_TOKEN * window
    if text.num_chars < wanted:
        remedy = f"Give a text of at least {wanted:,} characters, or a smaller --window."
        problem = f"{text.num_chars:,} characters are not many times a window of {window} tokens"
        raise InputError("file", str(text.path), problem, remedy)
    return DemoSettings(
        model, title, text, window, sinks, _store_bytes(directory), seconds, directory
    )


def _write_reference(directory: Path) -> Path:
    from pydoc_data.topics import topics

    path = directory / "reference.txt"
    text = "\n".join(topics[name] for name in sorted(topics))
    path.write_text(text, encoding="utf-8", newline="")
    return path


def _store_bytes(directory: Path) -> int:
    """Limit of each of the two stores, on a disk that may be nearly full."""
    room = shutil.disk_usage(directory).free // 3
    if room < MIN_STORE_BYTES:
        raise StoreError(
            f"{directory}: {format_size(3 * room)} are free on this disk, the demo needs "
            f"{format_size(3 * MIN_STORE_BYTES)}. Free some space, or set TMPDIR to another disk."
        )
    return min(MAX_STORE_BYTES, room)


@contextmanager
def _directory(keep: bool, output: Output) -> Iterator[Path]:
    """A directory for the stores, removed at the end, also when the process is terminated."""
    directory = Path(tempfile.mkdtemp(prefix="streamkv-demo-"))
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield directory
    finally:
        signal.signal(signal.SIGTERM, before)
        if keep:
            output.note(f"Kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _end(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def _introduce(settings: DemoSettings, output: Output) -> None:
    output.line(
        f"{settings.model} reads {settings.title}, {settings.text.num_chars:,} characters, through "
        f"a window of {settings.window_size} tokens and {settings.num_sink_tokens} sink tokens, in "
        "fp32."
    )

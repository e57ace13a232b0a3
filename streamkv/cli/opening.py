"""Opening an engine for a command, and ending well when a person interrupts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streamkv.cli.console import Output
from streamkv.cli.options import EngineOptions

if TYPE_CHECKING:
    from streamkv.engine import Engine


@contextmanager
def open_engine(options: EngineOptions, output: Output) -> "Iterator[Engine]":
    """The engine, closed at the end; says what takes long meanwhile.

    Raises:
        ConfigError, ModelError, StoreError: as `Engine`.
    """
    with output.busy(f"Loading {options.model} ..."):
        from streamkv.engine import Engine

        engine = Engine(options.model, options.config, on_progress=output.note)
    with engine:
        yield engine


@contextmanager
def resumable(output: Output, how: str) -> Iterator[None]:
    """On Ctrl-C say how to go on; the exit status is that of an interrupt."""
    try:
        yield
    except KeyboardInterrupt:
        output.note(f"\nInterrupted; nothing is lost. Go on with: {how}")
        raise

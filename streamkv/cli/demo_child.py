"""A reading process, seen from the demo: its events, its leash, and its end.

Invariant: a process that was started is gone when its `with` block is left, whatever happened. It
computes at most `AHEAD + 1` steps beyond the last `Reading` that was answered.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from streamkv.cli.demo_job import GO_ON, Event, Failed, Job, Reading, decode_event, encode_job
from streamkv.errors import StreamKVError

AHEAD = 1
"""Readings that need no answer before the process goes on: it does not wait for a display."""

_LAST_WORDS_BYTES = 4000


class ChildError(StreamKVError):
    """A reading process ended where it should not have.

    Attributes:
        exit_code: what the demo should exit with.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """Starts a process for one job. A context manager.

    Args:
        job: what it does.
    """

    def __init__(self, job: Job) -> None:
        # Not a pipe: nobody reads it while the process lives.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "streamkv.cli.demo_reader", encode_job(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            self._errors.close()
            raise
        for _ in range(AHEAD):
            self._let_go_on()

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    def events(self) -> Iterator[Event]:
        """What it says, until it ends; a `Reading` is answered when the next event is asked for.

        Raises:
            ChildError: it failed, or died.
        """
        for event in self._lines():
            if isinstance(event, Failed):
                raise ChildError(event.message, event.exit_code)
            yield event
            if isinstance(event, Reading):
                self._let_go_on()
        if self._process.wait() != 0:
            raise ChildError(
                f"the reading process {self.process_id} ended with {self._process.returncode}: "
                f"{self._last_words()}",
                exit_code=70,
            )

    def kill(self) -> list[Event]:
        """Kill it with SIGKILL; returns what it had said and nobody had read.

        Raises:
            ChildError: it had ended by itself.
        """
        self._process.send_signal(signal.SIGKILL)
        unread = list(self._lines())
        if self._process.wait() != -signal.SIGKILL:
            raise ChildError(
                f"the reading process {self.process_id} had ended before it was killed",
                exit_code=70,
            )
        return unread

    def close(self) -> None:
        """End it if it still runs. Closing twice is allowed."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                _close_quietly(stream)
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lines(self) -> Iterator[Event]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A killed process may leave part of a line: it did not say that.
            if line.endswith("\n"):
                yield decode_event(line)

    def _let_go_on(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(GO_ON)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended; its last events tell why

    def _last_words(self) -> str:
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - _LAST_WORDS_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _close_quietly(stream: object) -> None:
    try:
        stream.close()  # type: ignore[attr-defined]  # one of the process's pipes
    except BrokenPipeError:
        return

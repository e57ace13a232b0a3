"""What of a summary is done: one JSON object per line, appended after each success.

Invariant: a record in the ledger is complete and on the disk before the run goes on. A torn last
line (a crash while writing) is cut off at open, so that the next record does not grow together with
it.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from streamkv.errors import StoreError
from streamkv.summarize.result import (
    Overall,
    SegmentSummary,
    segment_from_json,
    segment_to_json,
)


@dataclass(slots=True)
class Ledger:
    """The record of one run. Without a path it lives in memory only.

    Attributes:
        summaries: finished segments by index.
        overall: the overall summary once it is made.
    """

    path: Path | None
    summaries: dict[int, SegmentSummary] = field(default_factory=dict)
    overall: Overall | None = None

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """Read the ledger, or begin one.

        Raises:
            StoreError: it cannot be read or written.
        """
        ledger = cls(path)
        if path is None:
            return ledger
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                data = file.read()
                good = ledger._read(data)
                if good < len(data):
                    file.truncate(good)
        except OSError as error:
            raise _error(path, error) from error
        return ledger

    def finish_segment(self, summary: SegmentSummary) -> None:
        """A segment is summarised."""
        self._append({"segment": segment_to_json(summary)})
        self.summaries[summary.index] = summary

    def finish(self, overall: Overall) -> None:
        """The overall summary is made."""
        self._append({"overall": {"text": overall.text, "problem": overall.problem}})
        self.overall = overall

    def _read(self, data: bytes) -> int:
        """Take in the records; returns the bytes up to the first that is torn or unreadable."""
        good = 0
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                break
            good += len(line)
        return good

    def _take(self, record: dict[str, Any]) -> None:
        if "segment" in record:
            summary = segment_from_json(record["segment"])
            self.summaries[summary.index] = summary
        else:
            overall = record["overall"]
            self.overall = Overall(str(overall["text"]), str(overall["problem"]))

    def _append(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _error(self.path, error) from error


def _error(path: Path, error: OSError) -> StoreError:
    reason = error.strerror or str(error)
    return StoreError(f"ledger {path}: {reason}. Make room, or give another store directory.")

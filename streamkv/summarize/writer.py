"""A finished summary as Markdown or JSON; a reader of the file sees the old one or the new one."""

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from streamkv.errors import InputError
from streamkv.summarize.result import Gap, Place, Point, SegmentSummary, SummaryResult

SummaryFormat = Literal["markdown", "json"]
SUFFIXES: dict[SummaryFormat, str] = {"markdown": ".summary.md", "json": ".summary.json"}
MAX_SHOWN_SPEAKERS = 6
MAX_SHOWN_WARNINGS = 20


def output_path(source: Path, out: Path | None, format: SummaryFormat) -> Path:
    """Where the summary of `source` goes: `out`, or under that directory, or beside `source`.

    Raises:
        InputError: the directory is not there or cannot be written to, or `out` is the transcript.
    """
    path = source.with_name(source.name + SUFFIXES[format])
    if out is not None:
        path = out / path.name if out.is_dir() else out
    if path.exists() and path.samefile(source):
        raise InputError("out", str(path), "that is the transcript", "Give another file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(
            "out", str(path), "its directory is not there or not writable", "Give another file."
        )
    return path


def write_summary(result: SummaryResult, path: Path, format: SummaryFormat) -> None:
    """Write the summary to `path`, replacing what is there only when it is complete on the disk.

    Raises:
        InputError: the file cannot be written.
    """
    text = to_markdown(result) if format == "markdown" else to_json(result)
    try:
        _write_atomically(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("out", str(path), reason, "Give a file that can be written.") from error


def to_json(result: SummaryResult) -> str:
    """The whole result as one JSON object."""
    data: dict[str, Any] = {"version": 1, **dataclasses.asdict(result)}
    data["warnings"] = [str(warning) for warning in result.warnings]
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"


def to_markdown(result: SummaryResult) -> str:
    """The result for people."""
    name = Path(result.file).name
    parts = [f"# Summary of {_inline(name)}", _overall(result)]
    parts += [_segment(segment) for segment in result.segments]
    parts.append(_made_from(result))
    if result.warnings:
        parts.append(_warnings(result))
    return "\n\n".join(parts) + "\n"


def _overall(result: SummaryResult) -> str:
    texts = [_inline(result.overall.text)] if result.overall.text else []
    if result.overall.problem:
        texts.append(f"*{_inline(result.overall.problem)}*")
    return "\n\n".join(texts)


def _segment(segment: SegmentSummary) -> str:
    lines = [f"## {segment.index + 1}. {_place(segment.place)}", ""]
    lines += [_point(point, segment.place) for point in segment.points]
    lines += [_gap(gap) for gap in segment.gaps]
    return "\n".join(lines)


def _point(point: Point, around: Place) -> str:
    where = "" if point.place == around else f" *({_place(point.place)})*"
    return f"- {_inline(point.text)}{where}"


def _gap(gap: Gap) -> str:
    return (
        f"- **No summary** of {_place(gap.place)}: {_inline(gap.problem)}. "
        f"It begins: “{_inline(gap.begins)}”"
    )


def _place(place: Place) -> str:
    lines = f"lines {place.first_line}–{place.last_line}"
    if place.first_line == place.last_line:
        lines = f"line {place.first_line}"
    shown = [_inline(name) for name in place.speakers[:MAX_SHOWN_SPEAKERS]]
    if len(place.speakers) > len(shown):
        shown.append(f"{len(place.speakers) - len(shown)} more")
    return " · ".join(part for part in (str(place.time_range), ", ".join(shown), lines) if part)


def _made_from(result: SummaryResult) -> str:
    num_gaps = len(result.gaps)
    gaps = {0: "none without a summary", 1: "1 place without a summary"}.get(
        num_gaps, f"{num_gaps} places without a summary"
    )
    return (
        "---\n\n"
        f"{result.coverage.num_lines} lines read as {result.format} ({result.encoding}), all "
        f"covered, in {len(result.segments)} parts, {gaps}. Written by {_inline(result.model)}: a "
        f"language model, which may be wrong. Session: `{result.session}`."
    )


def _warnings(result: SummaryResult) -> str:
    shown = result.warnings[:MAX_SHOWN_WARNINGS]
    lines = [f"Malformed in the file ({result.num_warnings}):", ""]
    lines += [f"- {_inline(str(warning))}" for warning in shown]
    if result.num_warnings > len(shown):
        lines.append(f"- and {result.num_warnings - len(shown)} more")
    return "\n".join(lines)


def _inline(text: str) -> str:
    """On one line, and harmless in Markdown: HTML would be run by a viewer."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(shown.split()).replace("<", "&lt;")


def _write_atomically(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

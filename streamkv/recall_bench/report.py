"""A finished run as figures and as tables.

The figures have the form of the other benchmarks' results: by name, each with value and unit. Pure;
what machine and versions are is told by the caller.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamkv.recall_bench import statistics
from streamkv.recall_bench.answers import Answer, NotPossible
from streamkv.recall_bench.haystack import OWN_TEXT
from streamkv.recall_bench.modes import FULL, MODES, RECALL
from streamkv.recall_bench.statistics import Row, Share

Table = list[Sequence[object]]

ROW_HEADER = (
    "length",
    "mode",
    "found",
    "share",
    "95 % interval",
    "beyond window",
    "needle recalled",
    "answer tokens/s",
)


def report(
    setting: Mapping[str, Any], answers: Sequence[Answer], not_possible: Iterable[NotPossible]
) -> dict[str, Any]:
    """All of a run as JSON values: commit, date, machine and versions are those of `setting`."""
    about = ("commit", "date", "machine", "versions")
    asked = {  # by this run and those before it
        "lengths": sorted({answer.length for answer in answers}),
        "modes": [mode for mode in MODES if any(answer.mode == mode for answer in answers)],
    }
    kept = {name: value for name, value in setting.items() if name not in (*about, "questions")}
    return {
        "benchmark": "recall",
        **{name: setting.get(name) for name in about},
        "setting": {**kept, **asked},
        "figures": figures(answers),
        "cells": [
            {**cell._asdict(), "found": share.found, "asked": share.asked}
            for cell, share in sorted(statistics.by_cell(answers).items())
        ],
        "not_possible": [refused._asdict() for refused in not_possible],
        "notes": notes(setting, not_possible),
    }


def figures(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Figures by name, such as `window_4096_found`."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, share: Share) -> None:
        if share.value is not None:
            found[name] = {
                "value": share.value,
                "unit": "share",
                "better": "higher",
                "ok": True,
                "found": share.found,
                "asked": share.asked,
                "low": share.interval.low,
                "high": share.interval.high,
            }

    def add_rates(what: str, rates: Mapping[Row, float], unit: str) -> None:
        for row, value in sorted(rates.items()):
            name = f"{row.mode}_{row.length}_{what}"
            found[name] = {"value": value, "unit": unit, "better": "higher", "ok": True}

    for what, rows in (
        ("found", statistics.by_row(answers)),
        ("found_beyond_window", statistics.beyond_window(answers)),
        ("needle_recalled", statistics.needle_recalled(answers)),
    ):
        for row, share in sorted(rows.items()):
            add(f"{row.mode}_{row.length}_{what}", share)
    for length, share in statistics.agreement(answers, RECALL, FULL).items():
        add(f"recall_of_full_{length}", share)
    add_rates("feed_tokens_per_s", statistics.feed_rates(answers), "tokens/s")
    add_rates("answer_tokens_per_s", statistics.answer_rates(answers), "tokens/s")
    add_rates("recalled_blocks", statistics.mean_recalled_blocks(answers), "blocks")
    return found


def notes(setting: Mapping[str, Any], not_possible: Iterable[NotPossible]) -> list[str]:
    """Sentences about a run."""
    said = [f"text: {setting.get('data')}"]
    if setting.get("data") == OWN_TEXT:
        said.append("made without --data, so not comparable with published figures")
    said += [f"{refused.mode} is not possible: {refused.reason}" for refused in not_possible]
    return said


def row_table(answers: Sequence[Answer], not_possible: Iterable[NotPossible]) -> Table:
    """One line for each length and mode, under `ROW_HEADER`."""
    beyond = statistics.beyond_window(answers)
    recalled = statistics.needle_recalled(answers)
    rates = statistics.answer_rates(answers)
    lines: dict[Row, Sequence[object]] = {}
    for row, share in statistics.by_row(answers).items():
        low, high = share.interval
        lines[row] = (
            f"{row.length:,}",
            row.mode,
            share,
            f"{share.found / share.asked:.0%}",
            f"{low:.0%} to {high:.0%}",
            beyond.get(row, "-"),
            recalled.get(row, "-"),
            f"{rates[row]:.1f}",
        )
    for refused in not_possible:
        row = Row(refused.mode, refused.length)
        lines.setdefault(
            row, (f"{refused.length:,}", refused.mode, "not possible", "-", "-", "-", "-", "-")
        )
    return [lines[row] for row in sorted(lines, key=_by_length)]


def depth_table(answers: Sequence[Answer], mode: str) -> tuple[Sequence[str], Table]:
    """Header and lines of one mode: a line for each depth, a column for each length."""
    cells = {
        cell: share for cell, share in statistics.by_cell(answers).items() if cell.mode == mode
    }
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    found = {(cell.length, cell.depth): share for cell, share in cells.items()}
    header = [f"{mode}: depth", *(f"{length:,}" for length in lengths)]
    lines: Table = [
        [f"{depth:g}", *(found.get((length, depth), "-") for length in lengths)] for depth in depths
    ]
    return header, lines


def feed_table(answers: Sequence[Answer]) -> Table:
    """Tokens/s of reading, for each length and mode."""
    rates = statistics.feed_rates(answers)
    return [
        (f"{row.length:,}", row.mode, f"{rates[row]:,.0f}") for row in sorted(rates, key=_by_length)
    ]


def agreement_lines(answers: Sequence[Answer]) -> list[str]:
    """How many of the questions that `full` answers `recall` answers."""
    return [
        f"{length:,} tokens: recall answers {share} of the questions that full answers, "
        f"95 % interval {share.interval.low:.0%} to {share.interval.high:.0%}"
        for length, share in statistics.agreement(answers, RECALL, FULL).items()
        if share.asked
    ]


def _by_length(row: Row) -> tuple[int, int]:
    return row.length, MODES.index(row.mode)

"""A run as a picture: lengths across, depths down, one panel for each mode.

Needs matplotlib, which is imported only here. Colours are cividis, whose lightness rises evenly: it
reads the same in greyscale and to colour-blind eyes; every cell also says its numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamkv.errors import InputError
from streamkv.recall_bench import statistics
from streamkv.recall_bench.answers import Answer, NotPossible
from streamkv.recall_bench.modes import MODES
from streamkv.recall_bench.statistics import Cell, Share

INSTALL = "pip install 'streamkv[bench]', or pip install matplotlib"
COLOURS = "cividis"
DARK = 0.5
"""Shares below it have a dark cell and light text."""

PANELS_ACROSS = 2
"""So that a page shows them at a size that can be read."""

NOT_POSSIBLE = "not\npossible"


@dataclass(frozen=True, slots=True)
class Panel:
    """What one panel shows.

    Attributes:
        mode: its title.
        lengths, depths: columns, and rows from the top.
        cells: share of each length and depth, by (row, column); `None` where nothing was asked.
        refused: columns in which the mode cannot be asked.
    """

    mode: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cells: dict[tuple[int, int], Share | None]
    refused: frozenset[int]

    def text(self, row: int, column: int) -> str:
        """What a cell says."""
        share = self.cells[row, column]
        if share is not None:
            return str(share)
        return NOT_POSSIBLE if column in self.refused else ""


def panels(answers: Sequence[Answer], not_possible: Sequence[NotPossible]) -> list[Panel]:
    """Panels of all modes, on the same lengths and depths."""
    shares = statistics.by_cell(answers)
    refused = {(entry.mode, entry.length) for entry in not_possible}
    lengths = tuple(sorted({c.length for c in shares} | {length for _, length in refused}))
    depths = tuple(sorted({cell.depth for cell in shares}))
    shown = {cell.mode for cell in shares} | {mode for mode, _ in refused}
    return [
        Panel(
            mode,
            lengths,
            depths,
            {
                (row, column): shares.get(Cell(mode, length, depth))
                for row, depth in enumerate(depths)
                for column, length in enumerate(lengths)
            },
            frozenset(column for column, length in enumerate(lengths) if (mode, length) in refused),
        )
        for mode in MODES
        if mode in shown
    ]


def caption(setting: Mapping[str, Any]) -> str:
    """What stands under the picture."""
    window, sinks = setting.get("window_size"), setting.get("num_sink_tokens")
    return (
        f"{setting.get('model')} ({setting.get('dtype')}), window {window:,} + {sinks} sink "
        f"tokens, recall k = {setting.get('recall_blocks')} blocks, read in "
        f"{setting.get('feed_in')}, "
        f"seed {setting.get('seed')}, {str(setting.get('date'))[:10]}. "
        "Cells: questions answered of questions asked."
    )


def has_matplotlib() -> bool:
    """Whether a picture can be drawn."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError:
        return False
    return True


def draw(
    path: Path,
    setting: Mapping[str, Any],
    answers: Sequence[Answer],
    not_possible: Sequence[NotPossible],
) -> None:
    """Write the picture as a PNG.

    Raises:
        InputError: there is no answer to show.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if not answers:
        raise InputError("answers", str(path), "no answer to draw", "Run some questions first.")
    figure = make_figure(setting, answers, not_possible)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def make_figure(
    setting: Mapping[str, Any], answers: Sequence[Answer], not_possible: Sequence[NotPossible]
) -> Any:
    """The picture as a figure of matplotlib: a panel for each mode, and a bar of colours."""
    from matplotlib.figure import Figure

    shown = panels(answers, not_possible)
    across = min(len(shown), PANELS_ACROSS)
    down = -(-len(shown) // across)
    width = max(across * (0.5 + 0.68 * len(shown[0].lengths)) + 1.2, 6.5)
    height = 0.9 + down * (0.8 + 0.34 * len(shown[0].depths))
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for panel, axis in zip(shown, axes, strict=False):
        image = _draw_panel(axis, panel)
    for unused in axes[len(shown) :]:
        unused.remove()
    for first in axes[::across]:
        first.set_ylabel("depth of the needle")
    bar = figure.colorbar(image, ax=list(axes[: len(shown)]), shrink=0.9, pad=0.01)
    bar.set_label("share found")
    figure.suptitle("How often a number hidden in real text is found")
    figure.supxlabel(caption(setting), fontsize="x-small", wrap=True)
    return figure


def _draw_panel(axis: Any, panel: Panel) -> Any:
    import matplotlib
    import numpy as np

    colours = matplotlib.colormaps[COLOURS].with_extremes(bad="white")
    values = np.full((len(panel.depths), len(panel.lengths)), np.nan)
    for (row, column), share in panel.cells.items():
        if share is not None and share.value is not None:
            values[row, column] = share.value
    shown = np.ma.masked_invalid(values)
    image = axis.imshow(shown, cmap=colours, vmin=0, vmax=1, aspect="auto")
    for row, column in panel.cells:
        share = panel.cells[row, column]
        is_dark = share is not None and (share.value or 0.0) < DARK
        if share is not None:
            colour = "white" if is_dark else "black"
            axis.text(
                column,
                row,
                panel.text(row, column),
                ha="center",
                va="center",
                color=colour,
                fontsize="small",
            )
    for column in panel.refused:
        _draw_refused(axis, panel, column)
    _draw_lines(axis, panel)
    axis.set_title(panel.mode)
    axis.set_xlabel("tokens")
    axis.set_xticks(range(len(panel.lengths)), [_short(length) for length in panel.lengths])
    axis.set_yticks(range(len(panel.depths)), [f"{depth:g}" for depth in panel.depths])
    return image


def _draw_lines(axis: Any, panel: Panel) -> None:
    """Thin lines between cells: equal shares side by side stay apart."""
    for count, line in ((len(panel.lengths), axis.axvline), (len(panel.depths), axis.axhline)):
        for place in range(1, count):
            line(place - 0.5, color="white", linewidth=0.8)


def _draw_refused(axis: Any, panel: Panel, column: int) -> None:
    """A hatched column that says so once."""
    from matplotlib.patches import Rectangle

    if any(panel.cells[row, column] is not None for row in range(len(panel.depths))):
        return
    place, height = (column - 0.5, -0.5), len(panel.depths)
    axis.add_patch(
        Rectangle(place, 1, height, facecolor="white", edgecolor="0.75", hatch="//", linewidth=0)
    )
    axis.text(
        column,
        (height - 1) / 2,
        NOT_POSSIBLE.replace("\n", " "),
        ha="center",
        va="center",
        rotation=90,
        fontsize="small",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


def _short(length: int) -> str:
    """A length for an axis: 512, 4k, 1M."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if length % size == 0:
            return f"{length // size}{unit}"
    return f"{length:,}"

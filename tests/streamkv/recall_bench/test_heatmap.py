"""The picture: the right cell in the right place, in colours that everyone can tell apart."""

import struct
from pathlib import Path
from typing import Any

import pytest
from recall_answers import answer

from streamkv.errors import InputError
from streamkv.recall_bench import heatmap
from streamkv.recall_bench.answers import NotPossible
from streamkv.recall_bench.statistics import Share

SETTING: dict[str, Any] = {
    "model": "smollm2-135m",
    "dtype": "float32",
    "window_size": 2048,
    "num_sink_tokens": 4,
    "recall_blocks": 16,
    "feed_in": "window",
    "seed": 0,
    "date": "2026-11-30T04:11:38+00:00",
}
ANSWERS = [
    *(answer(index=n, depth=0.1, mode="window", found=False) for n in range(3)),
    *(answer(index=n, depth=0.9, mode="window", found=n < 2) for n in range(3)),
    answer(index=0, depth=0.1, mode="dense", found=True),
    answer(index=0, depth=0.1, mode="window", found=False, length=8192),
]
REFUSED = [NotPossible("dense", 8192, "beyond the trained length")]

needs_matplotlib = pytest.mark.skipif(
    not heatmap.has_matplotlib(), reason="matplotlib is not installed (the extra `bench`)"
)


def test_panels_have_every_cell_in_its_place() -> None:
    window, dense = heatmap.panels(ANSWERS, REFUSED)
    assert (window.mode, dense.mode) == ("window", "dense")
    for panel in (window, dense):
        assert (panel.lengths, panel.depths) == ((1024, 8192), (0.1, 0.9))
    assert window.cells == {
        (0, 0): Share(0, 3),
        (0, 1): Share(0, 1),
        (1, 0): Share(2, 3),
        (1, 1): None,
    }
    assert window.text(1, 0) == "2/3"
    assert window.text(1, 1) == ""
    assert (window.refused, dense.refused) == (frozenset(), frozenset({1}))
    assert dense.text(0, 1) == heatmap.NOT_POSSIBLE


def test_the_caption_says_what_was_measured() -> None:
    said = heatmap.caption(SETTING)
    for part in ("smollm2-135m", "window 2,048 + 4 sink", "k = 16", "seed 0", "2026-11-30"):
        assert part in said


@needs_matplotlib
def test_a_png_of_all_panels_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "recall.png"
    heatmap.draw(path, SETTING, ANSWERS, REFUSED)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 200


@needs_matplotlib
def test_cells_show_their_share_and_say_their_numbers() -> None:
    figure = heatmap.make_figure(SETTING, ANSWERS, REFUSED)
    window, dense, bar = figure.axes
    assert [axis.get_title() for axis in (window, dense)] == ["window", "dense"]
    [image] = window.images
    shown = image.get_array().filled(-1.0).tolist()
    assert shown == [[0.0, 0.0], [pytest.approx(2 / 3), -1.0]]
    said = {text.get_position(): text.get_text() for text in window.texts}
    assert said == {(0, 0): "0/3", (1, 0): "0/1", (0, 1): "2/3"}
    assert [text.get_text() for text in dense.texts] == ["1/1", "not possible"]
    assert [tick.get_text() for tick in window.get_xticklabels()] == ["1k", "8k"]
    assert [tick.get_text() for tick in window.get_yticklabels()] == ["0.1", "0.9"]
    assert (window.get_xlabel(), window.get_ylabel()) == ("tokens", "depth of the needle")
    assert bar.get_ylabel() == "share found"


@needs_matplotlib
def test_colours_grow_lighter_with_the_share_and_text_stands_out() -> None:
    import matplotlib

    colours = matplotlib.colormaps[heatmap.COLOURS]

    def lightness(share: float) -> float:
        red, green, blue, _ = colours(share)
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    steps = [lightness(step / 20) for step in range(21)]
    assert steps == sorted(steps)
    for step in range(21):
        under = steps[step]
        text = 1.0 if step / 20 < heatmap.DARK else 0.0
        contrast = (max(under, text) + 0.05) / (min(under, text) + 0.05)
        assert contrast >= 3, step / 20


@needs_matplotlib
def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no answer to draw"):
        heatmap.draw(tmp_path / "recall.png", SETTING, [], REFUSED)

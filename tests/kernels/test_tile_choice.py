"""Fastest tiles: measured once, remembered, and measured again where the file is of no use."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamkv.kernels.small_batch import Tile
from streamkv.kernels.tile_choice import TileChoice

SLOW, FAST, OTHER = Tile(16, 64, 4, 3, False), Tile(32, 128, 4, 6, False), Tile(64, 64, 4, 4, True)
TILES = (SLOW, FAST, OTHER)
MILLISECONDS = {SLOW: 3.0, FAST: 1.0, OTHER: 2.0}
DEVICE = "NVIDIA H200"


class Clock:
    """Times by table; remembers what it was asked."""

    def __init__(self, milliseconds: dict[Tile, float] = MILLISECONDS) -> None:
        self._milliseconds = milliseconds
        self.asked: list[Tile] = []

    def __call__(self, tile: Tile) -> float:
        self.asked.append(tile)
        return self._milliseconds[tile]


def choose(
    choice: TileChoice, name: str = "qkv", tiles: Sequence[Tile] = TILES
) -> tuple[Tile, list[Tile]]:
    """What is chosen, and what was measured for it."""
    clock = Clock()
    return choice.choose(name, tiles, clock), clock.asked


def remembered(directory: Path, device: str = DEVICE, name: str = "qkv") -> TileChoice:
    """A choice that has measured and saved."""
    choice = TileChoice(directory, device)
    choose(choice, name)
    choice.save()
    return choice


@pytest.mark.parametrize("has_file", [False, True])
def test_the_fastest_is_measured_once_for_each_product(tmp_path: Path, has_file: bool) -> None:
    choice = TileChoice(tmp_path if has_file else None, DEVICE)
    assert choose(choice) == (FAST, list(TILES))
    assert choose(choice) == (FAST, [])
    assert choose(choice, "down", (SLOW, OTHER)) == (OTHER, [SLOW, OTHER])
    assert choose(choice) == (FAST, [])
    choice.save()


def test_a_single_tile_needs_no_measuring() -> None:
    assert choose(TileChoice(None, DEVICE), tiles=(SLOW,)) == (SLOW, [])


def test_the_next_process_remembers(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "cache"
    remembered(directory)
    again = TileChoice(directory, DEVICE)
    assert choose(again) == (FAST, [])
    assert choose(again, "o") == (FAST, list(TILES))
    again.save()
    both = TileChoice(directory, DEVICE)
    assert choose(both) == choose(both, "o") == (FAST, [])
    assert [path.name for path in directory.iterdir()] == ["tiles.json"]


def test_what_another_process_saved_meanwhile_stays(tmp_path: Path) -> None:
    first, second = TileChoice(tmp_path, DEVICE), TileChoice(tmp_path, DEVICE)
    choose(first, "qkv")
    choose(second, "o")
    first.save()
    second.save()
    both = TileChoice(tmp_path, DEVICE)
    assert choose(both, "qkv") == choose(both, "o") == (FAST, [])


def test_what_is_not_saved_is_not_remembered(tmp_path: Path) -> None:
    choose(TileChoice(tmp_path, DEVICE))
    assert list(tmp_path.iterdir()) == []
    assert choose(TileChoice(tmp_path, DEVICE)) == (FAST, list(TILES))


def test_devices_do_not_share_tiles_and_keep_those_of_others(tmp_path: Path) -> None:
    remembered(tmp_path)
    foreign = TileChoice(tmp_path, "NVIDIA H100")
    assert choose(foreign) == (FAST, list(TILES))
    foreign.save()
    assert choose(TileChoice(tmp_path, DEVICE)) == (FAST, [])
    assert choose(TileChoice(tmp_path, "NVIDIA H100")) == (FAST, [])


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_tiles_of_another_version_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    remembered(tmp_path)
    monkeypatch.setattr(f"{package}.__version__", "0.1")
    assert choose(TileChoice(tmp_path, DEVICE)) == (FAST, list(TILES))


def test_a_tile_that_is_no_candidate_any_more_is_not_chosen(tmp_path: Path) -> None:
    remembered(tmp_path)
    choice = TileChoice(tmp_path, DEVICE)
    assert choose(choice, tiles=(SLOW, OTHER)) == (OTHER, [SLOW, OTHER])
    choice.save()
    assert choose(TileChoice(tmp_path, DEVICE), tiles=(SLOW, OTHER)) == (OTHER, [])


def damage(path: Path, device: object = None, product: object = None, tile: object = None) -> None:
    """Put something else in place of a level of the file."""
    if device is None:
        found = json.loads(path.read_text())
        [about] = found
        device = {about: {"qkv": tile} if product is None else product}
    path.write_text(json.dumps(device))


@pytest.mark.parametrize(
    "damaged",
    [
        {"device": [1, 2]},
        {"device": "tiles"},
        {"device": {}},
        {"product": ["qkv"]},
        {"product": 3},
        {"tile": [32, 128]},
        {"tile": {}},
        {"tile": {"out": 32, "chunk": 128, "num_warps": 4, "num_stages": 6}},
        {"tile": {"out": 32, "chunk": 128, "num_warps": 4, "num_stages": 6, "swap": 0, "x": 1}},
        {"tile": {"out": 33, "chunk": 128, "num_warps": 4, "num_stages": 6, "swap": False}},
        {"tile": {"out": "32", "chunk": [], "num_warps": {}, "num_stages": 6, "swap": False}},
    ],
    ids=str,
)
def test_a_file_that_holds_something_else_costs_time_only(
    tmp_path: Path, damaged: dict[str, object]
) -> None:
    remembered(tmp_path)
    damage(tmp_path / "tiles.json", **damaged)
    choice = TileChoice(tmp_path, DEVICE)
    assert choose(choice) == (FAST, list(TILES))
    choice.save()
    assert choose(TileChoice(tmp_path, DEVICE)) == (FAST, [])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"a": {"qkv": {"out": 3'])
def test_a_file_that_is_cut_or_no_text_costs_time_only(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiles.json").write_bytes(content)
    choice = TileChoice(tmp_path, DEVICE)
    assert choose(choice) == (FAST, list(TILES))
    choice.save()
    assert choose(TileChoice(tmp_path, DEVICE)) == (FAST, [])


def test_numbers_of_another_type_do_not_reach_a_kernel(tmp_path: Path) -> None:
    remembered(tmp_path)
    tile = {"out": 32.0, "chunk": 128.0, "num_warps": 4, "num_stages": 6.0, "swap": 0}
    damage(tmp_path / "tiles.json", tile=tile)
    found, _ = choose(TileChoice(tmp_path, DEVICE))
    assert found == FAST
    assert [type(value) for value in (found.out, found.chunk, found.swap)] == [int, int, bool]


def unwritable(tmp_path: Path, kind: str) -> Path:
    """A directory that cannot be made, or whose file cannot be replaced."""
    if kind == "a file is in the way":
        (tmp_path / "cache").write_text("")
    else:
        (tmp_path / "cache" / "tiles.json" / "full").mkdir(parents=True)
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["a file is in the way", "a directory is in the way"])
def test_a_place_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    choice = TileChoice(unwritable(tmp_path, kind), DEVICE)
    assert choose(choice) == (FAST, list(TILES))
    with caplog.at_level(logging.WARNING):
        choice.save()
    [record] = caplog.records
    assert "could not be remembered" in record.getMessage()
    assert choose(choice) == (FAST, [])


def test_an_unwritable_place_keeps_nothing_half_written(tmp_path: Path) -> None:
    directory = unwritable(tmp_path, "a directory is in the way")
    choice = TileChoice(directory, DEVICE)
    choose(choice)
    choice.save()
    assert [path.name for path in directory.iterdir()] == ["tiles.json"]


def test_a_write_that_fails_is_made_good_by_the_next(tmp_path: Path) -> None:
    directory = unwritable(tmp_path, "a file is in the way")
    choice = TileChoice(directory, DEVICE)
    choose(choice)
    choice.save()
    directory.unlink()
    choice.save()
    assert choose(TileChoice(directory, DEVICE)) == (FAST, [])


def test_the_old_file_stays_whole_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while it writes: whatever it had written lies beside the file."""
    remembered(tmp_path)
    before = (tmp_path / "tiles.json").read_bytes()
    choice = TileChoice(tmp_path, DEVICE)
    choose(choice, "o")

    class Died(BaseException):
        pass

    def die(*args: object) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        with pytest.raises(Died):
            choice.save()
    assert (tmp_path / "tiles.json").read_bytes() == before
    choice.save()
    again = TileChoice(tmp_path, DEVICE)
    assert choose(again) == choose(again, "o") == (FAST, [])


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    choice = remembered(tmp_path)
    (tmp_path / "tiles.json").unlink()
    choice.save()
    TileChoice(tmp_path, DEVICE).save()
    assert list(tmp_path.iterdir()) == []

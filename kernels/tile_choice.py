"""Which tile is fastest for a product: measured on this device, remembered in a file.

Tiles differ in speed, and in rounding only as the order of a sum does. The file names device and
versions; what it does not hold is measured. A file that cannot be read or written costs time, never
an answer.
"""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from streamkv.kernels.small_batch import Tile

_log = logging.getLogger(__name__)

Timing = Callable[[Tile], float]


class TileChoice:
    """Remembers the fastest tile of each product.

    Args:
        directory: where the file lies; `None` remembers in this process only.
        device: its name.
    """

    def __init__(self, directory: Path | None, device: str) -> None:
        self._about = f"{device}, torch {torch.__version__}, triton {triton.__version__}"
        self._path = directory / "tiles.json" if directory is not None else None
        self._known: dict[str, Tile] = self._read()
        self._changed = False

    def choose(self, name: str, tiles: Sequence[Tile], timing: Timing) -> Tile:
        """The fastest of `tiles` for the product `name`; measured if it is not known."""
        known = self._known.get(name)
        if known is not None and known in tiles:
            # Equal, but for the types of numbers in a file.
            return tiles[tiles.index(known)]
        if len(tiles) == 1:
            return tiles[0]
        best = min(tiles, key=timing)
        self._known[name], self._changed = best, True
        return best

    def save(self) -> None:
        """Write what was measured, whole or not at all."""
        if self._path is None or not self._changed:
            return
        products = {name: dataclasses.asdict(tile) for name, tile in self._known.items()}
        every = self._every()
        # Another process may have saved since: what only that one measured stays.
        others = every.get(self._about)
        every[self._about] = (others if isinstance(others, dict) else {}) | products
        beside = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(every, indent=1))
            beside.replace(self._path)
            self._changed = False
        except OSError as error:
            _log.warning("the tiles of this GPU could not be remembered (%s)", error)
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def _every(self) -> dict[str, dict[str, dict[str, int | bool]]]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _read(self) -> dict[str, Tile]:
        try:
            known = self._every().get(self._about, {})
            return {name: Tile(**fields) for name, fields in known.items()}  # type: ignore[arg-type]
        except (TypeError, AttributeError):
            return {}

"""What a captured step reads of a chunk of a feed: one buffer on the host, copied in one go.

A chunk may be shorter than the table: rows behind it have no slot, tiles behind it no query. Tiles
are cut into a number of parts that depends on the table alone, so that one graph serves every chunk
wherever in a stream it is.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamkv.kernels import gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.table import SequenceTable
from streamkv.staged_words import StagedWords


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        ids: at most as many as the table has room for.
        slots: where their keys and values go.
        table: what they see.
        start: token index of the first.
        window_size: of the sequence.
        targets: where the queries of each are kept; of none if not given.
    """

    ids: list[int]
    slots: list[int]
    table: SequenceTable
    start: int
    window_size: int
    targets: list[int] = field(default_factory=list)


class ChunkTable:
    """Rows of a chunk, and which rows of the step have logits.

    Args:
        size: most tokens of a chunk.
        num_head_rows: rows of the step that have logits.
        capacity: entries that a sequence may have.
        pool: the gpu pool.
        shape: of pool and heads.
        parts: programs that share the entries of a tile.

    Attributes:
        ids, slots, targets: int64 [size] on the device.
        head_rows: int64 [num_head_rows] on the device.
        query_starts: int64 [1] on the device.
        tiles: int32 [num_tiles, TILE_COLUMNS] on the device, see `gpu.prefill_tiles`.
        table: entries on the device.
    """

    def __init__(
        self,
        size: int,
        num_head_rows: int,
        capacity: int,
        pool: Tensor,
        shape: gpu.Shape,
        parts: int,
    ) -> None:
        self.size, self.capacity, self.parts = size, capacity, parts
        self._pool, self._shape = pool, shape
        self._rows = gpu.prefill_launch(shape).rows
        num_tiles = num_tiles_of(shape, size, self._rows) * parts
        wide = dict.fromkeys(("ids", "slots", "targets"), size)
        wide |= {"head_rows": num_head_rows, "query_starts": 1, "window_sizes": 1}
        wide |= dict.fromkeys(("addresses", "starts", "caps"), capacity)
        narrow = dict.fromkeys(("first_valid", "end_valid"), capacity)
        narrow |= dict.fromkeys(("num_entries", "num_sink_entries", "num_recalled_entries"), 1)
        narrow |= {"tiles": gpu.TILE_COLUMNS * num_tiles}
        num_wide, num_narrow = sum(wide.values()), sum(narrow.values())
        self._words = StagedWords(num_wide + -(-num_narrow // 2), pool.device)
        host, device = self._words.host, self._words.device
        self._host = _parts(host[:num_wide], wide)
        self._host |= _parts(host[num_wide:].view(np.int32), narrow)
        found = _parts(device[:num_wide], wide)
        found |= _parts(device[num_wide:].view(torch.int32), narrow)
        self.ids, self.slots, self.targets = found["ids"], found["slots"], found["targets"]
        self.head_rows, self.query_starts = found["head_rows"], found["query_starts"]
        self.tiles = found["tiles"].view(num_tiles, gpu.TILE_COLUMNS)
        entries = {name: found[name][None] for name in ("addresses", "starts", "caps")}
        valid = {name: found[name][None] for name in ("first_valid", "end_valid")}
        self.table = BatchTable(
            # The kernels read addresses; ids are for the twins.
            block_ids=entries["addresses"],
            num_entries=found["num_entries"],
            num_sink_entries=found["num_sink_entries"],
            num_recalled_entries=found["num_recalled_entries"],
            window_sizes=found["window_sizes"],
            **entries,
            **valid,
        )

    def write(self, chunk: Chunk, head_rows: Rows[int]) -> None:
        """Describe a step; the copy is on the current stream.

        Args:
            chunk: of at most `size` tokens.
            head_rows: rows whose logits are wanted; the others have those of row 0.
        """
        host, count = self._host, len(chunk.ids)
        assert count <= self.size, (count, self.size)
        starts = torch.tensor([chunk.start])
        made = batch_table([chunk.table], [chunk.window_size], [self._pool], self.capacity, "cpu")
        tiles = gpu.prefill_tiles(made, starts, [count], self._shape, self._rows, self.parts)
        host["ids"][:count], host["ids"][count:] = chunk.ids, 0
        host["slots"][:count], host["slots"][count:] = chunk.slots, -1
        host["targets"][:] = 0
        host["targets"][: len(chunk.targets)] = chunk.targets
        host["head_rows"][: len(head_rows)], host["head_rows"][len(head_rows) :] = head_rows, 0
        host["query_starts"][0] = chunk.start
        for name in ("addresses", "starts", "caps", "first_valid", "end_valid"):
            host[name][:] = getattr(made, name)[0].numpy()
        for name in ("num_entries", "num_sink_entries", "num_recalled_entries", "window_sizes"):
            host[name][:] = getattr(made, name).numpy()
        flat = tiles.flatten().numpy()
        # A tile without queries writes nothing; without entries it reads nothing.
        host["tiles"][: len(flat)], host["tiles"][len(flat) :] = flat, 0
        self._words.upload()


def num_tiles_of(shape: gpu.Shape, size: int, rows: int) -> int:
    """Tiles of a chunk."""
    return -(-size // max(1, rows // shape.group))


def _parts(words: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Views by name of an array or a tensor, one behind the other."""
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = words[at : at + size]
        at += size
    return found

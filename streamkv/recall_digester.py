"""Blocks are digested when they are sealed, and digests come back from their file at a resume.

A block that is computed anew under its old name has the digest that it had; one that no tier can
find again is missing, and cannot be chosen.
"""

import numpy as np
import torch
from torch import Tensor

from streamkv.device_copies import to_device
from streamkv.digest_file import DigestRow
from streamkv.digest_index import DigestIndex, digest_dtype
from streamkv.digest_memory import DigestMemory
from streamkv.kernels.digests import block_digests
from streamkv.recall_log import RecallLog
from streamkv.recall_stream import RecallStream
from streamkv.retrieval_heads import RetrievalHeads
from streamkv.sequence import Sequence
from streamkv.tiers.spec import BlockKey, KVSpec


class Digester:
    """Makes the digests of all sequences of an engine.

    Args:
        spec: layout of a block.
        pool: the gpu pool's blocks.
        heads: that choose.
        memory: where digests lie.

    Attributes:
        memory: as given.
    """

    def __init__(
        self, spec: KVSpec, pool: Tensor, heads: RetrievalHeads, memory: DigestMemory
    ) -> None:
        self.memory = memory
        self._spec = spec
        self._pool = pool
        self._heads = heads
        self._kv_heads = torch.tensor(heads.kv_heads, device=pool.device)

    @property
    def digest_bytes(self) -> int:
        """Of the digest of a block."""
        return 2 * len(self._heads.kv_heads) * self._spec.block_size * self._spec.head_dim

    @property
    def identity(self) -> str:
        """Differs for digests of another kind."""
        return f"{self._heads.kv_heads} {digest_dtype(self._spec)}"

    def open(self, log: RecallLog, block_size: int) -> DigestIndex:
        """The index of a sequence, with what its file has."""
        index = DigestIndex(len(self._heads.kv_heads), self._spec, self.memory)
        if log.digests is not None:
            for row in log.digests.rows(log.past.state.rewinds, block_size):
                self._take_row(index, row)
        return index

    def digest(self, sequence: Sequence, stream: RecallStream) -> None:
        """Digest blocks that were sealed, and those of the window that have no digest yet.

        As few launches as there can be: one for each run of blocks.
        """
        index, num_sealed = stream.index, sequence.num_computed // sequence.block_size
        run: list[tuple[int, BlockKey]] = []
        for at in range(min(stream.num_digested, len(index)), num_sealed):
            key = sequence.table[at].key if at in sequence.table else None
            # One that is computed anew, or was left out, has the digest that it had.
            if at < len(index) and key in (None, index.key(at)):
                continue
            if key is None:
                self._digest_run(sequence, stream, run)
                run = []
                index.put_missing(at)
                stream.unfiled.add(at)
                continue
            if run and run[-1][0] != at - 1:
                self._digest_run(sequence, stream, run)
                run = []
            run.append((at, key))
        self._digest_run(sequence, stream, run)
        stream.num_digested = num_sealed

    def _take_row(self, index: DigestIndex, row: DigestRow) -> None:
        if row.key is None or row.digest is None:
            index.put_missing(len(index))
            return
        spec = self._spec
        bits = torch.from_numpy(row.digest.view(np.int16)).view(digest_dtype(spec))
        shape = (len(self._heads.kv_heads), 1, spec.block_size, spec.head_dim)
        index.put(len(index), [row.key], bits.view(shape))

    def _digest_run(
        self, sequence: Sequence, stream: RecallStream, run: list[tuple[int, BlockKey]]
    ) -> None:
        if not run:
            return
        blocks = [sequence.table[at].block_id for at, _ in run]
        places = to_device(torch.tensor(blocks), self._pool.device)
        digests = block_digests(self._pool, places, self._kv_heads)
        stream.index.put(run[0][0], [key for _, key in run], digests)
        stream.unfiled.update(at for at, _ in run)

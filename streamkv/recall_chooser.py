"""Which old blocks the newest queries of a sequence choose.

Only asks: what is chosen is scheduled, written down and brought back elsewhere.
"""

import time

import torch
from torch import Tensor

from streamkv.device_copies import to_device
from streamkv.digest_index import digest_dtype
from streamkv.kernels.digests import block_weights
from streamkv.kernels.rope import RopeTables
from streamkv.model import ModelAdapter
from streamkv.recall_schedule import Choosing
from streamkv.recall_stream import RecallStream, policy_of
from streamkv.recalled import farthest
from streamkv.retrieval_heads import RetrievalHeads
from streamkv.sequence import Sequence
from streamkv.tiers.spec import KVSpec


class Chooser:
    """Chooses for all sequences of an engine.

    Args:
        adapter: the model.
        heads: that choose.
        device: of digests and queries.

    Attributes:
        num_waits: choices that had to be waited for.
        waited_s: how long.
    """

    def __init__(self, adapter: ModelAdapter, heads: RetrievalHeads, device: torch.device) -> None:
        self.num_waits = 0
        self.waited_s = 0.0
        self._heads = heads
        self._device = device
        self._trained_length = adapter.trained_length
        self._scales = [adapter.scales[head.layer] for head in heads.heads]
        # On the device, so that no choice waits for them.
        self._layers, self._q_heads = to_device(torch.tensor(heads.heads), device).unbind(1)
        # One distance at a time is asked for, and kept on the device.
        self._rope = RopeTables(adapter.inv_freq.cpu(), 1)
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        if device.type == "cuda":
            self.warm_up(adapter.spec)

    def warm_up(self, spec: KVSpec) -> None:
        """Have compiled what weighs blocks: else the first choice waits for that, and all steps."""
        dtype: torch.dtype = getattr(torch, spec.dtype)
        num_heads, num_rows = len(self._heads.heads), len(self._heads.kv_heads)
        queries = torch.zeros(num_heads, 1, spec.head_dim, dtype=dtype, device=self._device)
        shape = num_rows, 1, spec.block_size, spec.head_dim
        page = torch.zeros(shape, dtype=digest_dtype(spec), device=self._device)
        block_weights(queries, [page], self._heads.rows, *self._angles_of(1), self._scales)

    def choose(
        self, sequence: Sequence, stream: RecallStream, token_index: int, num_blocks: int
    ) -> Choosing | None:
        """What the newest queries choose for `token_index` and later, of the first `num_blocks`.

        Returns None if there are no queries.
        """
        queries = stream.queries.before(sequence.num_computed)
        if queries is None:
            return None
        chosen_by = queries[self._layers, :, self._q_heads]
        schedule, window, size = stream.schedule, sequence.window, sequence.block_size
        policy, first_block = policy_of(stream.mode), 0
        if policy == "absolute":
            first_block = schedule.first_within(token_index, self._trained_length)
            # True distances differ by block; all are scored as just beyond the window.
            policy = "far"
        distance = farthest(policy, window.window_size, schedule.num_blocks, size)
        return stream.index.choose(
            chosen_by,
            first_block,
            schedule.candidates(window, token_index, num_blocks),
            schedule.num_blocks,
            self._heads.rows,
            self._angles_of(distance),
            self._scales,
            window.num_sink_tokens,
        )

    def awaited(self, choosing: Choosing) -> tuple[int, ...]:
        """The blocks of a choice; what has to be waited for is counted."""
        if choosing.is_known():
            return choosing.blocks()
        begin = time.monotonic()
        blocks = choosing.blocks()
        self.num_waits += 1
        self.waited_s += time.monotonic() - begin
        return blocks

    def _angles_of(self, distance: int) -> tuple[Tensor, Tensor]:
        """cos and sin of a distance, on the device."""
        if distance not in self._angles:
            cos, sin = self._rope.rows(torch.tensor(distance))
            self._angles[distance] = to_device(cos, self._device), to_device(sin, self._device)
        return self._angles[distance]

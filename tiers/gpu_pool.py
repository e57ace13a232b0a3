"""The gpu pool: the blocks that attention reads in place.

One tensor [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]; the last block is
the guard block, which unused table entries point at and nobody is ever given. On a CPU machine the
tensor lies in ordinary memory. Invariant: block ids handed out are within [0, num_blocks). This
module knows neither keys nor other tiers; who uses a block is its free list's business.
"""

import torch

from streamkv.errors import ConfigError
from streamkv.tiers.free_list import FreeList
from streamkv.tiers.host_memory import Bytes, anonymous_memory, blocks_of
from streamkv.tiers.spec import KVSpec

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class GpuPool:
    """Paged KV memory, zero at the start; a block costs memory from its first use on.

    Args:
        spec: layout of a block.
        num_blocks: blocks that can be allocated; the guard block comes on top.

    Attributes:
        data: the tensor [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim].
        free_list: who uses which block.

    Raises:
        ConfigError: fewer than one block, or more bytes than the system gives.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(
                "gpu_bytes",
                num_blocks * spec.block_bytes,
                f"smaller than one block of {spec.block_bytes} bytes",
                "Use room for at least one window.",
            )
        self.spec = spec
        memory = anonymous_memory("gpu_bytes", (num_blocks + 1) * spec.block_bytes)
        self._rows = blocks_of(memory, num_blocks + 1, spec.block_bytes)
        # torch.zeros would write every page; this tensor shares the untouched ones.
        flat = torch.frombuffer(memory, dtype=_DTYPES[spec.dtype])
        elements = (num_blocks + 1) * (spec.block_bytes // flat.itemsize)
        self.data = flat[:elements].view(num_blocks + 1, *spec.block_shape)
        self.free_list = FreeList(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self.free_list.num_blocks

    @property
    def guard_block_id(self) -> int:
        """The block that unused table entries point at."""
        return self.num_blocks

    def block_bytes(self, block_id: int) -> Bytes:
        """A block as writable uint8 [block_bytes], sharing the tensor's memory in every dtype."""
        row: Bytes = self._rows[block_id]
        return row

    def fill_nan(self, *block_ids: int) -> None:
        """Fill blocks with NaN, so that a test sees whoever reads what was never written."""
        for block_id in block_ids:
            self.data[block_id].fill_(float("nan"))

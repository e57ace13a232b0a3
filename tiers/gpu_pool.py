"""The gpu pool: the blocks that attention reads in place.

One tensor [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]; the last block is
the guard block, which unused table entries point at and nobody is ever given. On a CPU machine the
tensor lies in ordinary memory, which costs nothing until it is touched. Invariant: block ids handed
out are within [0, num_blocks). This module knows neither keys nor other tiers; who uses a block is
its free list's business.
"""

import torch

from streamkv.errors import ConfigError
from streamkv.tiers.free_list import FreeList
from streamkv.tiers.host_memory import Bytes, anonymous_memory
from streamkv.tiers.spec import KVSpec

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class GpuPool:
    """Paged KV memory, zero at the start.

    Args:
        spec: layout of a block.
        num_blocks: blocks that can be allocated; the guard block comes on top.
        device: of torch, where the blocks lie.

    Attributes:
        data: the tensor [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim].
        free_list: who uses which block.

    Raises:
        ConfigError: fewer than one block, or more bytes than the system gives.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, device: str = "cpu") -> None:
        if num_blocks < 1:
            raise ConfigError(
                "gpu_bytes",
                num_blocks * spec.block_bytes,
                f"smaller than one block of {spec.block_bytes} bytes",
                "Use room for at least one window.",
            )
        self.spec = spec
        num_bytes, dtype = (num_blocks + 1) * spec.block_bytes, _DTYPES[spec.dtype]
        if device == "cpu":
            # torch.zeros would write every page; this tensor shares the untouched ones.
            flat = torch.frombuffer(anonymous_memory("gpu_bytes", num_bytes), dtype=torch.uint8)
        else:
            flat = _device_memory(num_bytes, device)
        self._rows = flat[:num_bytes].view(num_blocks + 1, spec.block_bytes)
        self.data = flat[:num_bytes].view(dtype).view(num_blocks + 1, *spec.block_shape)
        self.free_list = FreeList(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self.free_list.num_blocks

    @property
    def guard_block_id(self) -> int:
        """The block that unused table entries point at."""
        return self.num_blocks

    def row(self, block_id: int) -> torch.Tensor:
        """A block as uint8 [block_bytes], sharing the tensor's memory in every dtype."""
        return self._rows[block_id]

    def block_bytes(self, block_id: int) -> Bytes:
        """The same as an array; only of a pool in host memory."""
        row: Bytes = self.row(block_id).numpy()
        return row

    def fill_nan(self, *block_ids: int) -> None:
        """Fill blocks with NaN, so that a test sees whoever reads what was never written."""
        for block_id in block_ids:
            self.data[block_id].fill_(float("nan"))


def _device_memory(num_bytes: int, device: str) -> torch.Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            "gpu_bytes",
            num_bytes,
            f"{device} has {free} of {total} bytes free",
            "Use a smaller gpu_bytes, window_size or max_sessions.",
        ) from error

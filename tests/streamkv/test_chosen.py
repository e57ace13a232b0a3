"""Choices on their way from the device, and the memory that they are made from."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from streamkv.digest_index import DigestIndex
from streamkv.digest_memory import DigestMemory
from streamkv.kernels.rope import RopeTables
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, block_size=64, dtype="float16")


def test_a_choice_keeps_the_pages_that_it_reads_until_it_is_known() -> None:
    """Also those that the stream has given back since."""
    index = DigestIndex(1, SPEC, DigestMemory("cpu"))
    digests = torch.randn(1, 100, 64, 16, generator=torch.Generator().manual_seed(0))
    index.put(0, [BlockKey((2 * i).to_bytes(16, "big")) for i in range(100)], digests)
    pages = [StorageWeakRef(page.data.untyped_storage()) for page in index._pages if page]
    angles = RopeTables(torch.ones(8).double(), 1).rows(torch.tensor(300))
    choosing = index.choose(torch.ones(1, 2, 16), 0, 100, 4, [0], angles, [1.0])
    index.close()
    assert len(pages) == 2 and not any(page.expired() for page in pages)
    assert len(choosing.blocks()) == 4
    assert all(page.expired() for page in pages)

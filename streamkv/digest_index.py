"""The digests of a stream's sealed blocks, and which of them to recall.

16-bit numbers, in the order of the stream, in pages that grow: nothing is moved when a block comes.
What is chosen depends only on what is in the index and on the queries, not on where blocks lie.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from streamkv.chosen import Chosen
from streamkv.device_copies import to_device
from streamkv.kernels.digests import block_weights
from streamkv.recall_schedule import Choosing, Known
from streamkv.tiers.spec import BlockKey, KVSpec

FIRST_ROWS = 64
MOST_ROWS = 1024
"""Blocks of the first page and of the largest; each page has room for twice the one before."""

TIE_STEPS = 1 << 12
"""Parts of the average weight of a block, of which a difference of less than one is a tie."""


def page_rows(number: int) -> int:
    """Blocks that a page has room for."""
    return min(FIRST_ROWS << number, MOST_ROWS)


def digest_dtype(spec: KVSpec) -> torch.dtype:
    """In which digests are kept: that of the KV, or 16 bits of 32."""
    found: torch.dtype = getattr(torch, spec.dtype)
    return torch.float16 if found == torch.float32 else found


class DigestIndex:
    """Digests by block index.

    Args:
        num_rows: KV heads of a digest.
        spec: layout of a block.
        device: of the pool.
    """

    def __init__(self, num_rows: int, spec: KVSpec, device: torch.device | str) -> None:
        self._num_rows = num_rows
        self._shape = (spec.block_size, spec.head_dim)
        self._dtype = digest_dtype(spec)
        self._device = torch.device(device)
        self._keys: list[BlockKey | None] = []
        self._pages: list[Tensor] = []
        self._shared: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Of digests, room to grow included."""
        return sum(page.numel() * page.element_size() for page in self._pages)

    def key(self, block_index: int) -> BlockKey | None:
        """The block's key; `None` if it has none and cannot be recalled."""
        return self._keys[block_index]

    def put(self, first_block: int, keys: list[BlockKey], digests: Tensor) -> None:
        """Blocks of the stream were sealed, perhaps once more.

        Args:
            first_block: block index of the first; at most the number of blocks known.
            keys: of the blocks, which follow each other.
            digests: [num_rows, n, block_size, head_dim], on the device.
        """
        if self._dtype == torch.float16:
            # It has an end; no key of a sound model comes near it.
            digests = digests.clamp(-65504.0, 65504.0)
        first = 0
        for room in self._room(first_block, len(keys)):
            room.copy_(digests[:, first : first + room.shape[1]])
            first += room.shape[1]
        self._keys[first_block : first_block + len(keys)] = keys

    def put_missing(self, block_index: int) -> None:
        """A block was sealed without a key: it cannot be found again, nor be chosen."""
        for _ in self._room(block_index, 1):
            pass
        self._keys[block_index : block_index + 1] = [None]

    def digest(self, block_index: int) -> Tensor:
        """The digest of a block as it is kept: [num_rows, block_size, head_dim]."""
        number, first = self._page_of(block_index)
        return self._pages[number][:, block_index - first]

    def _room(self, first_block: int, count: int) -> Iterator[Tensor]:
        """Where the digests of some blocks go, in pieces [rows, blocks, ...]."""
        assert first_block <= len(self)
        low, end = first_block, first_block + count
        while low < end:
            number, first = self._page_of(low)
            page = self._page_to_write(number)
            high = min(end, first + page.shape[1])
            yield page[:, low - first : high - first]
            low = high

    def _page_of(self, block_index: int) -> tuple[int, int]:
        """The page that holds a block, and the first block of that page."""
        number, first = 0, 0
        while block_index >= first + page_rows(number):
            first += page_rows(number)
            number += 1
        return number, first

    def _page_to_write(self, number: int) -> Tensor:
        if number == len(self._pages):
            shape = (self._num_rows, page_rows(number), *self._shape)
            # Zeros: what is missing is scored, too, before it is left out.
            self._pages.append(torch.zeros(shape, dtype=self._dtype, device=self._device))
        if number in self._shared:
            self._pages[number] = self._pages[number].clone()
            self._shared.remove(number)
        return self._pages[number]

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on: the stream was rewound."""
        del self._keys[num_blocks:]

    def copy(self) -> "DigestIndex":
        """The same digests for a fork; a page is copied when one of the two writes to it."""
        other = object.__new__(DigestIndex)
        other._num_rows, other._shape = self._num_rows, self._shape
        other._dtype, other._device = self._dtype, self._device
        other._keys = list(self._keys)
        other._pages = list(self._pages)
        other._shared = set(range(len(self._pages)))
        self._shared = set(other._shared)
        return other

    def choose(
        self,
        queries: Tensor,
        first_block: int,
        end_block: int,
        num_blocks: int,
        rows: Sequence[int],
        angles: tuple[Tensor, Tensor],
        scales: Sequence[float],
        num_sinks: int = 0,
    ) -> Choosing:
        """The blocks that the queries would look at most; nothing waits for them here.

        Args:
            queries: [heads, T, head_dim], un-rotated.
            first_block, end_block: only blocks from the one on and before the other.
            num_blocks: how many, fewer if there are not so many.
            rows, angles, scales: as `block_weights` takes them.
            num_sinks: sink tokens of the stream: of them nothing can be recalled.
        """
        block_size = self._shape[0]
        first_block = max(first_block, num_sinks // block_size)
        # What is left of them is in the first of these blocks, if in any.
        num_sinks = max(0, num_sinks - first_block * block_size)
        blocks = range(first_block, min(end_block, len(self)))
        missing = [index for index in blocks if self._keys[index] is None]
        num_chosen = min(num_blocks, len(blocks) - len(missing))
        if num_chosen == 0:
            return Known(())
        pages = list(self._cut(blocks.start, blocks.stop))
        weights = block_weights(queries, pages, rows, *angles, scales, num_sinks)
        # Sums are rounded otherwise elsewhere: what differs by no more than that is a tie.
        steps = len(blocks) * TIE_STEPS / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)
        ranks = weights.mul(steps).round()
        if missing:
            places = torch.tensor([index - first_block for index in missing])
            ranks.index_fill_(0, to_device(places, ranks.device), -1.0)
        # On a tie the earlier block.
        order = ranks.sort(descending=True, stable=True).indices[:num_chosen]
        return Chosen(first_block, order, weights[order])

    def _cut(self, first_block: int, end_block: int) -> Iterator[Tensor]:
        """Digests of these blocks, in pieces [rows, blocks, block_size, head_dim]."""
        ends = accumulate(page.shape[1] for page in self._pages)
        for page, end in zip(self._pages, ends, strict=True):
            start = end - page.shape[1]
            low, high = max(first_block - start, 0), min(end_block - start, page.shape[1])
            if low < high:
                yield page[:, low:high]

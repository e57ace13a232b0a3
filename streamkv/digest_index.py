"""The digests of a stream's sealed blocks, and which of them to recall.

16-bit numbers, in the order of the stream, in pages that grow: nothing is moved when a block comes.
What is chosen depends only on what is in the index and on the queries, not on where blocks or pages
lie. A block for whose digest there is no memory is one that cannot be chosen: counted, and the
stream goes on, as it does when a block is gone.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from streamkv.chosen import Chosen
from streamkv.device_copies import to_device
from streamkv.digest_memory import DigestMemory, Page
from streamkv.digest_pages import page_blocks, page_bytes, parts_of
from streamkv.kernels.digests import block_weights, followed
from streamkv.recall_schedule import Choosing, Known
from streamkv.tiers.spec import BlockKey, KVSpec

TIE_STEPS = 1 << 12
"""Parts of the average weight of a block, of which a difference of less than one is a tie."""


def digest_dtype(spec: KVSpec) -> torch.dtype:
    """In which digests are kept: that of the KV, or 16 bits of 32."""
    found: torch.dtype = getattr(torch, spec.dtype)
    return torch.float16 if found == torch.float32 else found


class DigestIndex:
    """Digests by block index.

    Args:
        num_rows: KV heads of a digest.
        spec: layout of a block.
        memory: where its pages lie; `close` gives them back.
    """

    def __init__(self, num_rows: int, spec: KVSpec, memory: DigestMemory) -> None:
        self._shape = (num_rows, spec.block_size, spec.head_dim)
        self._dtype = digest_dtype(spec)
        self._memory = memory
        self._digest_bytes = 2 * num_rows * spec.block_size * spec.head_dim
        self._keys: list[BlockKey | None] = []
        # Blocks without a key: few, and a choice must not look at every block for them.
        self._missing: set[int] = set()
        # None: there was no memory for it.
        self._pages: list[Page | None] = []

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Of its pages, room to grow included; what is shared with forks counts for each."""
        return sum(page.num_bytes for page in self._pages if page is not None)

    def key(self, block_index: int) -> BlockKey | None:
        """The block's key; `None` if it has none and cannot be recalled."""
        return self._keys[block_index]

    def put(self, first_block: int, keys: list[BlockKey], digests: Tensor) -> None:
        """Blocks of the stream were sealed, perhaps once more.

        Args:
            first_block: block index of the first; at most the number of blocks known.
            keys: of the blocks, which follow each other.
            digests: [num_rows, n, block_size, head_dim], on the device, or on the host.
        """
        if self._dtype == torch.float16:
            # It has an end; no key of a sound model comes near it.
            digests = digests.clamp(-65504.0, 65504.0)
        assert first_block <= len(self)
        known: list[BlockKey | None] = list(keys)
        for part in parts_of(first_block, first_block + len(keys), self._digest_bytes):
            end = part.first + part.high - part.low
            page = self._page_to_write(part.number)
            if page is not None:
                self._memory.write(page, part.low, digests[:, part.first : end])
            else:
                known[part.first : end] = [None] * (end - part.first)
                self._memory.lost(end - part.first)
        self._know(first_block, known)

    def put_missing(self, block_index: int) -> None:
        """A block was sealed without a key: it cannot be found again, nor be chosen."""
        assert block_index <= len(self)
        [part] = parts_of(block_index, block_index + 1, self._digest_bytes)
        page = self._page_to_write(part.number)
        if page is not None:
            self._clear(page, part.low, part.high)
        self._know(block_index, [None])

    def _know(self, first_block: int, keys: list[BlockKey | None]) -> None:
        self._keys[first_block : first_block + len(keys)] = keys
        self._missing.difference_update(range(first_block, first_block + len(keys)))
        self._missing.update(first_block + at for at, key in enumerate(keys) if key is None)

    def digest(self, block_index: int) -> Tensor:
        """The digest of a block that has a key, as it is kept: [num_rows, block_size, head_dim]."""
        [part] = parts_of(block_index, block_index + 1, self._digest_bytes)
        page = self._pages[part.number]
        assert page is not None
        return self._memory.read(page, part.low)

    def _clear(self, page: Page, low: int, high: int) -> None:
        """Zeros: what is missing is scored, too, before it is left out."""
        rows, *shape = self._shape
        zeros = torch.zeros(rows, high - low, *shape, dtype=self._dtype, device=self._memory.device)
        self._memory.write(page, low, zeros)

    def _page_to_write(self, number: int) -> Page | None:
        """A page that nobody else has; `None`: there is no memory for it."""
        is_next = number == len(self._pages)
        if is_next:
            self._pages.append(None)
        page = self._pages[number]
        if page is None:
            rows, *shape = self._shape
            num_bytes = page_bytes(number, self._digest_bytes)
            num_blocks = page_blocks(number, self._digest_bytes)
            page = self._memory.take(num_bytes, (rows, num_blocks, *shape), self._dtype)
            if page is not None and not is_next:
                # There was no memory for what else is on it.
                self._clear(page, 0, num_blocks)
            self._pages[number] = page
        elif page.num_users > 1:
            copied = self._memory.copy(page)
            if copied is None:
                return None
            self._memory.give_back(page)
            self._pages[number] = page = copied
        return page

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on: the stream was rewound."""
        del self._keys[num_blocks:]
        self._missing = {index for index in self._missing if index < num_blocks}
        num_pages = sum(1 for _ in parts_of(0, len(self), self._digest_bytes))
        for page in self._pages[num_pages:]:
            if page is not None:
                self._memory.give_back(page)
        del self._pages[num_pages:]

    def close(self) -> None:
        """Give back all pages; the index is empty."""
        self.truncate(0)

    def copy(self) -> "DigestIndex":
        """The same digests for a fork; a page is copied when one of the two writes to it."""
        other = object.__new__(DigestIndex)
        other._shape, other._dtype = self._shape, self._dtype
        other._memory, other._digest_bytes = self._memory, self._digest_bytes
        other._keys, other._missing = list(self._keys), set(self._missing)
        other._pages = list(self._pages)
        for page in other._pages:
            if page is not None:
                self._memory.share(page)
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
        block_size = self._shape[1]
        first_block = max(first_block, num_sinks // block_size)
        # What is left of them is in the first of these blocks, if in any.
        num_sinks = max(0, num_sinks - first_block * block_size)
        blocks = range(first_block, min(end_block, len(self)))
        missing = sorted(index for index in self._missing if index in blocks)
        num_chosen = min(num_blocks, len(blocks) - len(missing))
        if num_chosen == 0:
            return Known(())
        pages = list(self._cut(blocks.start, blocks.stop))
        fetch = self._memory.fetch
        weights = block_weights(queries, pages, rows, *angles, scales, num_sinks, fetch)
        # Sums are rounded otherwise elsewhere: what differs by no more than that is a tie.
        steps = len(blocks) * TIE_STEPS / weights.sum().clamp_min(torch.finfo(torch.float32).tiny)
        if missing:
            places = to_device(torch.tensor([i - first_block for i in missing]), weights.device)
            ranks = followed(weights.index_fill(0, places, 0.0)).mul(steps).round()
            ranks.index_fill_(0, places, -1.0)
        else:
            ranks = followed(weights).mul(steps).round()
        # On a tie the earlier block.
        order = ranks.sort(descending=True, stable=True).indices[:num_chosen]
        return Chosen(first_block, order, weights[order], pages)

    def _cut(self, first_block: int, end_block: int) -> Iterator[Tensor]:
        """Digests of these blocks, in pieces [rows, blocks, block_size, head_dim]."""
        for part in parts_of(first_block, end_block, self._digest_bytes):
            page, (rows, *shape) = self._pages[part.number], self._shape
            if page is None:
                nothing = torch.zeros(1, dtype=self._dtype, device=self._memory.device)
                yield nothing.expand(rows, part.high - part.low, *shape)
            else:
                self._memory.fetched(page)
                yield page.data[:, part.low : part.high]

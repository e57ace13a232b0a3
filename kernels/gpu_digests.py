"""Which blocks queries would look at, on a GPU: the kernel behind its checks.

The keys of all pages that the GPU can address are scored by one launch, those in page-locked memory
where they lie. Only what lies elsewhere is copied first, a page at a time. So a choice costs the
host about as much as a dozen small operations, however many blocks there are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamkv.kernels.gpu_shape import MAX_HEAD_DIM, MIN_ROWS, require
from streamkv.kernels.recall_limits import SCRATCH_BYTES
from streamkv.kernels.triton_digests import digest_scores_kernel

MAX_HEADS = 32
"""Query heads: the kernel has code of its own for each."""

MAX_QUERIES = 32
MAX_KEYS = 64 * MAX_HEAD_DIM
"""Elements of a block's keys of one KV head, which a program holds in 32 bits."""

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

Piece = tuple[int, int, int, int]
"""Keys of one KV head side by side: address, place of the head, first block, blocks."""


def fits(queries: Tensor, pages: Sequence[Tensor]) -> bool:
    """Whether the kernel is made for these sizes and types."""
    num_heads, num_queries, _ = queries.shape
    _, _, block_size, head_dim = pages[0].shape
    dtype = pages[0].dtype
    return (
        dtype in _TYPES
        and num_heads <= MAX_HEADS
        and num_queries <= MAX_QUERIES
        and _padded(block_size) * _padded(head_dim) <= MAX_KEYS
        # Loads of 16 bytes.
        and block_size * head_dim * dtype.itemsize % 16 == 0
        and all(page.data_ptr() % 16 == 0 for page in pages)
    )


def block_weights(
    queries: Tensor,
    pages: Sequence[Tensor],
    rows: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    scales: Sequence[float],
    num_sinks: int = 0,
    fetch: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """How much of their attention queries would give to each block: float32 [n].

    Arguments and result are those of the twin, `digests.block_weights`; to the bit it does not
    matter where pages lie or how they are cut. Nothing waits for the device, and pages must not be
    written to by the host, nor given to others, before the device has come this far.

    Scores take at most half of `SCRATCH_BYTES` at a time, or what one KV head takes, and as much
    again for their softmax: 8 MB each for 8 heads, 16 queries and 15,625 blocks, a million tokens.

    Raises:
        ConfigError: sizes or types that the kernel is not made for (`fits`).
    """
    require("queries", list(queries.shape), fits(queries, pages), "Use `digests.block_weights`.")
    num_heads, num_queries, head_dim = queries.shape
    same = all(page.dtype == pages[0].dtype and page.shape[3] == head_dim for page in pages)
    require("pages", [list(page.shape) for page in pages], same, f"Their head_dim is {head_dim}.")
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    num_blocks = sum(page.shape[1] for page in pages)
    assert len(rows) == len(scales) == num_heads and num_sinks < pages[0].shape[2]
    num_entries = num_blocks + (num_sinks > 0)
    weights: Tensor | None = None
    for heads in _groups(rows, 4 * num_queries * num_entries):
        scores = torch.empty(len(heads), num_queries, num_entries, device=queries.device)
        own_rows = list(dict.fromkeys(rows[head] for head in heads))
        constants = {
            "HEADS": tuple(heads),
            "PLACES": tuple(own_rows.index(rows[head]) for head in heads),
            "SCALES": tuple(float(scales[head]) for head in heads),
        }
        for pieces in _pieces(pages, own_rows, queries.device, fetch):
            _score(queries, pages[0], pieces, cos, sin, scores, num_sinks, constants)
        found = scores.softmax(2)[:, :, :num_blocks].sum((0, 1))
        weights = found if weights is None else weights + found
    assert weights is not None
    return weights / (num_heads * num_queries)


def _groups(rows: Sequence[int], head_bytes: int) -> Iterator[list[int]]:
    """Query heads by the row that they read, as many rows at a time as there is memory for."""
    group: list[int] = []
    for row in dict.fromkeys(rows):
        heads = [head for head, its_row in enumerate(rows) if its_row == row]
        if group and (len(group) + len(heads)) * head_bytes > SCRATCH_BYTES // 2:
            yield group
            group = []
        group = group + heads
    yield group


def _pieces(
    pages: Sequence[Tensor],
    rows: Sequence[int],
    device: torch.device,
    fetch: Callable[[Tensor], Tensor] | None,
) -> Iterator[list[Piece]]:
    """What lies in reach at once, then the rest page by page; there until the next is asked for."""
    in_reach: list[Piece] = []
    away: list[tuple[int, Tensor]] = []
    first = 0
    for page in pages:
        if _is_in_reach(page, device):
            start, step = page.data_ptr(), page.stride(0) * page.element_size()
            count = page.shape[1]
            in_reach += [(start + row * step, at, first, count) for at, row in enumerate(rows)]
        else:
            away.append((first, page))
        first += page.shape[1]
    if in_reach:
        yield in_reach
    for first, page in away:
        here = [page[row] if fetch is None else fetch(page[row]) for row in rows]
        here = [keys.contiguous() for keys in here]
        yield [(keys.data_ptr(), at, first, len(keys)) for at, keys in enumerate(here)]
        # Before the next copies are made.
        del here


def _is_in_reach(page: Tensor, device: torch.device) -> bool:
    """Whether the kernel can read the page as it lies."""
    return page[0].is_contiguous() and (page.device == device or page.is_pinned())


def _score(
    queries: Tensor,
    page: Tensor,
    pieces: list[Piece],
    cos: Tensor,
    sin: Tensor,
    scores: Tensor,
    num_sinks: int,
    constants: dict[str, Any],
) -> None:
    """Fill in the scores of the pieces' blocks: float32 [heads, T, n, and 1 for sink tokens]."""
    _, _, block_size, head_dim = page.shape
    on_gpu = queries.is_cuda
    table = torch.tensor(pieces, dtype=torch.int64, pin_memory=on_gpu)
    digest_scores_kernel[(max(count for *_, count in pieces), len(pieces))](
        queries,
        cos,
        sin,
        table.to(queries.device, non_blocking=True),
        scores,
        *queries.stride()[:2],
        *scores.shape[1:],
        num_sinks,
        **constants,
        KEYS=_TYPES[page.dtype],
        QUERIES=_padded(queries.shape[1]),
        DIM=head_dim,
        DIM_PAD=_padded(head_dim),
        HALF=cos.shape[0],
        BLOCK=block_size,
        BLOCK_PAD=_padded(block_size),
        # As many as the keys have room in, in registers.
        num_warps=max(4, _padded(block_size) * _padded(head_dim) // 1024),
    )


def _padded(size: int) -> int:
    """As `tl.dot` takes it."""
    padded: int = triton.next_power_of_2(size)
    return max(MIN_ROWS, padded)

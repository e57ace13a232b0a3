"""Which blocks queries would look at, on a GPU: the kernel behind its checks.

The keys of all pages that the GPU can address are scored by one launch, those in page-locked memory
where they lie. Only what lies elsewhere is copied first, a page at a time. So a choice costs the
host about as much as a dozen small operations, however many blocks there are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
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

_Place = tuple[int, int, int, int]
"""Where a page lies: its address, elements from row to row, first block, blocks."""


def fits(queries: Tensor, pages: Sequence[Tensor]) -> bool:
    """Whether the kernel is made for these sizes and types."""
    num_heads, num_queries, head_dim = queries.shape
    block_size, dtype = pages[0].shape[2], pages[0].dtype
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
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    num_blocks = sum(page.shape[1] for page in pages)
    assert len(rows) == len(scales) == num_heads and num_sinks < pages[0].shape[2]
    assert all(page.shape[3] == head_dim for page in pages)
    num_entries = num_blocks + (num_sinks > 0)
    weights: Tensor | None = None
    for heads in _groups(rows, 4 * num_queries * num_entries):
        scores = torch.empty(len(heads), num_queries, num_entries, device=queries.device)
        own_rows = tuple(dict.fromkeys(rows[head] for head in heads))
        constants = {
            "HEADS": tuple(heads),
            "PLACES": tuple(own_rows.index(rows[head]) for head in heads),
            "SCALES": tuple(float(scales[head]) for head in heads),
            "KEYS": _TYPES[pages[0].dtype],
            "BLOCK": pages[0].shape[2],
        }
        for places, numbers in _places(pages, own_rows, queries.device, fetch):
            _score(queries, places, cos, sin, scores, num_sinks, constants | {"ROWS": numbers})
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


def _places(
    pages: Sequence[Tensor],
    rows: tuple[int, ...],
    device: torch.device,
    fetch: Callable[[Tensor], Tensor] | None,
) -> Iterator[tuple[list[_Place], tuple[int, ...]]]:
    """Pages in reach, all at once, then copies of the others, one by one; with their rows' numbers.

    A copy is there until the next is asked for.
    """
    in_reach: list[_Place] = []
    away: list[tuple[int, Tensor]] = []
    first = 0
    for page in pages:
        count = page.shape[1]
        if _is_in_reach(page, device):
            in_reach.append((page.data_ptr(), page.stride(0), first, count))
        else:
            away.append((first, page))
        first += count
    if in_reach:
        yield in_reach, rows
    for first, page in away:
        copy = torch.empty((len(rows), *page.shape[1:]), dtype=page.dtype, device=device)
        for row, target in zip(rows, copy, strict=True):
            target.copy_(page[row] if fetch is None else fetch(page[row]))
        yield [(copy.data_ptr(), copy.stride(0), first, page.shape[1])], tuple(range(len(rows)))
        # Before the next is made.
        del copy, target


def _is_in_reach(page: Tensor, device: torch.device) -> bool:
    """Whether the kernel can read the page as it lies."""
    _, _, block_size, head_dim = page.shape
    row_stride, *strides = page.stride()
    is_laid_out = strides == [block_size * head_dim, head_dim, 1] and row_stride % 8 == 0
    return is_laid_out and (page.device == device or page.is_pinned())


def _score(
    queries: Tensor,
    places: list[_Place],
    cos: Tensor,
    sin: Tensor,
    scores: Tensor,
    num_sinks: int,
    constants: dict[str, Any],
) -> None:
    """Fill in the scores of the pages' blocks: float32 [heads, T, n, and 1 for sink tokens]."""
    _, num_queries, head_dim = queries.shape
    dim, block = _padded(head_dim), _padded(constants["BLOCK"])
    table = torch.tensor(places, dtype=torch.int64, pin_memory=queries.is_cuda)
    grid = max(count for *_, count in places), len(places), len(constants["ROWS"])
    digest_scores_kernel[grid](
        queries,
        cos,
        sin,
        table.to(queries.device, non_blocking=True),
        scores,
        *queries.stride()[:2],
        *scores.shape[1:],
        num_sinks,
        **constants,
        QUERIES=_padded(num_queries),
        DIM=head_dim,
        DIM_PAD=dim,
        HALF=cos.shape[0],
        BLOCK_PAD=block,
        # As many as the keys have room in, in registers.
        num_warps=max(4, dim * block // 1024),
    )


def _padded(size: int) -> int:
    """As `tl.dot` takes it."""
    # Triton's own function for this takes as long as an operation.
    return max(MIN_ROWS, 1 << (size - 1).bit_length())

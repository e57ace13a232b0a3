"""Sampling on a GPU: the token of each row of logits, with no wait for the device.

Invariant: the same token as the CPU chooses from the same logits, options, seed and token index,
but for near ties (a noisy logit within float64's rounding of another, a sum of probabilities within
it of top_p). What top_k or top_p keeps is a prefix of the tokens ordered by logit, of equal ones
the lowest id first; so its last member, the row's *edge*, says all of it, ties included. It knows
neither sessions nor options: rows come as plain columns. Shapes and launches depend on the number
of rows alone, but for `find_edges`, which runs only where a row is cut.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from streamkv.kernels.gpu_shape import require
from streamkv.kernels.triton_sample import (
    draw_parts_kernel,
    highest_parts_kernel,
    join_draw_kernel,
    join_highest_kernel,
)

TILE = 1024
PADDING, GREEDY, NOISY = 0, 1, 2
_CUT_ROWS = 16  # sorted at once, which bounds the memory of a step with many cut rows
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """How the token of each row is chosen: columns of one length, all on one device.

    Attributes:
        kinds: int64, `PADDING` (the row is ignored), `GREEDY` or `NOISY`.
        seeds: int64, the bits of the unsigned seed.
        token_indices: int64, index in the stream that the token will have.
        temperatures: float64, above 0 where noisy.
        log_min_ps: float64, logarithm of min_p; -inf where it is 0.
        edge_logits: float64, raw logit of the last token that is kept; -inf where all are.
        edge_ids: int64, its id; of equal logits those up to it are kept.
    """

    kinds: Tensor
    seeds: Tensor
    token_indices: Tensor
    temperatures: Tensor
    log_min_ps: Tensor
    edge_logits: Tensor
    edge_ids: Tensor

    def __post_init__(self) -> None:
        floats = {"temperatures", "log_min_ps", "edge_logits"}
        for name in self.__slots__:
            column = getattr(self, name)
            dtype = torch.float64 if name in floats else torch.int64
            require(name, column.dtype, column.dtype == dtype, f"Pass {dtype}.")
            fits = column.shape == self.kinds.shape and column.dim() == 1
            require(name, list(column.shape), fits, "Pass columns of one length.")
            require(name, column.stride(), column.is_contiguous(), "Pass contiguous columns.")


@dataclass(frozen=True, slots=True, eq=False)
class SampleScratch:
    """Results of the parts of each row, kept so that captured graphs find them where they were.

    Attributes:
        num_parts: of a row.
        best, second: float32 [max_rows * num_parts].
        noisy: float64 [max_rows * num_parts].
        ids: int32 [max_rows * num_parts].
    """

    num_parts: int
    best: Tensor
    second: Tensor
    noisy: Tensor
    ids: Tensor


def sample_scratch(vocab_size: int, max_rows: int, device: torch.device | str) -> SampleScratch:
    """Scratch for steps of up to `max_rows` rows."""
    num_parts = triton.cdiv(vocab_size, TILE)
    count = max_rows * num_parts
    return SampleScratch(
        num_parts,
        torch.empty(count, device=device),
        torch.empty(count, device=device),
        torch.empty(count, dtype=torch.float64, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
    )


def find_highest(
    logits: Tensor, rows: SampleRows, scratch: SampleScratch, out_ids: Tensor, out_info: Tensor
) -> None:
    """Find the likeliest token of each row that is not padding.

    Args:
        logits: [R, vocab_size], float16, bfloat16 or float32; the last dimension is contiguous.
        rows: at least R.
        scratch: of at least R rows of that vocabulary.
        out_ids: int64 [R] to write to; of equal logits the lowest id.
        out_info: float32 [R, 2] to write to: the highest logit minus the second (inf if there is
            none), and the highest, which is NaN if any logit of the row is.
    """
    _check(logits, rows, scratch, out_ids, out_info)
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    parts = (scratch.best, scratch.second, scratch.ids)
    highest_parts_kernel[(num_rows, scratch.num_parts)](
        logits, rows.kinds, *parts, logits.stride(0), vocab_size, TILE=TILE, num_warps=4
    )
    join_highest_kernel[(num_rows,)](
        rows.kinds,
        *parts,
        out_ids,
        out_info,
        scratch.num_parts,
        PARTS_PAD=triton.next_power_of_2(scratch.num_parts),
        num_warps=4,
    )


def find_edges(
    logits: Tensor, rows: SampleRows, cut_rows: Tensor, top_ks: Tensor, top_ps: Tensor
) -> None:
    """Write the edges of the rows that top_k or top_p cuts.

    Args:
        logits: [R, vocab_size], a float type.
        rows: their temperatures are read, their edges are changed in place.
        cut_rows: int64 [C], which rows.
        top_ks: int64 [C], tokens to keep at most, at least 1.
        top_ps: float64 [C], keep the fewest likeliest that sum to at least this; 1.0 keeps all.
    """
    for low in range(0, cut_rows.shape[0], _CUT_ROWS):
        part = slice(low, low + _CUT_ROWS)
        chosen = cut_rows[part]
        # Adding 0.0 makes -0.0 equal to 0.0 for a sort that looks at bits.
        found = (logits[chosen].float() + 0.0).sort(dim=1, descending=True, stable=True)
        temperatures = rows.temperatures[chosen]
        last = _last_kept(found.values, temperatures, top_ks[part], top_ps[part])
        rows.edge_logits[chosen] = found.values.gather(1, last)[:, 0].double()
        rows.edge_ids[chosen] = found.indices.gather(1, last)[:, 0]


def _last_kept(ordered: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Place of the last kept logit of each row, ordered from the highest on: int64 [C, 1]."""
    top_k, top_p, temperature = top_ks[:, None], top_ps[:, None], temperatures[:, None]
    counts = torch.minimum((ordered > -torch.inf).sum(1, keepdim=True), top_k)
    is_candidate = torch.arange(ordered.shape[1], device=ordered.device) < counts
    scaled = ordered.double().div_(temperature)
    # The highest is cloned: it is itself among what is changed in place.
    shares = scaled.sub_(scaled[:, :1].clone()).exp_().masked_fill_(~is_candidate, 0.0)
    shares.div_(shares.sum(1, keepdim=True))
    # What the CPU leaves out of its sort: together too little to be needed.
    likely = (is_candidate & (shares >= 0.5 * (1.0 - top_p) / counts)).sum(1, keepdim=True)
    reaching = (shares.cumsum(1) < top_p).sum(1, keepdim=True) + 1
    counts = torch.where(top_p < 1.0, torch.minimum(reaching, likely), counts)
    return (counts - 1).clamp_(min=0)


def draw(
    logits: Tensor, rows: SampleRows, scratch: SampleScratch, out_ids: Tensor, out_info: Tensor
) -> None:
    """Draw the token of each noisy row, in float64.

    Args:
        logits, rows, scratch: as for `find_highest`, with the edges of the rows that are cut.
        out_ids: int64 [R]; greedy rows and padding are left alone. 0 where no token is kept, which
            happens only in a row of damaged logits.
        out_info: as `find_highest` wrote it.
    """
    _check(logits, rows, scratch, out_ids, out_info)
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    draw_parts_kernel[(num_rows, scratch.num_parts)](
        logits,
        rows.kinds,
        rows.seeds,
        rows.token_indices,
        rows.temperatures,
        rows.log_min_ps,
        rows.edge_logits,
        rows.edge_ids,
        out_info,
        scratch.noisy,
        scratch.ids,
        logits.stride(0),
        vocab_size,
        TILE=TILE,
        num_warps=4,
    )
    join_draw_kernel[(num_rows,)](
        rows.kinds,
        scratch.noisy,
        scratch.ids,
        out_ids,
        scratch.num_parts,
        PARTS_PAD=triton.next_power_of_2(scratch.num_parts),
        num_warps=4,
    )


def _check(
    logits: Tensor, rows: SampleRows, scratch: SampleScratch, out_ids: Tensor, out_info: Tensor
) -> None:
    shaped = logits.dim() == 2 and logits.shape[1] > 0
    require("logits", list(logits.shape), shaped, "Pass [R, vocab_size].")
    known = logits.dtype in _DTYPES
    require("logits", logits.dtype, known, "Use float16, bfloat16 or float32.")
    require("logits", logits.stride(), logits.stride(1) == 1, "Its last stride must be 1.")
    num_rows, vocab_size = logits.shape
    most = rows.kinds.shape[0]
    require("logits", num_rows, num_rows <= most, f"Pass at most {most} rows.")
    parts = triton.cdiv(vocab_size, TILE)
    require("vocab_size", vocab_size, scratch.num_parts == parts, "Make the scratch for it.")
    fits = scratch.ids.numel() >= num_rows * parts
    require("scratch", scratch.ids.numel(), fits, f"Make it for {num_rows} rows.")
    for name, out, shape, dtype in (
        ("out_ids", out_ids, (num_rows,), torch.int64),
        ("out_info", out_info, (num_rows, 2), torch.float32),
    ):
        fits = out.shape == shape and out.dtype == dtype and out.is_contiguous()
        require(name, list(out.shape), fits, f"Pass contiguous {dtype} {list(shape)}.")

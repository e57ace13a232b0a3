"""Log-probability of one token in each row of logits, which are read once."""

import triton
import triton.language as tl


@triton.jit
def score_kernel(logits, targets, scores, width, row_stride, PIECE: tl.constexpr):
    """scores[row] = logits[row, targets[row]] - log(sum of exp(logits[row])), in float32."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PIECE)
    base = logits + row * row_stride
    best = tl.full([PIECE], -float("inf"), tl.float32)
    total = tl.zeros([PIECE], tl.float32)
    for begin in range(0, width, PIECE):
        inside = begin + d < width
        value = tl.load(base + begin + d, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(best, value)
        # A lane that has seen nothing yet would subtract infinities.
        usable = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(best - usable) + tl.exp(value - usable)
        best = higher
    highest = tl.max(best, 0)
    total = tl.sum(total * tl.exp(best - highest), 0)
    chosen = tl.load(base + tl.load(targets + row)).to(tl.float32)
    tl.store(scores + row, chosen - highest - tl.log(total))

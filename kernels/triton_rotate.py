"""Rotation inside Triton kernels: each element's partner, its sign, and its angle.

With pairs (i, i + half), element d of a rotated vector is

    x[d] * cos[angle(d)] + x[partner(d)] * sign(d) * sin[angle(d)]

and elements from 2 * half on pass. So a row and its partner row are loaded once, and turning them
by another angle is two multiplications and an addition for each element, whatever the rotary
dimension.
"""

import triton
import triton.language as tl


@triton.jit
def partners(d, HALF: tl.constexpr):
    """(partner, sign, angle) of elements `d`; the sign is 0 where nothing rotates."""
    first = d < HALF
    second = (d >= HALF) & (d < 2 * HALF)
    partner = tl.where(first, d + HALF, tl.where(second, d - HALF, d))
    sign = tl.where(first, -1.0, tl.where(second, 1.0, 0.0))
    angle = tl.where(second, d - HALF, d)
    return partner, sign, angle


@triton.jit
def angles(cos, sin, position, angle, rotates, HALF: tl.constexpr):
    """cos and sin of `position` for each element: 1 and 0 where nothing rotates."""
    at = position * HALF + angle
    return tl.load(cos + at, mask=rotates, other=1.0), tl.load(sin + at, mask=rotates, other=0.0)

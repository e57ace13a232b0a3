"""Rotary position embedding: cos and sin of positions, and the rotation itself.

Pairs are (i, i + rotary_dim/2), as in "rotate half"; elements from rotary_dim on pass unchanged,
so that `inv_freq` may be shorter than half a head, or empty for a layer without rope. Angles are
made in float64, because an angle of some thousand radians loses three digits in float32. The tables
are pure cos and sin: a model's own attention scaling is already in its q and k. What a position
means (an offset in a block, a distance, an angle between two blocks) is the caller's business.
"""

import torch
from torch import Tensor

from streamkv.errors import ConfigError


class RopeTables:
    """cos and sin of every position from 0 to `num_positions - 1`, and of any other on demand.

    Args:
        inv_freq: float64 [rotary_dim / 2], radians per position.
        num_positions: rows of the tables.

    Attributes:
        inv_freq: as given.
        cos: float32 [num_positions, rotary_dim / 2].
        sin: float32 [num_positions, rotary_dim / 2].

    Raises:
        ConfigError: no positions, or frequencies that are not a float64 vector.
    """

    __slots__ = ("cos", "inv_freq", "sin")

    def __init__(self, inv_freq: Tensor, num_positions: int) -> None:
        if inv_freq.dim() != 1 or inv_freq.dtype != torch.float64:
            shown = f"{inv_freq.dtype} {list(inv_freq.shape)}"
            raise ConfigError("inv_freq", shown, "not a float64 vector", "Pass float64 [n].")
        if num_positions < 1:
            raise ConfigError("num_positions", num_positions, "no position", "Use at least 1.")
        self.inv_freq = inv_freq
        self.cos, self.sin = self._compute(torch.arange(num_positions, device=inv_freq.device))

    @property
    def num_positions(self) -> int:
        """Rows of the tables."""
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotate."""
        return 2 * self.inv_freq.shape[0]

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of int64 `positions` [...]: each float32 [..., rotary_dim / 2].

        Positions outside the tables, negative ones too, are as exact as those inside.
        """
        if not positions.numel():
            return self._compute(positions)
        low, high = positions.aminmax()
        if int(low) < 0 or int(high) >= self.num_positions:
            return self._compute(positions)
        shape, flat = (*positions.shape, self.inv_freq.shape[0]), positions.reshape(-1)
        return self.cos.index_select(0, flat).view(shape), self.sin.index_select(0, flat).view(
            shape
        )

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].double() * self.inv_freq
        return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., head_dim] turned by angles whose cos and sin [..., rotary_dim / 2] broadcast to it.

    The result has the type that `x` and `cos` promote to.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return torch.cat((turned_first, turned_second, rest.expand(*turned_first.shape[:-1], -1)), -1)


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`rotate` without temporaries: `x`, `cos` and `sin` broadcast to `out`; all of one type."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < out.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]

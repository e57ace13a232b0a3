"""The rotation against complex numbers, and tables against positions one by one."""

import cmath
import math

import pytest
import torch

from streamkv.errors import ConfigError
from streamkv.kernels.rope import RopeTables, rotate, rotate_into

INV_FREQ = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)


def test_a_quarter_turn_takes_each_pair_to_its_neighbour() -> None:
    """Pairs are (0, 2) and (1, 3); the fifth element does not turn."""
    rope = RopeTables(torch.tensor([math.pi / 2, math.pi], dtype=torch.float64), 2)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    turned = rotate(x, rope.cos[1], rope.sin[1])
    torch.testing.assert_close(turned, torch.tensor([-3.0, -2.0, 1.0, -4.0, 5.0]))


@pytest.mark.parametrize("num_rest", [0, 2])
def test_rotation_is_multiplication_by_a_unit_complex_number(num_rest: int) -> None:
    rope = RopeTables(INV_FREQ, 50)
    x = torch.randn(6 + num_rest, generator=torch.Generator().manual_seed(1))
    for position in (0, 1, 7, 49):
        expected = x.clone()
        for pair, frequency in enumerate(INV_FREQ.tolist()):
            number = complex(x[pair], x[pair + 3]) * cmath.exp(1j * frequency * position)
            expected[pair], expected[pair + 3] = number.real, number.imag
        turned = rotate(x, rope.cos[position], rope.sin[position])
        torch.testing.assert_close(turned, expected)
        out = torch.full_like(x, float("nan"))
        rotate_into(out, x, rope.cos[position], rope.sin[position])
        torch.testing.assert_close(out, expected)


def test_angles_broadcast_over_heads() -> None:
    rope = RopeTables(INV_FREQ, 8)
    x = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(2))
    turned = rotate(x, rope.cos[:, None], rope.sin[:, None])
    out = torch.full_like(x, float("nan"))
    rotate_into(out, x, rope.cos[:, None], rope.sin[:, None])
    for position in range(8):
        row = rotate(x[position, 1], rope.cos[position], rope.sin[position])
        torch.testing.assert_close(turned[position, 1], row)
        torch.testing.assert_close(out[position, 1], row)


def test_a_layer_without_rope_passes_through() -> None:
    rope = RopeTables(torch.empty(0, dtype=torch.float64), 3)
    x = torch.arange(4.0)
    assert rope.rotary_dim == 0
    assert torch.equal(rotate(x, rope.cos[2], rope.sin[2]), x)


def test_positions_beyond_the_tables_are_as_exact_as_those_inside() -> None:
    rope, large = RopeTables(INV_FREQ, 4), 1_000_003
    for positions in ([[0, 3], [2, 1]], [[-5, 3], [2, 0]], [[0, 4], [large, 1]]):
        cos, sin = rope.rows(torch.tensor(positions))
        expected = [[[math.cos(p * f) for f in INV_FREQ.tolist()] for p in r] for r in positions]
        assert cos.dtype == sin.dtype == torch.float32
        torch.testing.assert_close(cos, torch.tensor(expected), atol=1e-7, rtol=0)
        torch.testing.assert_close(cos.square() + sin.square(), torch.ones(2, 2, 3))
    assert rope.rows(torch.empty(0, 2, dtype=torch.int64))[0].shape == (0, 2, 3)


def test_frequencies_that_lose_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch.float32 \[3\].*float64 vector"):
        RopeTables(INV_FREQ.float(), 4)
    with pytest.raises(ConfigError, match="float64 vector"):
        RopeTables(INV_FREQ[None], 4)
    with pytest.raises(ConfigError, match="no position"):
        RopeTables(INV_FREQ, 0)

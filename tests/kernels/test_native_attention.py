"""What native attention refuses, and that threads change nothing; its numbers: `test_cpu`."""

from pathlib import Path

import pytest
import torch

from streamkv.kernels.native_attention import NativeAttention
from streamkv.kernels.native_attention_check import check_attention
from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")


def rope(half: int = 32, base: float = 10000.0) -> RopeTables:
    return RopeTables(base ** -(torch.arange(half, dtype=torch.float64) / half), 64)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = build(tmp_path_factory.mktemp("native"))
    try:
        NativeAttention(made, torch.zeros(2, 1, 2, 1, 64, 64), rope(), 1, 1)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    return made


@pytest.mark.parametrize(
    ("pool", "num_q_heads", "reason"),
    [
        (torch.zeros(2, 1, 2, 1, 64, 64, dtype=torch.float16), 1, "float16"),
        (torch.zeros(2, 1, 2, 1, 32, 64), 1, "blocks of 32"),
        (torch.zeros(2, 1, 2, 1, 64, 72), 1, "head_dim 72"),
        (torch.zeros(2, 1, 2, 1, 64, 512), 1, "head_dim 512"),
        (torch.zeros(2, 1, 2, 2, 64, 64), 3, "3 query heads for 2"),
        (torch.zeros(2, 1, 2, 1, 64, 48), 1, "64 rotary elements"),
        (torch.zeros(2, 1, 2, 64, 2, 64).transpose(3, 4), 2, "not contiguous"),
    ],
)
def test_what_it_does_not_know_is_refused(
    library: Path, pool: torch.Tensor, num_q_heads: int, reason: str
) -> None:
    with pytest.raises(NativeUnavailableError, match=reason):
        NativeAttention(library, pool, rope(), num_q_heads, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(library: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(12, 1, 2, 3, 64, 64, generator=generator).to(dtype)
    q = torch.randn(300, 9, 64, generator=generator).to(dtype)
    rows = [(0, 0, 300, 0, 4), *((index, 64 * index, NO_CAP, 0, 64) for index in range(1, 11))]
    table = SequenceTable(*torch.tensor(rows).t().contiguous().unbind(0), num_sink_entries=1)
    found = []
    for num_threads in (1, 2, 3):
        attention = NativeAttention(library, pool, rope(), 9, num_threads)
        found.append(attention.attend(q, 0, attention.plan(table, 404, 300, 200), 0.125))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0]) and torch.equal(other[1], found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_may_lie_in_any_order_of_heads_and_tokens(
    library: Path, dtype: torch.dtype
) -> None:
    pool = torch.randn(3, 1, 2, 1, 64, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    q = torch.randn(20, 4, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    rows = torch.tensor([(0, 0, NO_CAP, 0, 64)])
    table = SequenceTable(*rows.t().contiguous().unbind(0), num_sink_entries=0)
    attention = NativeAttention(library, pool, rope(), 4, 1)
    plan = attention.plan(table, 44, 20, 100)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not by_head.is_contiguous()
    expected = attention.attend(q, 0, plan, 0.125)[0]
    assert torch.equal(attention.attend(by_head, 0, plan, 0.125)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_differs_from_the_oracle_is_not_used(
    library: Path, dtype: torch.dtype
) -> None:
    def bind(pool: torch.Tensor) -> NativeAttention:
        return NativeAttention(library, pool, angles, 6, 2)

    pool = torch.zeros(6, 2, 2, 2, 64, 64, dtype=dtype)
    angles = rope()
    check_attention(bind, pool, rope())
    angles = rope(base=9000.0)
    with pytest.raises(NativeUnavailableError, match="differs"):
        check_attention(bind, pool, rope())

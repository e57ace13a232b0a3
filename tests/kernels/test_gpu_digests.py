"""Choosing blocks on a GPU, against the twin and against loops over tokens in float64.

On a GPU in full, else small in Triton's interpreter. Scores are NaN until they are written, and so
is all memory around the pages.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor

from streamkv.errors import ConfigError
from streamkv.kernels import digests as twin
from streamkv.kernels import gpu_digests
from streamkv.kernels.rope import RopeTables

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

DISTANCE = 700
# Tensor cores cut sums off where others round them, a number of times for each score.
RELATIVE = 5e-5 if ON_GPU else 1e-5


@pytest.fixture(autouse=True)
def nan_filled() -> Iterator[None]:
    """Every tensor that is made without a value holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


class Case(NamedTuple):
    """Sizes of a choice; `rows` are of its query heads."""

    rows: tuple[int, ...] = (0, 1, 1, 2)
    num_queries: int = 5
    num_blocks: int = 7
    num_sinks: int = 0
    head_dim: int = 64
    rotary_dim: int = 64
    block_size: int = 64
    dtype: torch.dtype = torch.float16

    @property
    def scales(self) -> list[float]:
        return [0.15 + 0.05 * head for head in range(len(self.rows))]

    def queries(self, seed: int = 1) -> Tensor:
        shape = len(self.rows), self.num_queries, self.head_dim
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (2 * made).to(self.dtype)

    def digests(self, seed: int = 2) -> Tensor:
        shape = max(self.rows) + 1, self.num_blocks, self.block_size, self.head_dim
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        # Sink tokens that draw much of the attention.
        made[:, 0, : self.num_sinks] *= 1.5
        return made.to(self.dtype)

    def angles(self) -> tuple[Tensor, Tensor]:
        half = self.rotary_dim // 2
        rope = RopeTables(10000.0 ** -(torch.arange(half).double() / half), 1)
        return rope.rows(torch.tensor(DISTANCE))

    def weights(self, queries: Tensor, pages: list[Tensor], **others: object) -> Tensor:
        """By the kernel, as float32 [n] on the host."""
        cos, sin = (each.to(DEVICE) for each in self.angles())
        given = queries.to(DEVICE), pages, self.rows, cos, sin, self.scales, self.num_sinks
        return gpu_digests.block_weights(*given, **others).cpu()  # type: ignore[arg-type]

    def of_twin(self, queries: Tensor, digests: Tensor) -> Tensor:
        return twin.block_weights(
            queries, [digests], self.rows, *self.angles(), self.scales, self.num_sinks
        )


def looped(case: Case, queries: Tensor, digests: Tensor) -> Tensor:
    """Of one softmax over all tokens, the part of each block but sink tokens, in float64."""
    half, found = case.rotary_dim // 2, []
    for head, row in enumerate(case.rows):
        for query in queries[head].double():
            turned = query.clone()
            for pair in range(half):
                angle = DISTANCE * 10000.0 ** -(pair / half)
                a, b = float(query[pair]), float(query[pair + half])
                turned[pair] = a * math.cos(angle) - b * math.sin(angle)
                turned[pair + half] = b * math.cos(angle) + a * math.sin(angle)
            parts = (digests[row].double() @ turned * case.scales[head]).flatten().softmax(0)
            parts[: case.num_sinks] = 0
            found.append(parts.view(case.num_blocks, case.block_size).sum(1))
    return torch.stack(found).mean(0)


CASES = {
    "plain": Case(),
    "one of each": Case(rows=(0,), num_queries=1, num_blocks=1),
    "two blocks": Case(num_blocks=2, num_sinks=63),
    "sinks": Case(num_blocks=3, num_sinks=4, dtype=torch.bfloat16),
    "one block of sinks": Case(num_blocks=1, num_sinks=1),
    "16 queries": Case(rows=(1, 0, 1), num_queries=16, num_blocks=17, head_dim=32, rotary_dim=32),
    "17 queries": Case(rows=(0, 0), num_queries=17, num_blocks=2),
    "a group of four": Case(rows=(1, 1, 1, 1, 0, 0, 0), num_blocks=3, dtype=torch.bfloat16),
    "head_dim 80": Case(head_dim=80, rotary_dim=80, num_blocks=3, num_sinks=2),
    "head_dim 96": Case(head_dim=96, rotary_dim=48, num_blocks=3, dtype=torch.bfloat16),
    "head_dim 128": Case(head_dim=128, rotary_dim=128, num_blocks=2, num_sinks=17),
    "head_dim 8": Case(head_dim=8, rotary_dim=8, num_blocks=2),
    "no rope": Case(head_dim=16, rotary_dim=0, num_blocks=2),
    "blocks of 16": Case(block_size=16, num_blocks=5, num_sinks=15),
    "blocks of 48": Case(block_size=48, num_blocks=4, num_sinks=5, dtype=torch.bfloat16),
}
if ON_GPU:
    CASES["many"] = Case((0, 1, 2, 2, 3, 4, 4, 5), 16, 300, 4, 128, 128, 64, torch.bfloat16)
    CASES["head_dim 256"] = Case((0, 1, 1), 16, 33, 4, 256, 256, 64, torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_twin_and_of_loops(name: str) -> None:
    case = CASES[name]
    queries, digests = case.queries(), case.digests()
    found = case.weights(queries, [digests.to(DEVICE)]).double()
    assert found.shape == (case.num_blocks,)
    expected = looped(case, queries, digests)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=RELATIVE)
    torch.testing.assert_close(
        found, case.of_twin(queries, digests).double(), atol=0, rtol=RELATIVE
    )
    if case.num_sinks:
        assert expected.sum() < 0.99


def sliced(digests: Tensor, *cuts: int) -> list[Tensor]:
    """Pages cut before these blocks, each part of a larger one that holds NaN elsewhere."""
    pages = []
    for number, part in enumerate(torch.tensor_split(digests, cuts, 1)):
        rows, count, *shape = part.shape
        page = torch.full((rows, count + 3, *shape), math.nan, dtype=part.dtype, device=DEVICE)
        page[:, number % 3 : number % 3 + count] = part
        pages.append(page[:, number % 3 : number % 3 + count])
    return pages


def test_pages_in_reach_are_one_launch_and_to_the_bit_it_does_not_matter_how_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case((0, 1, 1), 3, 6, 4, 32, 32)
    queries, digests = case.queries(), case.digests()
    launched, score = [], gpu_digests._score

    def counted(queries: Tensor, places: list[tuple[int, ...]], *rest: Any) -> None:
        launched.append(len(places))
        score(queries, places, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_digests, "_score", counted)
    whole = case.weights(queries, [digests.to(DEVICE)])
    for cuts in ((1,), (3, 5), (1, 2, 3, 4, 5)):
        assert torch.equal(case.weights(queries, sliced(digests, *cuts)), whole)
        assert launched.pop() == len(cuts) + 1
    assert launched == [1]


def test_pages_out_of_reach_are_brought_once_and_weigh_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but what was fetched is read of them."""
    case = Case((0, 1, 1), 3, 4, 4, 32, 32)
    queries, digests = case.queries(), case.digests()
    here = sliced(digests, 1, 2)
    away = [torch.full_like(page, math.nan) for page in here]
    monkeypatch.setattr(gpu_digests, "_is_in_reach", lambda page, _: page is here[1])
    moved: list[tuple[int, int]] = []

    def fetch(keys: Tensor) -> Tensor:
        for number, page in enumerate(away):
            for row, its_keys in enumerate(page):
                if keys.data_ptr() == its_keys.data_ptr() and keys.shape == its_keys.shape:
                    moved.append((number, row))
                    return here[number][row].clone()
        raise AssertionError("none of these pages")

    found = case.weights(queries, [away[0], here[1], away[2]], fetch=fetch)
    assert moved == [(number, row) for number in (0, 2) for row in range(2)]
    assert torch.equal(found, case.weights(queries, here))
    assert torch.equal(found, case.weights(queries, [digests.to(DEVICE)], fetch=lambda keys: keys))


def test_a_page_that_is_not_laid_out_as_one_is() -> None:
    """Zeros that take no memory, as an index gives for a page that it has no memory for."""
    case = Case(num_blocks=4, num_queries=3, head_dim=32, rotary_dim=32)
    queries, digests = case.queries(), case.digests()
    digests[:, 1:3] = 0
    nothing = torch.zeros(1, dtype=case.dtype, device=DEVICE).expand(3, 2, 64, 32)
    first, last = digests[:, :1].to(DEVICE), digests[:, 3:].transpose(2, 3).to(DEVICE)
    pages = [first, nothing, last.contiguous().transpose(2, 3)]
    assert torch.equal(case.weights(queries, pages), case.weights(queries, [digests.to(DEVICE)]))


def test_queries_may_lie_anyhow() -> None:
    case = Case(num_blocks=2, head_dim=32, rotary_dim=32)
    queries, pages = case.queries(), [case.digests().to(DEVICE)]
    expected = case.weights(queries, pages)
    by_token = torch.full((5, 9, 32), math.nan, dtype=case.dtype, device=DEVICE)
    by_token[:, 3:7] = queries.transpose(0, 1)
    assert torch.equal(case.weights(by_token[:, 3:7].transpose(0, 1), pages), expected)
    by_element = queries.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.weights(by_element, pages), expected)


@pytest.mark.parametrize("scratch_bytes", [0, 2 * 4 * 3 * 5 * 5])
def test_without_memory_for_all_scores_some_heads_come_first(
    scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each KV head for itself, or as many as have three query heads; in any order of rows."""
    case = Case(rows=(2, 0, 1, 2), num_blocks=4, num_sinks=4, head_dim=32, rotary_dim=32)
    queries, digests = case.queries(), case.digests()
    monkeypatch.setattr(gpu_digests, "SCRATCH_BYTES", scratch_bytes)
    groups = [[0, 3], [1], [2]] if scratch_bytes == 0 else [[0, 3, 1], [2]]
    assert list(gpu_digests._groups(case.rows, 4 * 5 * 5)) == groups
    found = case.weights(queries, [digests.to(DEVICE)])
    torch.testing.assert_close(found, case.of_twin(queries, digests), atol=0, rtol=RELATIVE)


@pytest.mark.parametrize(
    "case",
    [
        Case(num_queries=33),
        Case(rows=(0,) * 33),
        Case(dtype=torch.float32),
        Case(head_dim=512),
        Case(head_dim=256, block_size=128),
        Case(head_dim=6, block_size=18),
    ],
)
def test_other_sizes_are_refused_and_left_to_the_twin(case: Case) -> None:
    queries, page = case.queries().to(DEVICE), case.digests().to(DEVICE)
    assert gpu_digests.fits(CASES["plain"].queries(), [CASES["plain"].digests()])
    assert not gpu_digests.fits(queries, [page])
    with pytest.raises(ConfigError, match="queries"):
        case.weights(queries, [page])
    cos, sin = (each.to(DEVICE) for each in case.angles())
    if case.head_dim >= case.rotary_dim:
        found = twin.block_weights(queries, [page], case.rows, cos, sin, case.scales)
        assert found.sum().item() == pytest.approx(1)


@needs_gpu
def test_on_a_gpu_pages_weigh_the_same_to_the_bit_wherever_they_lie() -> None:
    """On the device, page-locked, in plain memory, and some here and some there."""
    case = Case((0, 1, 1, 2), 16, 200, 4, 128, 128, 64, torch.bfloat16)
    queries, digests = case.queries().cuda(), case.digests()
    angles = tuple(each.cuda() for each in case.angles())

    def fetch(keys: Tensor) -> Tensor:
        return keys.cuda()

    def weights(pages: list[Tensor]) -> Tensor:
        """By the twin's name, which leaves it to the kernel."""
        others = case.scales, case.num_sinks, fetch
        return twin.block_weights(queries, pages, case.rows, *angles, *others).cpu()

    expected = weights([digests.cuda()])
    assert torch.equal(expected, case.weights(queries, [digests.cuda()]))
    torch.testing.assert_close(
        expected, case.of_twin(queries.cpu(), digests), atol=0, rtol=RELATIVE
    )
    plain = [page.clone() for page in torch.tensor_split(digests, [64, 130], 1)]
    pinned = [page.pin_memory() for page in plain]
    there = [page.cuda() for page in plain]
    for pages in (there, pinned, plain, [there[0], pinned[1], plain[2]], [pinned[0], *there[1:]]):
        assert torch.equal(weights(pages), expected)
    # A slice of a page-locked page.
    cut = [pinned[0], pinned[1][:, :9], pinned[1][:, 9:], pinned[2]]
    assert torch.equal(weights(cut), expected)


@needs_gpu
def test_on_a_gpu_a_choice_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keys in page-locked memory are not copied."""
    case = Case((0, 1, 1, 2), 16, 200, 4, 128, 128, 64, torch.bfloat16)
    queries = case.queries().cuda()
    pages = [part.clone().pin_memory() for part in case.digests().split(20, 1)]
    angles = tuple(each.cuda() for each in case.angles())

    def choose() -> Tensor:
        return twin.block_weights(queries, pages, case.rows, *angles, case.scales, case.num_sinks)

    choose()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        choose()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert 2 <= len(names) <= 10, names
    assert sum("digest_scores_kernel" in name for name in names) == 1

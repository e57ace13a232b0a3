"""Native scores against float64, for any width of the vocabulary."""

import pytest
import torch

from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler
from streamkv.kernels.native_scores import NativeScores, check_scores

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> NativeScores:
    return NativeScores(build(tmp_path_factory.mktemp("native")), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 2047, 2048, 2065, 49152])
def test_equals_float64(scores: NativeScores, width: int, dtype: torch.dtype) -> None:
    logits = 20.0 * torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    logits = logits.to(dtype)
    targets = torch.tensor([0, width - 1, width // 2, width // 3, 0])
    expected = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    found = scores.score(logits, targets)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-6)


def test_logits_that_rule_tokens_out(scores: NativeScores) -> None:
    logits = torch.full((2, 40), -torch.inf)
    logits[0, 7] = 3.0
    logits[1, 7:9] = -1000.0
    found = scores.score(logits, torch.tensor([7, 8]))
    torch.testing.assert_close(found, torch.tensor([0.0, -0.6931472]))
    assert scores.score(logits, torch.tensor([6, 6])).tolist() == [-torch.inf, -torch.inf]


def test_no_rows(scores: NativeScores) -> None:
    assert scores.score(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_the_check_refuses_a_type_that_it_does_not_know(scores: NativeScores) -> None:
    check_scores(scores, torch.float32)
    check_scores(scores, torch.bfloat16)
    with pytest.raises(NativeUnavailableError, match="float16"):
        check_scores(scores, torch.float16)

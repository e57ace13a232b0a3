"""Choose the next token from the logits of one sequence.

Order: repetition penalty over the recent ids, temperature, top_k, top_p, min_p, then the draw by
Gumbel-max. Invariant: the choice is a function of (logits, params, token_index, recent ids) alone,
and the noise of (seed, token_index, token_id) alone, so only a near tie can come out otherwise when
the logits are computed another way. Equal values: the lowest id wins. It knows neither sessions nor
text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from streamkv.errors import ConfigError, InputError, ModelError
from streamkv.noise import gumbel
from streamkv.outputs import TokenLogprob
from streamkv.sampling_params import SamplingParams, resolve_seed

__all__ = [
    "SampledToken",
    "SamplingParams",
    "check_highest",
    "drawn_seed",
    "resolve_seed",
    "sample",
    "token_logprob",
]

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class SampledToken:
    """A chosen token; nobody changes it.

    Attributes:
        token_id: the token.
        margin: raw logit of the likeliest token minus that of the second.
        logprob: of the raw distribution, if asked for.
    """

    token_id: int
    margin: float
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Token ids still in the draw, ascending, and their logits after the temperature."""

    ids: Ids  # [num_candidates]
    logits: Floats  # [num_candidates], finite

    def keep(self, which: npt.NDArray[np.bool_] | Ids) -> "_Candidates":
        return _Candidates(self.ids[which], self.logits[which])


def sample(
    logits: torch.Tensor, params: SamplingParams, token_index: int, recent_ids: Sequence[int] = ()
) -> SampledToken:
    """Choose the token at `token_index` of the stream.

    Args:
        logits: [vocab_size], any float type and device.
        params: with a seed (`resolve_seed`) unless greedy.
        token_index: index in the stream that the chosen token will have.
        recent_ids: tokens that the repetition penalty looks at; order and repeats do not matter.

    Raises:
        ModelError: a logit is NaN or +inf, or none is finite.
        ConfigError: `params.seed` is None and the temperature is not 0.
        InputError: a recent id outside the vocabulary.
    """
    raw = _checked_logits(logits, token_index)
    penalised = _penalise(raw, params.repetition_penalty, recent_ids)
    token_id = int(np.argmax(penalised))
    if not params.is_greedy:
        token_id = _draw(_truncate(penalised, params), drawn_seed(params), token_index)
    logprob = None if params.logprobs is None else token_logprob(raw, token_id, params.logprobs)
    return SampledToken(token_id, _margin(raw), logprob)


def token_logprob(raw: Floats, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of `token_id` and of the `num_top` likeliest, from raw logits [vocab_size].

    `top` is ordered likeliest first, of equal ones the lowest id first.
    """
    log_total = float(raw.max() + np.log(np.exp(raw - raw.max()).sum()))
    likeliest = _top_k(_Candidates(np.arange(raw.size), raw), num_top) if num_top else None
    top: list[tuple[int, float]] = []
    if likeliest is not None:
        order = np.argsort(-likeliest.logits, kind="stable")
        top = [(int(likeliest.ids[i]), float(likeliest.logits[i]) - log_total) for i in order]
    return TokenLogprob(token_id, float(raw[token_id]) - log_total, tuple(top))


def check_highest(highest: float, token_index: int) -> None:
    """Raise `ModelError` unless the highest logit (NaN if any logit is NaN) is finite."""
    if not math.isfinite(highest):
        raise ModelError(
            f"logits of token_index={token_index}: the largest is {highest}. Weights or arithmetic "
            "are damaged: check the model files, or use dtype='float32'."
        )


def drawn_seed(params: SamplingParams) -> int:
    """The seed of the noise; `ConfigError` if none was drawn."""
    if params.seed is None:
        raise ConfigError("seed", None, "no seed was drawn", "Call resolve_seed(params) first.")
    return params.seed


def _checked_logits(logits: torch.Tensor, token_index: int) -> Floats:
    assert logits.ndim == 1 and logits.numel() > 0, logits.shape
    # numpy widens: torch would wake its thread pool for one row.
    raw = logits.detach().to("cpu", torch.float32).numpy().astype(np.float64)
    check_highest(float(raw.max()), token_index)
    return raw


def _margin(raw: Floats) -> float:
    """Largest minus second largest; inf if there is no second."""
    best = int(np.argmax(raw))
    rest = np.concatenate((raw[:best], raw[best + 1 :])).max(initial=-np.inf)
    return float(raw[best] - rest)


def _penalise(raw: Floats, penalty: float, recent_ids: Sequence[int]) -> Floats:
    if penalty == 1.0 or len(recent_ids) == 0:
        return raw
    ids = np.unique(np.asarray(recent_ids, dtype=np.int64))
    if ids[0] < 0 or ids[-1] >= raw.size:
        bad = int(ids[0] if ids[0] < 0 else ids[-1])
        raise InputError("recent_ids", bad, "outside the vocabulary", f"Use 0 to {raw.size - 1}.")
    penalised = raw.copy()
    penalised[ids] = np.where(raw[ids] > 0, raw[ids] / penalty, raw[ids] * penalty)
    return penalised


def _truncate(logits: Floats, params: SamplingParams) -> _Candidates:
    ids = np.flatnonzero(np.isfinite(logits))
    candidates = _Candidates(ids, logits[ids] / params.temperature)
    if params.top_k > 0:
        candidates = _top_k(candidates, params.top_k)
    if params.top_p < 1.0:
        candidates = _top_p(candidates, params.top_p)
    if params.min_p > 0.0:
        least = candidates.logits.max() + np.log(params.min_p)
        candidates = candidates.keep(candidates.logits >= least)
    return candidates


def _top_k(candidates: _Candidates, k: int) -> _Candidates:
    """The k likeliest; of equal ones at the edge, the lowest ids."""
    if k >= candidates.ids.size:
        return candidates
    edge = np.partition(candidates.logits, -k)[-k]
    kept = candidates.logits > edge
    at_edge = np.flatnonzero(candidates.logits == edge)
    kept[at_edge[: k - int(kept.sum())]] = True
    return candidates.keep(kept)


def _top_p(candidates: _Candidates, p: float) -> _Candidates:
    """The fewest likeliest whose probabilities sum to at least p; of equal ones, the lowest ids."""
    weights = np.exp(candidates.logits - candidates.logits.max())
    probabilities = weights / weights.sum()
    # Tokens below (1 - p) / n hold less than 1 - p together, so the others reach p without them.
    # The half leaves room for rounding. Sorting the few that remain is what makes this cheap.
    likely = np.flatnonzero(probabilities >= 0.5 * (1.0 - p) / probabilities.size)
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    reached = np.cumsum(probabilities[order])
    count = min(int(np.searchsorted(reached, p)) + 1, order.size)
    return candidates.keep(np.sort(order[:count]))


def _draw(candidates: _Candidates, seed: int, token_index: int) -> int:
    noisy = candidates.logits + gumbel(seed, token_index, candidates.ids)
    return int(candidates.ids[int(np.argmax(noisy))])

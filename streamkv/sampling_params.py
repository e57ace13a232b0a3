"""How the next token is chosen: options of a generation, checked before any work.

Every option has its default here and nowhere else. A bad value raises `ConfigError` with field,
value and remedy; an option that does not exist raises `UnknownOptionError`. It does not know the
model: the engine checks `stop_ids` against the vocabulary.
"""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from streamkv.config import refuse_unknown_options, require_int
from streamkv.errors import ConfigError

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of a generation.

    The defaults are those of a chat: mildly random (temperature 0.7, top_p 0.95), until the model
    ends its turn. `SamplingParams(temperature=0.0)` is greedy.

    Attributes:
        temperature: divides the logits; 0.0 always takes the likeliest token.
        top_k: keep the `top_k` likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities sum to at least `top_p`.
        min_p: keep tokens at least `min_p` times as likely as the likeliest.
        repetition_penalty: logits of recent tokens are divided by it if positive, multiplied if
            negative; 1.0 changes nothing, above 1.0 discourages repetition.
        seed: 0 to 2^64 - 1; the same seed at the same place of the same stream draws the same
            token. `None`: one is drawn for the generation (see `resolve_seed`).
        stop: a text, or several, that end the generation; never part of the output.
        stop_ids: token ids that end the generation, besides the model's own end of turn.
        max_tokens: most tokens of the generation; `None`: no limit.
        ignore_eos: go on after the model's own end of turn.
        logprobs: report the log-probability of each token, and this many of the likeliest; `None`:
            report none.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse_unknown_options(cls, kwargs)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 100.0)
        require_int("top_k", self.top_k, 0)
        _require_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        if self.seed is not None:
            require_int("seed", self.seed, 0, MAX_SEED)
        _require_stop(self.stop)
        _require_stop_ids(self.stop_ids)
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 1)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("ignore_eos", self.ignore_eos, "not a choice", "Use True or False.")
        if self.logprobs is not None:
            require_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end the generation, whichever way `stop` was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether no noise takes part."""
        return self.temperature == 0.0


def resolve_seed(params: SamplingParams) -> SamplingParams:
    """`params` with a seed: its own, else one drawn now.

    The caller writes it to the journal and reports it, so that the generation can be repeated. A
    drawn seed has 53 bits, so that every JSON reader carries it exactly.
    """
    if params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(53))


def _require_number(
    field: str, value: object, minimum: float, maximum: float, *, above: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    bound = f"above {minimum:g} and at most" if above else f"from {minimum:g} to"
    # abs, not isfinite: a whole number beyond the range of floats has no float to ask about.
    if is_number and abs(value) < math.inf:  # type: ignore[arg-type]  # is_number narrows
        inside = minimum <= value <= maximum  # type: ignore[operator]  # is_number narrows
        if inside and not (above and value == minimum):
            return
    raise ConfigError(field, value, "out of range", f"Use a number {bound} {maximum:g}.")


def _require_stop(stop: object) -> None:
    remedy = "Use a text, or a list or tuple of texts, none of them empty."
    texts = [stop] if isinstance(stop, str) and stop else stop
    if not isinstance(texts, list | tuple):
        raise ConfigError("stop", stop, "not a list of texts", remedy)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError("stop", stop, f"{text!r} can never be found in a text", remedy)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise ConfigError("stop", stop, "not valid Unicode", "Remove the lone surrogates.")


def _require_stop_ids(stop_ids: object) -> None:
    remedy = "Use a list or tuple of token ids, such as [2]."
    if not isinstance(stop_ids, list | tuple):
        raise ConfigError("stop_ids", stop_ids, "not a list of token ids", remedy)
    for token_id in stop_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ConfigError("stop_ids", stop_ids, f"{token_id!r} is not a token id", remedy)

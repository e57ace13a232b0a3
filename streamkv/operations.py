"""What callers ask of the engine's thread. Plain data."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from streamkv.batch import Wanted
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Compute `num_tokens` pending tokens of `sequence`.

    Attributes:
        sequence: whose tokens.
        num_tokens: how many.
        wanted: NOTHING: the reply's result is `None`; SCORES: float32 [n] log-probabilities;
            LOGITS: what `on_logits` returns, or a `SampledToken` chosen by `params`.
        on_logits: called on the engine's thread with float32 [vocab_size], unless the device
            chose.
        after_step: called on the engine's thread after each step, blocks already sealed.
        params: with LOGITS: how the device may choose the token itself.
        resolves_at_launch: with SCORES: the reply's result is another reply, of the scores; it is
            there as soon as the last step was launched and its tokens count as computed, so that
            more of the same sequence can be asked for.
    """

    sequence: Sequence
    num_tokens: int
    wanted: Wanted = Wanted.NOTHING
    on_logits: Callable[[Tensor], object] | None = None
    after_step: Callable[[], None] | None = None
    params: SamplingParams | None = None
    resolves_at_launch: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Run a function on the engine's thread, between two steps.

    Attributes:
        function: to be run; the reply's result is what it returns.
        sequence: that is to be awake then; `None`: none needs to be.
        is_aside: it touches no blocks, so that it need not wait for steps under way.
    """

    function: Callable[[], object]
    sequence: Sequence | None = None
    is_aside: bool = False

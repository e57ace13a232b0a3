"""From sampled tokens to deltas: whole characters only, stop strings withheld, when to stop."""

from streamkv.detokenizer import IncrementalDecoder
from streamkv.outputs import Delta, FinishReason
from streamkv.sampling import SampledToken, SamplingParams
from streamkv.stop import StopMatcher


class Generation:
    """The text side of one generation.

    Args:
        params: options of the generation.
        decoder: turns token ids into text.
        eos_ids: tokens by which the model ends a turn.
        turn_stops: texts by which it ends a turn.
    """

    def __init__(
        self,
        params: SamplingParams,
        decoder: IncrementalDecoder,
        eos_ids: frozenset[int],
        turn_stops: tuple[str, ...] = (),
    ) -> None:
        self._max_tokens = params.max_tokens
        self._decoder = decoder
        turn_stops = () if params.ignore_eos else turn_stops
        self._matcher = StopMatcher((*params.stop_strings, *turn_stops))
        ends = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = ends | frozenset(params.stop_ids)
        self._num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token: SampledToken, token_index: int) -> Delta:
        """The delta of one token; the last one has the finish reason and all text held back."""
        self._num_tokens += 1
        text = self._text(token.token_id)
        if self.finish_reason is None and self._num_tokens == self._max_tokens:
            self.finish_reason = FinishReason.LENGTH
            text += self._flush()
        return Delta(
            text=text,
            token_id=token.token_id,
            token_index=token_index,
            finish_reason=self.finish_reason,
            logprob=token.logprob,
            margin=token.margin,
        )

    def _text(self, token_id: int) -> str:
        if token_id in self._stop_ids:
            self.finish_reason = FinishReason.STOP
            return self._flush()
        emitted = self._matcher.push(self._decoder.push(token_id))
        if emitted.stopped:
            self.finish_reason = FinishReason.STOP
        return emitted.text

    def _flush(self) -> str:
        emitted = self._matcher.push(self._decoder.flush())
        if emitted.stopped:
            return emitted.text
        return emitted.text + self._matcher.flush()

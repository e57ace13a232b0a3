"""Sizes in tokens of the pieces of a summary, so that every question fits the window. Pure."""

from dataclasses import dataclass

from streamkv.errors import ConfigError
from streamkv.summarize.prompts import notes_prompt, segment_prompt
from streamkv.summarize.reduction import Limits
from streamkv.summarize.segments import MIN_SEGMENT_TOKENS, CountTokens

DEFAULT_SEGMENT_TOKENS = 320
MAX_ANSWER_TOKENS = 120
# Of a turn around the prompt: role, newlines, markers.
_TURN_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in tokens: of a segment, and of an answer."""

    segment: int
    answer: int

    @property
    def limits(self) -> Limits:
        """For the reduction: questions about notes are as long as those about the transcript."""
        return Limits(max(self.segment, 2 * self.answer), self.answer)


def make_plan(count_tokens: CountTokens, window_size: int, segment_tokens: int | None) -> Plan:
    """Sizes that fit a window; `segment_tokens=None`: 320, or what there is room for.

    Raises:
        ConfigError: the window is too small, or has no room for `segment_tokens`.
    """
    answer = min(MAX_ANSWER_TOKENS, window_size // 8)
    prompts = (segment_prompt(""), notes_prompt(""))
    frame = max(map(count_tokens, prompts)) + _TURN_TOKENS
    room = window_size - frame - answer
    if room < max(MIN_SEGMENT_TOKENS, 2 * answer):
        raise ConfigError(
            "window_size",
            window_size,
            "no room for a part of the transcript, the question and the answer",
            f"Use at least {2 * (frame + MIN_SEGMENT_TOKENS)}.",
        )
    if segment_tokens is None:
        return Plan(min(DEFAULT_SEGMENT_TOKENS, room), answer)
    if not MIN_SEGMENT_TOKENS <= segment_tokens <= room:
        raise ConfigError(
            "segment_tokens",
            segment_tokens,
            "out of range",
            f"Use {MIN_SEGMENT_TOKENS} to {room} with a window of {window_size}.",
        )
    return Plan(segment_tokens, answer)

"""How much of the text the demo reads, and where it copies and kills. Pure arithmetic.

    0 ........ copy_at .... kill_at ............ end
               |  lead     |
               the undisturbed run reads on from here

Invariant: at most `MAX_LEAD_TOKENS` lie between copy and kill, and the end is at least
`MIN_WINDOWS` windows from the start, however slow the machine.
"""

from dataclasses import dataclass, replace

MIN_WINDOWS = 8
MAX_LEAD_TOKENS = 6144
"""Below the 8,192 that the demo promises, because a process is killed a few steps later."""

MIN_CHARS_PER_WINDOW_TOKEN = 32
"""A shorter text may hold fewer than `MIN_WINDOWS` windows (4 characters to a token)."""

KILL_FRACTION = 0.7
LEAD_S = 6.0
WRITTEN_TOKENS = 300
"""Tokens that all processes together generate, at most."""

PREFILL_PER_DECODE = 20
"""Tokens that are read in the time in which one is generated: guessed, for the time it leaves."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What has been measured so far.

    Attributes:
        elapsed_s: since the demo began.
        start_s: that starting a reading process takes.
        token_index: tokens read.
        text_chars: characters read.
        tokens_per_s: of reading.
    """

    elapsed_s: float
    start_s: float
    token_index: int
    text_chars: int
    tokens_per_s: float

    def later(self, elapsed_s: float, token_index: int, text_chars: int) -> "Pace":
        """The same rate at a later time and place."""
        return replace(self, elapsed_s=elapsed_s, token_index=token_index, text_chars=text_chars)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to do what.

    Attributes:
        copy_at: tokens read when the copy is taken.
        lead: tokens from the copy to the kill.
        end_chars: characters of the text that are read in all.
    """

    copy_at: int
    lead: int
    end_chars: int


def make_plan(pace: Pace, num_chars: int, window_size: int, limit_s: float) -> Plan:
    """Plan the reading of a text of `num_chars` characters within `limit_s` seconds."""
    end_chars = end_within(pace, num_chars, window_size, limit_s)
    end_tokens = round(end_chars * pace.token_index / pace.text_chars)
    kill_at = int(end_tokens * KILL_FRACTION)
    wanted = max(2 * window_size, int(pace.tokens_per_s * LEAD_S))
    lead = min(wanted, MAX_LEAD_TOKENS, kill_at // 2)
    return Plan(kill_at - lead, lead, end_chars)


def end_within(
    pace: Pace, num_chars: int, window_size: int, limit_s: float, *, starts: int = 2
) -> int:
    """Characters that can be read when all else that is to be done is left time for.

    Args:
        pace: what has been measured.
        num_chars: of the text.
        window_size: tokens.
        limit_s: seconds of the whole demo.
        starts: processes that are yet to be started.
    """
    chars_per_token = pace.text_chars / pace.token_index
    decode_s = WRITTEN_TOKENS * PREFILL_PER_DECODE / pace.tokens_per_s
    lead_s = min(MAX_LEAD_TOKENS / pace.tokens_per_s, LEAD_S)
    left_s = limit_s - pace.elapsed_s - starts * pace.start_s - decode_s - lead_s
    end_tokens = pace.token_index + max(0.0, left_s) * pace.tokens_per_s
    at_least = max(MIN_WINDOWS * window_size, pace.token_index)
    return min(num_chars, int(max(end_tokens, at_least) * chars_per_token))

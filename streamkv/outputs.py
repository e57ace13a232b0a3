"""What a session hands to its user. Plain data, no behaviour."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkv.digest_pages import DigestUsage
from streamkv.tiers.usage import TierUsage


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens reached


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token, and of the likeliest ones.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability before temperature and truncation.
        top: the likeliest (token_id, logprob) pairs, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of a generation.

    Attributes:
        text: new text, never part of a character or of a stop string; may be empty.
        token_id: the token of this step; `None` only for a last flush of held-back text.
        token_index: index of that token in the session's stream.
        finish_reason: set on the last delta.
        logprob: if asked for.
        margin: logit of the likeliest token minus that of the second, before any processing.
    """

    text: str
    token_id: int | None
    token_index: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
    margin: float = float("inf")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a feed has come.

    Attributes:
        num_tokens: tokens of this feed computed so far.
        token_index: tokens in the session's stream that are computed.
        text_chars: characters of text that the session has accepted since it was created; after a
            crash, go on feeding from there.
        tokens_per_s: rate of this feed.
        num_reused: of `num_tokens`, those whose blocks were stored already and not computed.
    """

    num_tokens: int
    token_index: int
    text_chars: int
    tokens_per_s: float
    num_reused: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """How expected a token was.

    Attributes:
        token_id: the token.
        text: its text; a character that spans tokens appears with its last one.
        token_index: index in the session's stream.
        logprob: natural logarithm of its probability given all before it; `None` for the first
            token of a stream.
    """

    token_id: int
    text: str
    token_index: int
    logprob: float | None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScores:
    """How expected the tokens of a prefill chunk were, as arrays of the same length.

    Attributes:
        token_index: index of the first of them in the session's stream; the others follow it.
        token_ids: int64 [n], the tokens.
        logprobs: float32 [n], natural logarithm of each one's probability given all before it; NaN
            for the first token of a stream.
    """

    token_index: int
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


class Attended(NamedTuple):
    """An old block that was attended besides the window.

    Attributes:
        start, end: its token indices, half-open.
        text: what it says, as far as the session remembers its ids.
        weight: which share of their attention the heads that choose would give it, 0 to 1, the
            largest of all choices it was part of; `None` for a choice made before a restart.
    """

    start: int
    end: int
    text: str
    weight: float | None


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Where a session stands.

    Attributes:
        name: the session's name.
        num_tokens: tokens in the stream.
        num_computed: of these, tokens whose KV was computed.
        num_sink_tokens: tokens attended for ever.
        num_window_tokens: newest tokens attended now.
        text_chars: characters of text accepted.
        num_blocks: blocks that the session holds in the gpu pool.
        tiers: usage of each tier, all sessions together.
        counters: promotions, demotions, evictions, misses and the like, by name.
        num_reused: tokens of this session, since it was opened, whose blocks were stored already.
        digests: bytes of the digests by which old blocks are chosen, all sessions together.
        state: `awake`: its blocks are in the gpu pool; `asleep`: below; `waiting` for room;
            `waking` or `leaving`: on the way.
        queue_position: its place among those that wait, 1 for the next.
    """

    name: str
    num_tokens: int
    num_computed: int
    num_sink_tokens: int
    num_window_tokens: int
    text_chars: int
    num_blocks: int
    tiers: dict[str, TierUsage] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    num_reused: int = 0
    digests: DigestUsage = field(default_factory=DigestUsage)
    state: str = "awake"
    queue_position: int | None = None

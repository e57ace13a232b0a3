"""Scoring by whole prefill chunks: an object for each chunk instead of one for each token.

A chunk is computed once all of it and the token after it are accepted, up to an absolute multiple
of the prefill chunk, so that neither its place nor a bit of its scores depends on how the input was
cut. While a device computes it, the next one is accepted and launched, as far as the item in hand
reaches; only then are its scores waited for and handed out.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkv.batch import Wanted
from streamkv.driver import Steps
from streamkv.live import LiveStream
from streamkv.operations import Compute
from streamkv.outputs import ChunkScores
from streamkv.reply import Reply


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A chunk that was launched.

    Attributes:
        token_index: of its first scored token.
        token_ids: those that are scored.
        scores: float32, of all of them but a stream's first token.
    """

    token_index: int
    token_ids: list[int]
    scores: Reply[Any]


class ChunkScoring:
    """One scoring of a stream, which is computed but for its last token.

    Args:
        live: the stream.
        is_new: it was empty: its first token has nothing before it.
    """

    def __init__(self, live: LiveStream, is_new: bool) -> None:
        self._live = live
        self._is_new = is_new
        self._under_way: deque[_Chunk] = deque()
        self.has_accepted = False

    def read(self, item: Any) -> Steps:
        """Accept an item and score the chunks that are full with it.

        What was launched is handed out before an error is raised, and before more is asked for.
        """
        live = self._live
        try:
            for piece in live.intake.pieces(item):
                self.has_accepted = True
                live.intake.accept(piece)
                while live.sequence.num_pending > (size := live.next_chunk()):
                    yield from self._go_on(size)
        except Exception:
            yield from self._land()
            raise
        yield from self._land()

    def finish(self) -> Steps:
        """Score what is left: the input ends here."""
        live = self._live
        live.intake.flush()
        try:
            while (left := live.sequence.num_pending - 1) > 0:
                yield from self._go_on(min(left, live.next_chunk()))
        except Exception:
            yield from self._land()
            raise
        yield from self._land()
        if self._is_new and live.sequence.num_pending:
            yield _chunk_scores(0, live.sequence.next_ids(1), _NOTHING)

    def _go_on(self, size: int) -> Steps:
        """Launch a chunk, then hand out the one before it."""
        sequence = self._live.sequence
        first = sequence.num_computed + 1
        token_ids = sequence.next_ids(size + 1)
        if self._is_new:
            first = 0
        else:
            del token_ids[0]
        after = self._live.after_step
        scores = yield Compute(
            sequence, size, Wanted.SCORES, after_step=after, resolves_at_launch=True
        )
        self._is_new = False
        self._under_way.append(_Chunk(first, token_ids, scores))
        if len(self._under_way) > 1:
            yield from self._land_one()

    def _land(self) -> Steps:
        while self._under_way:
            yield from self._land_one()

    def _land_one(self) -> Steps:
        chunk = self._under_way.popleft()
        try:
            scores = yield chunk.scores
        except BaseException:
            # What comes after a gap is of no use to anybody.
            self._under_way.clear()
            raise
        yield _chunk_scores(chunk.token_index, chunk.token_ids, scores.numpy())


_NOTHING = np.empty(0, dtype=np.float32)


def _chunk_scores(token_index: int, token_ids: list[int], scores: Any) -> ChunkScores:
    logprobs = scores
    if len(scores) < len(token_ids):
        logprobs = np.concatenate([np.full(1, np.nan, dtype=np.float32), scores])
    assert len(logprobs) == len(token_ids)
    return ChunkScores(token_index, np.array(token_ids, dtype=np.int64), logprobs)

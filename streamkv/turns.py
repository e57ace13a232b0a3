"""What a session does to its stream, as generators of steps (`streamkv.driver`).

Each operation is written here once; `streamkv.session` offers it as an iterator and as an async
one. Whoever leaves one in the middle leaves a stream that has all that was accepted.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import Any

from streamkv.batch import Wanted
from streamkv.config import Attention
from streamkv.detokenizer import IncrementalDecoder
from streamkv.driver import END, NEED_ITEM, Steps
from streamkv.errors import AbsentBlockError, InputError, PoolFullError, SessionError
from streamkv.generation import Generation
from streamkv.intake import FedItem
from streamkv.live import LiveStream
from streamkv.outputs import Progress, Score
from streamkv.prefix import has_block_ahead
from streamkv.sampling import SamplingParams, resolve_seed, sample
from streamkv.scoring import ChunkScoring
from streamkv.step_loop import Call, Compute
from streamkv.under_way import Claim

Part = Generator[Any, Any, int]
"""Steps that bring a stream on, and by how many tokens."""


class Turns:
    """Operations on one stream, one at a time.

    Args:
        live: the stream.
    """

    def __init__(self, live: LiveStream) -> None:
        self._live = live
        self._instruments = live.sharing.instruments
        self._said_s = 0.0
        self._is_complete = False

    def counted(self, steps: Steps) -> Steps:
        """The same operation; how it ends is counted, unless it is never begun."""
        self._is_complete = False
        outcome = "operations_failed"
        try:
            yield from steps
            outcome = "operations_finished"
        except (GeneratorExit, asyncio.CancelledError, CancelledError, KeyboardInterrupt):
            # Who has had everything need not ask once more.
            outcome = "operations_finished" if self._is_complete else "operations_cancelled"
            raise
        finally:
            self._instruments.counted.add(outcome)

    def feed(self) -> Steps:
        """Read what comes in; yields progress."""
        sequence, intake = self._live.sequence, self._live.intake
        started, num_tokens, accepted = time.monotonic(), 0, False
        reused_before = self._live.reuse.num_tokens

        def progress() -> Progress:
            elapsed = max(time.monotonic() - started, 1e-9)
            rate = num_tokens / elapsed
            num_reused = self._live.reuse.num_tokens - reused_before
            return Progress(num_tokens, sequence.num_computed, intake.text_chars, rate, num_reused)

        while (item := (yield NEED_ITEM)) is not END:
            fed = FedItem(intake, sequence, item)
            while fed.accept_next():
                accepted = True
                while sequence.num_pending > self._live.prefill_chunk:
                    num_tokens += yield from self._take_or_compute(fed.accept_more)
                    yield progress()
        if not accepted:
            raise InputError("items", "", "an empty feed", "Feed at least one character or token.")
        while sequence.num_pending > 1:
            num_tokens += yield from self._take_or_compute()
        self._is_complete = True
        yield progress()

    def score(self) -> Steps:
        """Read what comes in and score it, token by token."""
        decoder, accepted = self._live.decoder(), False
        first_is_new = self._live.sequence.num_tokens == 0
        yield from self._compute_all()
        while (item := (yield NEED_ITEM)) is not END:
            for piece in self._live.intake.pieces(item):
                accepted = True
                self._live.intake.accept(piece)
                if first_is_new and self._live.sequence.num_tokens:
                    first_is_new = False
                    yield self._first_score(decoder)
                yield from self._score_pending(decoder)
        if not accepted:
            raise _nothing_to_score()
        self._live.intake.flush()
        if first_is_new:
            yield self._first_score(decoder)
        yield from self._score_pending(decoder)

    def score_chunks(self) -> Steps:
        """Read what comes in and score it, chunk by chunk."""
        scoring = ChunkScoring(self._live, is_new=self._live.sequence.num_tokens == 0)
        yield from self._compute_all()
        while (item := (yield NEED_ITEM)) is not END:
            yield from scoring.read(item)
        if not scoring.has_accepted:
            raise _nothing_to_score()
        yield from scoring.finish()

    def _first_score(self, decoder: IncrementalDecoder) -> Score:
        """The first token of a stream has nothing before it."""
        [token_id] = self._live.sequence.next_ids(1)
        return Score(token_id, decoder.push(token_id), 0, None)

    def _score_pending(self, decoder: IncrementalDecoder) -> Steps:
        sequence = self._live.sequence
        while sequence.num_pending > 1:
            chunk = min(sequence.num_pending - 1, self._live.next_chunk())
            token_ids = sequence.next_ids(chunk + 1)[1:]
            first = sequence.num_computed + 1
            logprobs = yield self._compute(chunk, Wanted.SCORES)
            for offset, (token_id, logprob) in enumerate(
                zip(token_ids, logprobs.tolist(), strict=True)
            ):
                yield Score(token_id, decoder.push(token_id), first + offset, logprob)

    def generate(self, params: SamplingParams) -> Steps:
        """Go on with the stream, a token at a time."""
        sequence, intake = self._live.sequence, self._live.intake
        intake.flush()
        if sequence.num_tokens == 0:
            raise SessionError(
                f"session {self._live.name!r} is empty: there is nothing to go on from. "
                "Feed some text or say something first."
            )
        asked_s, waited_s = time.monotonic(), self._instruments.first_token_s
        params = resolve_seed(params)
        decoder, eos_ids = self._live.decoder(), self._live.eos_ids
        generation = Generation(params, decoder, eos_ids, intake.turn_stops)

        def choose(logits: Any) -> object:
            return sample(logits, params, sequence.num_tokens, sequence.recent_ids)

        ended = False

        def end_turn() -> None:
            nonlocal ended
            ended = True
            self._live.end_turn(params, generation.finish_reason)

        try:
            is_recalling = self._live.executor.attention(sequence) != "window"
            if is_recalling and not self._live.goes_on_answering():
                # The question chooses what its answer attends to.
                yield from self._compute_all()
                yield Call(lambda: self._live.executor.choose_blocks(sequence), sequence)
            # What is asked for is nearly always what was asked for before.
            asked: Compute | None = None
            while generation.finish_reason is None:
                if has_block_ahead(sequence):
                    yield from self._take_stored()
                while sequence.num_pending > self._live.prefill_chunk:
                    yield from self._take_or_compute()
                pending = sequence.num_pending
                if asked is None or asked.num_tokens != pending:
                    asked = self._compute(pending, Wanted.LOGITS, choose, params)
                token = yield asked
                token_index = sequence.num_tokens
                intake.generated(token.token_id)
                delta = generation.push(token, token_index)
                if generation.finish_reason is not None:
                    # Waiting for the disk is the engine's thread's business, not the caller's.
                    yield Call(end_turn, is_aside=True)
                    self._is_complete = True
                # An answer begins with the turns that were said for it; what the caller does
                # between two tokens is the caller's time.
                waited_s.observe(time.monotonic() - asked_s + self._said_s)
                self._said_s, waited_s = 0.0, self._instruments.next_token_s
                yield delta
                asked_s = time.monotonic()
        finally:
            if not ended:
                end_turn()

    def say(self, text: str, role: str) -> Steps:
        """Add one turn, and compute it but for its last token."""
        asked_s = time.monotonic()
        self._live.intake.turn(role, text)
        yield from self._compute_all()
        self._said_s += time.monotonic() - asked_s

    def keep(self, text: str) -> Steps:
        """Add text to the sink tokens, and compute it."""
        self._live.intake.keep(text)
        yield from self._compute_all()

    def set_mode(
        self,
        mode: Attention,
        recall_blocks: int | None,
        held: Callable[[], AbstractContextManager[None]],
    ) -> Steps:
        """Attend by `mode` from the next token on.

        Args:
            mode: to go on in.
            recall_blocks: old blocks recalled at once.
            held: keeps the stream awake, with nothing of it under way.
        """
        before = self._live.executor.attention(self._live.sequence)
        if mode != before and "full" in (mode, before):
            try:
                yield from self._compute_all()
            except (AbsentBlockError, PoolFullError):
                # It cannot go on in `full`: the tokens that are left are computed otherwise.
                if before != "full":
                    raise
        with held():
            self._live.set_mode(mode, recall_blocks)

    def _compute_all(self) -> Steps:
        sequence = self._live.sequence
        while sequence.num_pending > 1:
            yield from self._take_or_compute()

    def _take_or_compute(self, accept_more: Callable[[], bool] = lambda: False) -> Part:
        """Bring the stream on by what the tiers hold, or by a chunk; returns tokens.

        Args:
            accept_more: as for `PrefixReuse.find`.
        """
        live, sequence = self._live, self._live.sequence
        while True:
            num_reused: int = yield from self._take_stored(accept_more)
            if num_reused:
                return num_reused
            if (others := live.reuse.others_compute()) is not None:
                yield others
                continue
            if live.is_asleep:
                # Others may have computed it by the time that it is this one's turn.
                yield Call(lambda: None, sequence, is_aside=True)
                continue
            chunk = min(sequence.num_pending - 1, live.next_chunk())
            claim = live.reuse.claim(chunk)
            if not isinstance(claim, Claim):
                yield claim
                continue
            with claim:
                yield self._compute_claimed(chunk, claim)
            return chunk

    def _compute_claimed(self, num_tokens: int, claim: Claim) -> Compute:
        """The next tokens, whose blocks others may take as soon as they are sealed."""
        sequence, after = self._live.sequence, self._live.after_step
        first = sequence.num_computed // sequence.block_size

        def after_step() -> None:
            after()
            claim.sealed(sequence.num_computed // sequence.block_size - first)

        return Compute(sequence, num_tokens, Wanted.NOTHING, None, after_step)

    def _take_stored(self, accept_more: Callable[[], bool] = lambda: False) -> Part:
        """Take stored blocks for pending tokens; returns tokens that need not be computed now."""
        num_tokens, reuse = 0, self._live.reuse
        while (run := reuse.find(accept_more)) is not None:
            with reuse.taking(run, self._live.after_step) as taking:
                while (taken := (yield Call(taking.step, self._live.sequence))) is None:
                    pass
            if not taken:
                break
            num_tokens += taken
        return num_tokens

    def _compute(
        self,
        num_tokens: int,
        wanted: Wanted = Wanted.NOTHING,
        on_logits: Callable[[Any], object] | None = None,
        params: SamplingParams | None = None,
    ) -> Compute:
        after = self._live.after_step
        return Compute(self._live.sequence, num_tokens, wanted, on_logits, after, params)


def _nothing_to_score() -> InputError:
    return InputError("items", "", "nothing to score", "Pass at least one character.")

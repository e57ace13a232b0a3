"""A session: what the user holds of an endless stream.

Every operation is written once, as a generator of steps (`streamkv.driver`), and offered twice: as
an iterator, and as an async iterator that never blocks the event loop. Input is checked and
journaled before it counts as accepted; a sampled token is journaled before it is handed out.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self

from streamkv.config import ATTENTIONS, Attention, require_choice
from streamkv.driver import AsyncOutputs, Outputs, Steps, Turnstile
from streamkv.errors import EngineClosedError, InputError, SessionError
from streamkv.live import LiveStream
from streamkv.outputs import Attended, ChunkScores, Delta, Progress, Score, SessionStats
from streamkv.sampling import SamplingParams
from streamkv.step_loop import StepLoop
from streamkv.turns import Turns

Items = str | list[int] | Iterable[str | list[int]]
AsyncItems = Items | AsyncIterable[str | list[int]]


class Session:
    """An endless stream of tokens. Made by `Engine.session`; a context manager.

    One session has one user at a time: a call while another is being carried out raises
    `SessionError`. A new call ends an iterator that was left in the middle.
    """

    def __init__(
        self,
        live: LiveStream,
        loop: StepLoop,
        on_close: Callable[["Session"], None],
        on_fork: Callable[[LiveStream, str], "Session"],
        counters: Callable[[], dict[str, int]],
    ) -> None:
        self._counters = counters
        self._live = live
        self._turns = Turns(live)
        self._loop = loop
        self._on_close = on_close
        self._on_fork = on_fork
        self._gate = Turnstile(live.name)
        self._closed = False
        self._is_deleted = False

    @property
    def name(self) -> str:
        """The session's name."""
        return self._live.name

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        return self._live.sequence.num_tokens

    @property
    def text_chars(self) -> int:
        """Characters of text accepted since the session was created: go on feeding from there."""
        return self._live.intake.text_chars

    @property
    def resumed(self) -> bool:
        """Whether the session existed before it was opened."""
        return self._live.resumed

    @property
    def mode(self) -> Attention:
        """What the session attends to: `window`, `recall`: some old blocks, too, or `full`: all."""
        return self._live.executor.attention(self._live.sequence)

    def set_mode(self, mode: Attention, recall_blocks: int | None = None) -> None:
        """Attend by `mode` from the next token on, also after a restart; if this raises, as before.

        Before it comes to `full`, or leaves it, what was accepted is computed in the mode it was
        accepted in; a session that cannot go on in `full` leaves it where it stopped.

        Args:
            mode: `window`, `recall`, or `full`: every block of the stream, for checking and for
                short histories.
            recall_blocks: for `recall`: old blocks recalled at once, up to the engine's; `None`: as
                many.

        Raises:
            ConfigError: no such mode, or the engine cannot.
            PoolFullError: `full`, and the gpu pool has no room for the whole stream.
            AbsentBlockError: `full`, and a block of the stream cannot be had. The session goes on
                in the mode that it was in.
            JournalError: it could not be journaled; nothing has changed.
        """
        require_choice("mode", mode, ATTENTIONS)
        sequence = self._live.sequence
        held = partial(self._loop.held, sequence, awake=True)
        steps = self._turns.set_mode(mode, recall_blocks, held)
        self._outputs(steps, "set_mode").run()

    def attended(self) -> list[Attended]:
        """Old blocks that were recalled since the last answer began, in the order of the stream.

        After a restart it tells what has been recalled since: what an answer attended to before is
        not remembered.

        Raises:
            SessionError: the session is closed.
        """
        self._require_open()
        return self._live.attended()

    def feed(self, items: Items) -> Outputs[Progress]:
        """Read text or token ids into the stream.

        Args:
            items: a text, or any iterable of texts and lists of token ids; it may be infinite and
                is consumed lazily. Items are joined exactly as given.

        Returns:
            An iterator of progress, one for each prefill chunk and one at the end. It must be
            iterated: `for progress in session.feed(lines)`, or `session.feed(text).run()`.

        Raises:
            InputError: nothing in it, invalid Unicode, or a token id out of range.
            JournalError: it could not be journaled; go on with the same input when space returns.
        """
        return self._outputs(self._turns.feed(), "feed", _as_items(items))

    def afeed(self, items: AsyncItems) -> AsyncOutputs[Progress]:
        """`feed` for an event loop; takes async iterables too."""
        return self._async_outputs(self._turns.feed(), "afeed", items)

    def score(self, items: Items) -> Outputs[Score]:
        """Read text or token ids and say how expected each token was.

        The items of one call are one text: its last token is scored when the iterable ends.

        Raises:
            InputError, JournalError: as `feed`.
        """
        return self._outputs(self._turns.score(), "score", _as_items(items))

    def ascore(self, items: AsyncItems) -> AsyncOutputs[Score]:
        """`score` for an event loop; takes async iterables too."""
        return self._async_outputs(self._turns.score(), "ascore", items)

    def score_chunks(self, items: Items) -> Outputs[ChunkScores]:
        """`score` for long streams: arrays for each prefill chunk instead of an object a token.

        A chunk is scored once all of it and the token after it have come in; the items of one call
        are one text. While the scores of one chunk are looked at, the next is computed already, if
        its item was handed over: whoever stops early leaves up to one more chunk in the stream, and
        all that was accepted with it.

        Raises:
            InputError, JournalError: as `feed`.
        """
        return self._outputs(self._turns.score_chunks(), "score_chunks", _as_items(items))

    def ascore_chunks(self, items: AsyncItems) -> AsyncOutputs[ChunkScores]:
        """`score_chunks` for an event loop; takes async iterables too."""
        return self._async_outputs(self._turns.score_chunks(), "ascore_chunks", items)

    def generate(self, params: SamplingParams | None = None) -> Outputs[Delta]:
        """Go on with the stream, one token for each `next()`.

        Raises:
            SessionError: the stream is empty.
            JournalError: a token could not be journaled; it was not handed out.
        """
        return self._outputs(self._turns.generate(self._checked(params)), "generate")

    def agenerate(self, params: SamplingParams | None = None) -> AsyncOutputs[Delta]:
        """`generate` for an event loop."""
        return self._async_outputs(self._turns.generate(self._checked(params)), "agenerate", ())

    def say(self, text: str, role: str = "user") -> None:
        """Add one turn by the model's chat template, up to where the answer begins.

        Raises:
            InputError: empty or invalid text, or a role that the template does not know.
        """
        self._outputs(self._turns.say(text, role), "say").run()

    async def asay(self, text: str, role: str = "user") -> None:
        """`say` for an event loop."""
        await self._async_outputs(self._turns.say(text, role), "asay", ()).run()

    def keep(self, text: str) -> None:
        """Add text to the sink tokens: it is attended for ever.

        Raises:
            InputError: empty or invalid text, or sink tokens and window would pass the trained
                length.
        """
        self._outputs(self._turns.keep(text), "keep").run()

    async def akeep(self, text: str) -> None:
        """`keep` for an event loop."""
        await self._async_outputs(self._turns.keep(text), "akeep", ()).run()

    def fork(self, name: str) -> "Session":
        """A second session with the same past, which goes its own way from here.

        Full blocks of the window belong to both from now on and are not copied; the journal is.
        Text that is held back because its last word may go on is part of the past.

        Args:
            name: of the new session.

        Raises:
            InputError: not a name, or there is a session of this name.
            PoolFullError: no room for another window.
            JournalError: its journal cannot be made. Nothing is left of it then.
        """
        forked: list[Session] = []
        self._alone(lambda: forked.append(self._on_fork(self._live, name)), "fork")
        return forked[0]

    async def afork(self, name: str) -> "Session":
        """`fork` for an event loop. Cancelled while it waits for room it forks nothing."""
        forked: list[Session] = []
        await self._alone_aside(lambda: forked.append(self._on_fork(self._live, name)), "afork")
        return forked[0]

    def rewind(self, token_index: int) -> None:
        """End the stream at `token_index` again; later tokens are forgotten.

        The session goes on as one that never had them. What it sees from there is read back block
        by block, or computed anew where blocks are gone. Text that was held back is given up.

        Args:
            token_index: tokens that are left, at least one.

        Raises:
            InputError: not a whole number from 1 to `num_tokens`.
            JournalError: it could not be journaled, and nothing has changed; or it was, and could
                not be made durable: then the stream ends there (`num_tokens` tells).
            SessionError: a session without a store that is too long to be remembered.
        """
        self._alone(lambda: self._live.rewind(token_index), "rewind")

    async def arewind(self, token_index: int) -> None:
        """`rewind` for an event loop. Cancelled while it waits for room it forgets nothing."""
        await self._alone_aside(lambda: self._live.rewind(token_index), "arewind")

    def stats(self) -> SessionStats:
        """Where the session stands; may be called at any time."""
        state, position = self._loop.status(self._live.sequence)
        return self._live.stats(self._counters(), state, position)

    def delete(self) -> None:
        """Close the session and remove its journal and its blocks, but for those of others.

        `streamkv cache compact` then leaves no bytes of it in the store. Deleting twice is allowed.

        Raises:
            SessionError: it is closed: open it by its name first.
            StoreError, JournalError: something of it cannot be removed. It is closed, and still
                there.
        """
        self._end(delete=True)

    async def adelete(self) -> None:
        """`delete` for an event loop."""
        await asyncio.to_thread(self._end, delete=True)

    def close(self) -> None:
        """Put the session to sleep: it resumes by its name. Closing twice is allowed."""
        self._end(delete=False)

    async def aclose(self) -> None:
        """`close` for an event loop."""
        await asyncio.to_thread(self._end, delete=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _alone(self, function: Callable[[], object], what: str) -> None:
        """Call a function on this thread while nothing of the session is under way."""

        def steps() -> Steps:
            with self._loop.held(self._live.sequence, awake=True):
                function()
            yield from ()

        self._outputs(steps(), what).run()

    async def _alone_aside(self, function: Callable[[], object], what: str) -> None:
        """The same for an event loop."""

        def steps() -> Steps:
            yield from self._loop.held_steps(self._live.sequence, function)

        await self._async_outputs(steps(), what, ()).run()

    def _outputs(self, steps: Steps, what: str, items: Iterable[Any] = ()) -> Outputs[Any]:
        self._require_open()
        steps, what = self._turns.counted(steps), f"{what} of session {self.name!r}"
        return Outputs(self._loop, self._gate, steps, what, items)

    def _async_outputs(self, steps: Steps, what: str, items: AsyncItems) -> AsyncOutputs[Any]:
        self._require_open()
        source = aiter(items) if isinstance(items, AsyncIterable) else iter(_as_items(items))
        steps, what = self._turns.counted(steps), f"{what} of session {self.name!r}"
        return AsyncOutputs(self._loop, self._gate, steps, what, source)

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        """Sampling parameters that this model can use."""
        if params is None:
            return SamplingParams()
        if not isinstance(params, SamplingParams):
            remedy = "Pass SamplingParams(max_tokens=...) or nothing."
            raise InputError("params", params, "not SamplingParams", remedy)
        vocab_size = self._live.intake.vocab_size
        worst = max(params.stop_ids, default=0)
        if worst >= vocab_size:
            remedy = f"Use whole numbers from 0 to {vocab_size - 1}."
            raise InputError("stop_ids", worst, "outside the vocabulary", remedy)
        return params

    def _require_open(self) -> None:
        if self._closed:
            raise SessionError(f"session {self.name!r} is closed. Open it again by its name.")

    def engine_closes(self) -> None:
        """Go to sleep because the engine is closed, even if a call waits for it."""
        if not self._closed:
            self._closed = True
            error = EngineClosedError("The engine is closed. Open a new Engine.")
            self._gate.end(error, even_if_busy=True)
            self._live.sleep()
            self._on_close(self)

    def _end(self, delete: bool) -> None:
        if self._closed:
            if delete and not self._is_deleted:
                self._require_open()
            return
        ended = f"session {self.name!r} is closed. Open it again with engine.session()."
        self._gate.end(SessionError(ended))
        self._closed = True
        try:
            with self._loop.held(self._live.sequence, awake=False):
                if delete:
                    self._live.delete()
                    self._is_deleted = True
                else:
                    self._live.sleep()
        finally:
            self._on_close(self)


def _as_items(items: Any) -> Iterable[Any]:
    """A text is one item, not an iterable of characters; so is a list of token ids."""
    if isinstance(items, str):
        return (items,)
    if isinstance(items, list) and items and all(isinstance(item, int) for item in items):
        return (items,)
    if not isinstance(items, Iterable):
        raise InputError(
            "items", items, "not a text and not iterable", "Pass a text or an iterable of texts."
        )
    return items

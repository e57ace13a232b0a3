"""One request that takes a while: a feed, or a text and the model's answer.

It pulls one step at a time from the session and awaits the send of what came before it asks for
more. It is never interrupted inside a step: `stop` asks, and it stops after the step in hand, whose
text is still sent, so that the client has seen what the session remembers. It ends in exactly one
`done` or `error`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

from websockets.exceptions import ConnectionClosed

from streamkv.errors import StreamKVError
from streamkv.outputs import Delta, FinishReason, Progress, SessionStats
from streamkv.sampling_params import SamplingParams
from streamkv.ws_server.engine_api import ServedSession
from streamkv.ws_server.messages import (
    Done,
    DoneReason,
    Feed,
    FeedProgress,
    Generate,
    Say,
    ServerMessage,
    TextDelta,
    Timings,
    Usage,
)
from streamkv.ws_server.replies import error_reply

_LOG = logging.getLogger("streamkv.ws_server")
_REASONS = {FinishReason.STOP: DoneReason.STOP, FinishReason.LENGTH: DoneReason.LENGTH}


class Turn:
    """Runs a request on a session.

    Args:
        message: the request.
        session: an open session that nobody else uses meanwhile.
        send: sends a message, and waits while the client does not read.
        number: the `seq` of a delta, from its token_index.

    Raises:
        ConfigError: the request's sampling options are bad.
    """

    def __init__(
        self,
        message: Say | Generate | Feed,
        session: ServedSession,
        send: Callable[[ServerMessage], Awaitable[None]],
        number: Callable[[int], int],
    ) -> None:
        self._message = message
        self._session = session
        self._send = send
        self._number = number
        self._stop_reason: DoneReason | None = None
        self._started = time.monotonic()
        self._first_delta_s: float | None = None
        self._output_tokens = 0
        self._params = (
            SamplingParams() if isinstance(message, Feed) else SamplingParams(**message.params)
        )
        self.is_over = False

    def stop(self, reason: DoneReason) -> None:
        """Ask it to end after the step in hand. The first reason given counts."""
        self._stop_reason = self._stop_reason or reason

    async def run(self) -> None:
        """Run to the end. Raises nothing: a failure is sent to the client."""
        try:
            reply: ServerMessage = await self._run()
        except ConnectionClosed:
            return
        except StreamKVError as error:
            reply = error_reply(error, self._message.id)
        except Exception as error:
            _LOG.exception("a request failed")
            reply = error_reply(error, self._message.id)
        # Before the send: the client may answer at once, and is then not to be called too early.
        self.is_over = True
        with suppress(ConnectionClosed):
            await self._send(reply)

    async def _run(self) -> Done:
        before = await self._stats()
        match self._message:
            case Feed() as feed:
                reason = await self._feed(feed)
            case Say() as say:
                await self._session.asay(say.text)
                reason = await self._generate(say)
            case Generate() as generate:
                reason = await self._generate(generate)
        after = await self._stats()
        added = after.num_tokens - before.num_tokens
        usage = Usage(max(0, added - self._output_tokens), self._output_tokens)
        timings = Timings(self._elapsed_s(), self._first_delta_s)
        return Done(self._message.id, reason, after.num_tokens, after.text_chars, usage, timings)

    async def _stats(self) -> SessionStats:
        return await asyncio.to_thread(self._session.stats)

    async def _feed(self, feed: Feed) -> DoneReason:
        items = feed.text if feed.text is not None else [feed.ids or []]
        async with aclosing(self._session.afeed(items)) as steps:
            async for progress in steps:
                await self._send(self._progress(progress))
                if self._stop_reason is not None:
                    return self._stop_reason
        return DoneReason.FED

    def _progress(self, progress: Progress) -> FeedProgress:
        rate = progress.tokens_per_s if math.isfinite(progress.tokens_per_s) else 0.0
        return FeedProgress(
            self._message.id,
            progress.num_tokens,
            progress.token_index,
            progress.text_chars,
            round(rate, 1),
        )

    async def _generate(self, message: Say | Generate) -> DoneReason:
        finish = FinishReason.STOP
        if self._stop_reason is not None:
            return self._stop_reason
        async with aclosing(self._session.agenerate(self._params)) as deltas:
            async for delta in deltas:
                await self._deliver(delta, message.token_ids)
                if delta.finish_reason is not None:
                    finish = delta.finish_reason
                elif self._stop_reason is not None:
                    return self._stop_reason
        return _REASONS[finish]

    async def _deliver(self, delta: Delta, token_ids: bool) -> None:
        self._output_tokens += delta.token_id is not None
        logprob = delta.logprob
        if not (delta.text or token_ids or logprob):
            return
        if self._first_delta_s is None:
            self._first_delta_s = self._elapsed_s()
        await self._send(
            TextDelta(
                self._message.id,
                self._number(delta.token_index),
                delta.text,
                delta.token_index,
                delta.token_id if token_ids else None,
                logprob.logprob if logprob else None,
                [[token_id, value] for token_id, value in logprob.top] if logprob else None,
            )
        )

    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self._started, 4)

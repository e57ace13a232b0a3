"""Blocks that some session is computing right now, so that others wait for them to share them.

Sessions that are given the same prompt at the same moment would else all compute it: none of them
finds it stored. With a claim the first of them computes, and the others take what it has sealed,
block by block.

Invariant: a block is claimed by one session at most, for as long as a step of that session is to
compute it; whoever waits is told when it is sealed, or will not be. Nothing is known here of
tokens, tiers or steps. Safe to use from several threads.
"""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from streamkv.reply import Reply
from streamkv.tiers.spec import BlockKey


class UnderWay:
    """What is being computed by the sessions of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[BlockKey, list[Reply[None]]] = {}

    def wait_for(self, key: BlockKey) -> Reply[None] | None:
        """Done when the block is not being computed any more; `None`: it is not."""
        with self._lock:
            return self._wait_for(key)

    def claim(self, keys: Sequence[BlockKey]) -> "Claim | Reply[None]":
        """Say that blocks are about to be computed.

        Args:
            keys: of them, in order.

        Returns:
            The claim, a context manager that ends it; or, if another session is computing the
            first of them, what `wait_for` returns. Blocks that others compute are not claimed.
        """
        with self._lock:
            if keys and (reply := self._wait_for(keys[0])) is not None:
                return reply
            free = [key for key in keys if key not in self._waiting]
            self._waiting |= {key: [] for key in free}
            return Claim(self, keys, set(free))

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Blocks are sealed, or will not be."""
        with self._lock:
            replies = [reply for key in keys for reply in self._waiting.pop(key)]
        for reply in replies:
            reply.set_result(None)

    def check_integrity(self) -> None:
        """Assert that nothing is claimed, when nothing is being computed."""
        assert not self._waiting, "a claim was never ended"

    def _wait_for(self, key: BlockKey) -> Reply[None] | None:
        replies = self._waiting.get(key)
        if replies is None:
            return None
        reply: Reply[None] = Reply()
        replies.append(reply)
        return reply


class Claim:
    """Blocks that one session is about to compute.

    Args:
        under_way: where they are claimed.
        keys: of the blocks, in order.
        own: those of them that are claimed.
    """

    def __init__(self, under_way: UnderWay, keys: Sequence[BlockKey], own: set[BlockKey]) -> None:
        self._under_way = under_way
        self._keys = keys
        self._own = own
        self._lock = threading.Lock()

    def sealed(self, num_blocks: int) -> None:
        """The first blocks are sealed."""
        self._end(self._keys[:num_blocks])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(self._keys)

    def _end(self, keys: Sequence[BlockKey]) -> None:
        # Steps seal on the engine's thread, while the caller may be leaving.
        with self._lock:
            ended = [key for key in keys if key in self._own]
            self._own.difference_update(ended)
        self._under_way.end(ended)

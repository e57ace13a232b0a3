"""What is kept, where it goes and when: decisions only.

Pure: no tensors, files, threads or clock. `Policy` holds the options and answers questions;
    `Claims`
remembers which stored blocks the resume of a session needs. How blocks are moved, and who waits for
whom, is not known here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from streamkv.tiers.keys import is_partial
from streamkv.tiers.spec import BlockKey

Retain = Literal["all", "window", "none"]
OnPressure = Literal["wait", "drop"]
Place = Literal["gpu", "cpu", "ssd"]
"""Where a block can be had from."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of the tiers below the gpu pool.

    Attributes:
        retain: `all` keeps sealed blocks after they left the window, as long as the limits allow;
            `window` keeps what is in a window or in a manifest; `none` stores nothing.
        on_pressure: with no room for a copy, `wait` until there is, or `drop` it.
        watermark: share of the cpu pool that blocks not yet on ssd may take before they are
            written.
        max_pending: copies and checkpoints that may wait for the worker.
        batch_blocks: blocks written to ssd in one transaction.
    """

    retain: Retain = "all"
    on_pressure: OnPressure = "wait"
    watermark: float = 0.75
    max_pending: int = 32
    batch_blocks: int = 8

    def copies_at_seal(self, *, has_cpu: bool, has_ssd: bool) -> bool:
        """Whether a block is copied as soon as it is full."""
        if self.retain == "all":
            return has_cpu or has_ssd
        return self.retain == "window" and has_cpu

    def outlives_window(self, key: BlockKey) -> bool:
        """Whether a block is kept for its own sake: it must reach the ssd before it is evicted."""
        return self.retain == "all" and not is_partial(key)

    def keeps(self, key: BlockKey, *, num_users: int, claimed: bool) -> bool:
        """Whether the lower tiers go on holding a block."""
        return num_users > 0 or claimed or self.outlives_window(key)

    def num_to_write(self, num_unstored: int, num_cpu_blocks: int) -> int:
        """Blocks, at most a batch, to write now so that the watermark is kept."""
        excess = num_unstored - int(self.watermark * num_cpu_blocks)
        return min(max(excess, 0), self.batch_blocks)


class Claims:
    """Which stored blocks the resume of each session needs.

    A manifest that is replaced is honoured until the next one replaces its successor: the caller
    writes its journal record only after a checkpoint is done, so after a crash the record may still
    name the manifest before.

    Holds one key per manifest entry of the sessions seen since the start; nothing for other blocks.
    """

    def __init__(self) -> None:
        self._counts: Counter[BlockKey] = Counter()
        self._current: dict[str, tuple[BlockKey, ...]] = {}
        self._previous: dict[str, tuple[BlockKey, ...]] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._counts

    def knows(self, session: str) -> bool:
        """Whether a manifest of this session is remembered."""
        return session in self._current

    def begin(self, keys: Iterable[BlockKey]) -> None:
        """Claim the blocks of a checkpoint that is under way; `settle` or `abandon` must follow."""
        self._counts.update(keys)

    def settle(self, session: str, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Make begun `keys` the session's manifest. Returns the keys that lost their last claim."""
        oldest = self._previous.pop(session, ())
        if session in self._current:
            self._previous[session] = self._current[session]
        self._current[session] = tuple(keys)
        return self.abandon(oldest)

    def abandon(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Give claims back. Returns the keys that lost their last claim."""
        released = []
        for key in keys:
            self._counts[key] -= 1
            assert self._counts[key] >= 0, "a claim was given back twice"
            if self._counts[key] == 0:
                del self._counts[key]
                released.append(key)
        return released

    def forget(self, session: str) -> list[BlockKey]:
        """Drop a session's manifests. Returns the keys that lost their last claim."""
        keys = self._current.pop(session, ()) + self._previous.pop(session, ())
        return self.abandon(keys)

    def num_claims(self) -> int:
        """Claims held, all sessions together."""
        return self._counts.total()

    def check_integrity(self) -> None:
        """Assert that every remembered manifest entry is counted."""
        named: Counter[BlockKey] = Counter()
        for manifests in (self._current, self._previous):
            for keys in manifests.values():
                named.update(keys)
        assert named <= self._counts, "a manifest names a block that is not claimed"

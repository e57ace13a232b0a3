"""Names of all blocks that a session ever had, by its records: those to delete with it.

Tokens that a rewind gave up have left blocks behind, and a fork has blocks in common with the
session that it was made of; both are found by hashing the records in their order. Open blocks that
were stored when the session went to sleep are named by the records themselves. Pure but for the
records, which are read as they are asked for.
"""

from array import array
from collections.abc import Container, Iterable

from streamkv.journal_records import (
    Chosen,
    Closed,
    Fed,
    Flushed,
    Generated,
    Given,
    Kept,
    ModeSet,
    Record,
    Rewound,
)
from streamkv.recall_history import RecallHistory
from streamkv.sequence import policy_in_force
from streamkv.tiers.keys import Salting, child_key
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

UNSALTED = Salting()
"""No salt enters behind the root."""


class StreamKeys:
    """Keys of all blocks that a stream has or had.

    Args:
        root: root of its chain of keys.
        block_size: tokens per block.
        created: the window of the session's creation.
        salting: where the salt entered the chain at first.
        within: keys that are looked for; `None`: all. Blocks have their past in their names, so
            that behind a block with another name nothing is found, and nothing is hashed.

    Attributes:
        own: of blocks that are named with the salt, open ones included.
        public: of blocks of a prompt that is shared with all.
    """

    def __init__(
        self,
        root: BlockKey,
        block_size: int,
        created: Window,
        salting: Salting = UNSALTED,
        within: Container[BlockKey] | None = None,
    ) -> None:
        self.own: set[BlockKey] = set()
        self.public: set[BlockKey] = set()
        self._size = block_size
        self._salting = salting
        self._within = within
        self._ids = array("I")
        self._chain = [root]
        self._windows = [(0, created)]
        self._recall = RecallHistory()

    @property
    def chain(self) -> list[BlockKey]:
        """Keys of the full blocks that the stream has now, the first first."""
        return self._chain[1:]

    @property
    def root(self) -> BlockKey:
        """Root of the chain."""
        return self._chain[0]

    def read(self, records: Iterable[Record]) -> None:
        """Take in all records of the session, from the first on."""
        for record in records:
            self.take(record)
        self.finish()

    def take(self, record: Record) -> list[BlockKey]:
        """Take in the next record; returns the keys of full blocks that became certain with it."""
        if isinstance(record, Kept):
            # Written after its tokens, and in force for them.
            start, window = record.token_index, self._windows[-1][1]
            window = window.with_sinks(start, start + record.num_tokens)
            self._windows.append((start, window))
            return []
        named = self.finish()
        self._apply(record)
        return named

    def _apply(self, record: Record) -> None:
        match record:
            case Fed(_, _, ids) | Given(_, ids) | Generated(ids) | Flushed(ids):
                self._ids.extend(ids)
            case ModeSet():
                self._recall.set_mode(record)
                # Blocks that end behind it have other names from now on, or had never been named.
                del self._chain[record.token_index // self._size + 1 :]
            case Chosen():
                self._recall.choose(record)
                if record.token_index < record.made_at:
                    del self._chain[record.token_index // self._size + 1 :]
            case Closed(_, open_key) if open_key:
                if self._within is None or open_key in self._within:
                    self.own.add(BlockKey(open_key))
            case Rewound(token_index):
                self._recall.rewind(token_index)
                num_blocks = token_index // self._size
                del self._ids[token_index:], self._chain[num_blocks + 1 :]
                self._salting = self._salting.cut(num_blocks)
                self._windows = [
                    (since, window)
                    for since, window in self._windows
                    if since == 0 or since < token_index
                ]

    def finish(self) -> list[BlockKey]:
        """Name the blocks that are full; returns their keys."""
        before = len(self._chain)
        while len(self._ids) >= self._size * len(self._chain) and self._is_looked_for():
            index = len(self._chain) - 1
            start = self._size * index
            end = start + self._size
            window = [window for since, window in self._windows if since < end][-1]
            policy = policy_in_force(window, start, self._size) + self._recall.salt_of(end)
            parent = self._salting.after(index - 1, self._chain[-1])
            key = child_key(parent, self._ids[start:end], policy)
            self._chain.append(key)
            is_public = index < self._salting.num_shared_blocks
            (self.public if is_public else self.own).add(key)
        return self._chain[before:]

    def _is_looked_for(self) -> bool:
        """Whether a block may follow the newest one that is named."""
        return self._within is None or len(self._chain) == 1 or self._chain[-1] in self._within

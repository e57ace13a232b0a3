"""Names of all blocks that a session ever had, by its records: those to delete with it.

Tokens that a rewind gave up have left blocks behind, and a fork has blocks in common with the
session that it was made of; both are found by hashing the records in their order. Pure but for the
records, which are read as they are asked for.
"""

from array import array
from collections.abc import Iterable

from streamkv.journal_records import Fed, Flushed, Generated, Given, Kept, Record, Rewound
from streamkv.sequence import policy_in_force
from streamkv.tiers.keys import child_key
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window


def all_keys(
    records: Iterable[Record], root: BlockKey, block_size: int, created: Window
) -> set[BlockKey]:
    """Keys of all full blocks that a stream has or had.

    Args:
        records: of the session, from the first on.
        root: parent of its first block.
        block_size: tokens per block.
        created: the window of the session's creation.
    """
    stream = _Stream(root, block_size, created)
    for record in records:
        stream.apply(record)
    stream.seal()
    return stream.found


class _Stream:
    """The tokens and block keys of a stream as its records go by."""

    def __init__(self, root: BlockKey, block_size: int, created: Window) -> None:
        self.found: set[BlockKey] = set()
        self._size = block_size
        self._ids = array("I")
        self._chain = [root]
        self._windows = [(0, created)]

    def apply(self, record: Record) -> None:
        """Take in what happened next."""
        if isinstance(record, Kept):
            # Written after its tokens, and in force for them.
            start, window = record.token_index, self._windows[-1][1]
            window = window.with_sinks(start, start + record.num_tokens)
            self._windows.append((start, window))
            return
        self.seal()
        match record:
            case Fed(_, _, ids) | Given(_, ids) | Generated(ids) | Flushed(ids):
                self._ids.extend(ids)
            case Rewound(token_index):
                del self._ids[token_index:], self._chain[token_index // self._size + 1 :]
                self._windows = [
                    (since, window)
                    for since, window in self._windows
                    if since == 0 or since < token_index
                ]

    def seal(self) -> None:
        """Name the blocks that are full."""
        while len(self._ids) >= self._size * len(self._chain):
            start = self._size * (len(self._chain) - 1)
            end = start + self._size
            window = [window for since, window in self._windows if since < end][-1]
            policy = policy_in_force(window, start, self._size)
            self._chain.append(child_key(self._chain[-1], self._ids[start:end], policy))
            self.found.add(self._chain[-1])

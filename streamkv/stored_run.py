"""Blocks to come of a sequence, where they are stored, and which of them stand in for computing.

Invariant: `wanted` are the blocks that a query at the end of the run sees and that are not live;
all of them were found, and none of them is known to be lost. Nothing is moved here. No torch, no
journal.
"""

from collections.abc import Callable, Sequence

from streamkv.prefix import blocks_seen, longest_run
from streamkv.sequence import Sequence as Stream
from streamkv.tiers.policy import Place
from streamkv.tiers.spec import BlockKey


class Run:
    """Blocks to come of a sequence as they were found.

    Args:
        stream: whose.
        room: blocks that may be read in at once.

    Attributes:
        first: index of the first block to come.
        end: index of the block after those that are reused.
        wanted: index of each block to be read, ascending.
        keys: of the blocks to come that were looked for.
        looked_s: seconds that it took to look where they are, as far as whoever looks tells.
    """

    def __init__(self, stream: Stream, room: int) -> None:
        self._stream = stream
        self._room = room
        self._places: list[Place | None] = []
        self.keys: list[BlockKey] = []
        self.first = self.end = stream.num_computed // stream.block_size
        self.wanted: list[int] = []
        self.looked_s = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.end * self._stream.block_size - self._stream.num_computed

    @property
    def reaches_end(self) -> bool:
        """Whether it goes as far as was looked."""
        return self.end == self.first + len(self.keys)

    def key(self, index: int) -> BlockKey:
        """Key of a block to come."""
        return self.keys[index - self.first]

    def place(self, index: int) -> Place:
        """Where a wanted block was found."""
        place = self._places[index - self.first]
        assert place is not None
        return place

    def extend(self, keys: Sequence[BlockKey], where: Callable[[BlockKey], Place | None]) -> None:
        """Look where the blocks behind those so far are, and choose the longest run."""
        self.keys.extend(keys)
        self._places.extend(map(where, keys))
        self._choose()

    def lose(self, index: int) -> None:
        """A block could not be read: choose a run that does not need it."""
        self._places[index - self.first] = None
        self._choose()

    def _choose(self) -> None:
        stream, size = self._stream, self._stream.block_size
        stored = [place is not None for place in self._places]
        live = _exact_blocks(stream)
        self.end = longest_run(stream.window, size, self.first, stored, live, self._room)
        seen = blocks_seen(stream.window, size, self.end * size) if self.end > self.first else []
        self.wanted = [index for index in seen if index >= self.first]
        # Less than a block is soon computed.
        if self.num_tokens < size:
            self.end, self.wanted = self.first, []


def _exact_blocks(stream: Stream) -> set[int]:
    # A copy first: the engine's thread may make a block live for a step that nobody asked for yet.
    return {block.block_index for block in list(stream.table) if block.key is not None}

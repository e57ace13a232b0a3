"""Which run of stored blocks may stand in for tokens to come. Pure bookkeeping.

    first              end
    |  block  |  block  |  ...       keys of the blocks to come, chained over the pending ids
    0 ... live ...      ^ a query here must find its whole window and all sinks

Invariant: a run up to block `end` is allowed only if every block that a query at its end sees is
live or can be read. What would have left the window by then need not be there; the ids before it
are in the keys after it. Nothing is read here.
"""

from collections.abc import Collection, Sequence

from streamkv.sequence import Sequence as Stream
from streamkv.sequence import policy_in_force
from streamkv.tiers.keys import child_key
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

MAX_BLOCKS_AHEAD = 1024
"""Blocks to come that are looked for at a time; bounds the time of a look."""


def has_block_ahead(stream: Stream) -> bool:
    """Whether the pending tokens fill a block, as far as `keys_ahead` looks: else it finds none."""
    end = stream.num_computed + stream.num_pending - 1 - stream.look_back
    return end // stream.block_size > stream.num_computed // stream.block_size


def keys_ahead(stream: Stream, known: Sequence[BlockKey] = ()) -> list[BlockKey]:
    """Keys of the blocks that the pending tokens will fill, the open block first.

    Args:
        stream: whose.
        known: keys of the first of these blocks, from before more tokens were accepted. Those of
            the blocks behind them are returned.

    The last pending token is left out, as it stays pending, and so are those before it by whose
    queries old blocks may be chosen, and all that follows a change of the window or tokens that are
    left out.
    """
    if stream.recall_salt:
        # Nobody else computes what this stream does.
        return []
    size = stream.block_size
    first = stream.num_computed // size
    end = stream.num_computed + stream.num_pending - 1 - stream.look_back
    if stream.next_boundary is not None:
        end = min(end, stream.next_boundary)
    first_new = first + len(known)
    num_new = min(end // size, first + MAX_BLOCKS_AHEAD) - first_new
    if num_new <= 0:
        return []
    parent = stream.salting.after(first_new - 1, known[-1]) if known else stream.chain_key
    ids = stream.ids_from(first_new * size, num_new * size)
    keys = []
    for index in range(first_new, first_new + num_new):
        offset = (index - first_new) * size
        policy = policy_in_force(stream.window, index * size, size)
        key = child_key(parent, ids[offset : offset + size], policy)
        keys.append(key)
        parent = stream.salting.after(index, key)
    return keys


def blocks_seen(window: Window, block_size: int, query: int) -> list[int]:
    """Indices of the full blocks that a query at `query`, a block boundary, or a later one sees."""
    seen = {*range(window.first_visible(query) // block_size, query // block_size)}
    for start, end in window.sink_ranges:
        seen.update(range(start // block_size, -(-min(end, query) // block_size)))
    return sorted(seen)


def longest_run(
    window: Window,
    block_size: int,
    first: int,
    is_stored: Sequence[bool],
    live: Collection[int],
    room: int,
) -> int:
    """Where the longest run that may stand in for computing ends.

    Args:
        window: in force for all of it.
        block_size: tokens per block.
        first: index of the first block to come.
        is_stored: of each block to come, whether it can be read.
        live: indices of the live blocks that are full and exact.
        room: blocks that may be read in at once.

    Returns:
        Index of the block after the run; `first` if there is none.
    """
    if not any(is_stored):
        return first
    for end in range(first + len(is_stored), first, -1):
        seen = blocks_seen(window, block_size, end * block_size)
        new = [index for index in seen if index >= first]
        old = seen[: len(seen) - len(new)]
        if (
            len(new) <= room
            and all(is_stored[index - first] for index in new)
            and all(index in live for index in old)
        ):
            return end
    return first

"""Names of a stream's blocks, made anew from its past.

    ids, windows, salts of a past   ->   key of each full block, from the first on

Invariant: they are the names under which the blocks were sealed, in whatever mode and in whatever
life of the session that was. Pure but for the ids, which are read as they are needed.
"""

from collections.abc import Iterator

from streamkv.past import Past
from streamkv.sequence import Sequence, policy_in_force
from streamkv.tiers.keys import child_key
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

HASHED_AT_ONCE = 65_536
"""Tokens read back from the journal at a time to make block keys; a multiple of the block size."""


def replay_windows(past: Past, window: Window) -> list[tuple[int, Window]]:
    """Every window that was in force, with the token index from which it was."""
    windows = [(0, window)]
    for kept in past.state.kept:
        window = window.with_sinks(kept.token_index, kept.token_index + kept.num_tokens)
        windows.append((kept.token_index, window))
    return windows


def chain_keys(
    sequence: Sequence, past: Past, windows: list[tuple[int, Window]], end: int
) -> Iterator[BlockKey]:
    """Keys of the full blocks before `end`, made anew by hashing the stream from its start."""
    size, key = sequence.block_size, sequence.first_parent
    end -= end % size
    for first in range(0, end, HASHED_AT_ONCE):
        ids = past.ids(first, min(first + HASHED_AT_ONCE, end)).tolist()
        for offset in range(0, len(ids), size):
            start = first + offset
            # A block is named by the window in force when its last token was computed.
            window = [window for since, window in windows if since < start + size][-1]
            policy = policy_in_force(window, start, size) + past.state.recall.salt_of(start + size)
            sealed = child_key(key, ids[offset : offset + size], policy)
            yield sealed
            key = sequence.salting.after(start // size, sealed)

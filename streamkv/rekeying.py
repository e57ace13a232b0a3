"""Other names for the blocks of a stream, when its salt becomes another one.

    records of the stream  ->  keys by the old salt, keys by the new one, in the same order

Invariant: a block has the name by which an engine that opens the stream with its new salt looks for
it; no block of another stream is called so, as long as the new salt is the stream's own. Pure but
for the records, which are read as they are asked for.
"""

from collections.abc import Iterable, Mapping

from streamkv.journal_records import Checkpoint, Closed, Record
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.keys import partial_key
from streamkv.tiers.spec import BlockKey
from streamkv.window_blocks import WindowBlocks


def new_names(
    records: Iterable[Record], old: StreamKeys, new: StreamKeys, session: str
) -> dict[BlockKey, BlockKey]:
    """The new name of every block that a stream has or had, by its old one.

    Args:
        records: all of the stream, from the first on.
        old, new: names made by the two salts; nothing has been read by them.
        session: whose open blocks are named.
    """
    names: dict[BlockKey, BlockKey] = {}
    for record in records:
        old_keys, new_keys = old.take(record), new.take(record)
        names.update(zip(old_keys, new_keys, strict=True))
        if isinstance(record, Closed) and record.partial_key:
            open_key = BlockKey(record.partial_key)
            # Only this record looks for it, so that any name will do that is nobody else's.
            parent = new.chain[-1] if new.chain else new.root
            names[open_key] = partial_key(session, parent, (), open_key)
    names.update(zip(old.finish(), new.finish(), strict=True))
    return names


def renamed(record: Record, names: Mapping[BlockKey, BlockKey], root: BlockKey) -> Record:
    """The record with the new names of blocks. One without a new name keeps its old: a miss.

    Args:
        record: of the stream.
        names: the new name of each block.
        root: root of the new chain of keys.
    """
    match record:
        case Closed(token_index, key) if key:
            return Closed(token_index, names.get(BlockKey(key), BlockKey(key)))
        case Checkpoint(token_index, digest):
            stored = WindowBlocks.decode(token_index, digest)
            blocks = tuple((index, names.get(key, key)) for index, key in stored.blocks)
            newest = max(blocks)[1] if blocks else root
            return Checkpoint(token_index, WindowBlocks(token_index, newest, blocks).encode())
    return record

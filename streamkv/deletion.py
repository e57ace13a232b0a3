"""Which blocks of a session go with it: all that it ever had but those that others share.

Others are the sessions with the same salt: its forks, what it was forked from, those of its tenant.
Blocks of a prompt that is shared with everyone always stay. Nothing is deleted here.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from streamkv.errors import JournalError, StoreFormatError
from streamkv.journal import Journal, read_header
from streamkv.journal_records import SessionHeader
from streamkv.sharing import salting_of
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

_log = logging.getLogger(__name__)


class Deletion(NamedTuple):
    """Keys of all blocks of a session.

    Attributes:
        doomed: its alone.
        spared: of others, too.
    """

    doomed: set[BlockKey]
    spared: set[BlockKey]


def keys_to_delete(
    journal: Journal, root: BlockKey, block_size: int, others: Iterable[Path]
) -> Deletion:
    """What goes with a session, and what stays.

    Args:
        journal: of the session.
        root: root of its chain of keys.
        block_size: tokens per block.
        others: journals of the other sessions of the store. One that cannot be read counts for
            nothing, as no session can go on from it.
    """
    ours = StreamKeys(
        root, block_size, created_window(journal.header), salting_of(journal.header, block_size)
    )
    ours.read(journal.scan())
    doomed = ours.own
    spared = ours.public - doomed
    every = doomed | spared
    for path in others:
        try:
            header = read_header(path)
            if not _names_alike(journal.header, header):
                continue
            salting = salting_of(header, block_size)
            theirs = StreamKeys(root, block_size, created_window(header), salting, within=every)
            with Journal.read_beside(path) as other:
                theirs.read(other.scan())
        except (JournalError, StoreFormatError) as error:
            _log.warning("%s cannot be read: what it shares is not kept for it (%s)", path, error)
            continue
        spared |= doomed & theirs.own
        doomed -= theirs.own
    return Deletion(doomed, spared)


def created_window(header: SessionHeader) -> Window:
    """The window of a session's creation."""
    sinks = ((0, header.num_sink_tokens),) if header.num_sink_tokens else ()
    return Window(header.window_size, sinks)


def _names_alike(one: SessionHeader, other: SessionHeader) -> bool:
    """Whether equal tokens have equal keys in both streams."""
    return (one.salt, one.num_shared_tokens, one.weights) == (
        other.salt,
        other.num_shared_tokens,
        other.weights,
    )

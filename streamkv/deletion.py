"""Which blocks of a session go with it: all but those that others share.

Streams share blocks only as far as they agree from their start on, so that what is shared is a run
of first blocks. Nothing is deleted here.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from streamkv.errors import JournalError, StoreFormatError
from streamkv.journal import Journal
from streamkv.journal_records import SessionHeader
from streamkv.recovery import chain_keys, replay_windows
from streamkv.sequence import Sequence
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

_log = logging.getLogger(__name__)


def num_shared_blocks(sequence: Sequence, journal: Journal, others: Iterator[Path]) -> int:
    """How many first blocks of a stream are those of other streams, too.

    Blocks of a prompt that is shared with everyone always are.

    Args:
        sequence, journal: of the stream.
        others: journals of the other sessions of the store. One that cannot be read counts for
            nothing, as no session can go on from it.
    """
    most = sequence.salting.num_shared_blocks
    for path in others:
        try:
            if _names_alike(journal.header, Journal.read_header(path)):
                with Journal.read_beside(path) as other:
                    most = max(most, _num_common(sequence, journal, other))
        except (JournalError, StoreFormatError) as error:
            _log.warning("%s cannot be read: what it shares is not kept for it (%s)", path, error)
    return most


def _names_alike(one: SessionHeader, other: SessionHeader) -> bool:
    """Whether equal tokens have equal keys in both streams."""
    return (one.salt, one.num_shared_tokens, one.weights) == (
        other.salt,
        other.num_shared_tokens,
        other.weights,
    )


def _num_common(sequence: Sequence, one: Journal, other: Journal) -> int:
    number = 0
    for ours, theirs in zip(_keys(sequence, one), _keys(sequence, other), strict=False):
        if ours != theirs:
            break
        number += 1
    return number


def _keys(sequence: Sequence, journal: Journal) -> Iterator[BlockKey]:
    """Keys of a stream whose keys have the root of `sequence`."""
    header = journal.header
    sinks = ((0, header.num_sink_tokens),) if header.num_sink_tokens else ()
    windows = replay_windows(journal, Window(header.window_size, sinks))
    return chain_keys(sequence, journal, windows, journal.state.num_tokens)

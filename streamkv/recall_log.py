"""What makes the modes and the recall of one session last: its records and its digests.

A choice is written when it is made, which is at the latest before a token is computed with it. Why
that is early enough: such a token can be found by a restart in two ways only. Its KV is found by a
CHECKPOINT record, and the token that was sampled from it by a GENERATED record. Both are appended
to the same file after the step that computed it, the step begins after the CHOSEN record was
appended, and a file that is appended to has no record without those before it: a kill leaves a
prefix of what was written, and a power loss a prefix of at least what was synced. So whoever finds
the token finds what it attended to.

A choice is made a stride ahead of its tokens. A restart that goes on behind the boundary would
never see the queries that made it, so every choice is also written before a CHECKPOINT record that
lies behind its boundary. If the journal cannot be written then, there is no checkpoint, and a
restart goes back to before the boundary. Digests that a checkpoint relies on are on disk before it.

A choice for tokens that were computed before it was made (an answer's, for the end of its question)
is written before they are computed anew. Its record voids what is stored of them: a restart goes
back to `token_index`, also after a kill between the record and the step. So does a mode that begins
at a token that was computed in another one, as that of a question which is read again in `full`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamkv.digest_file import DigestFile
from streamkv.journal_records import Chosen, ModeSet, Record
from streamkv.past import Past
from streamkv.recall_history import RecallHistory
from streamkv.tiers.jobs import Wanted


class RecordedPast(Past, Protocol):
    """A journal, or the memory of a session without one."""

    def append(self, *records: Record) -> None:
        """Write records, all or none. Raises JournalError."""


@dataclass(slots=True, eq=False)
class RecallLog:
    """Where one session writes down its modes, choices and digests.

    Attributes:
        past: of the session.
        digests: their file; `None` without a store.
        on_void: called with a token index when what was computed from there on is void.
        on_keep: called with old blocks that a restart is about to rely on; returns when they are on
            disk, as far as the disk allows.
    """

    past: RecordedPast
    digests: DigestFile | None = None
    on_void: Callable[[int], None] | None = None
    on_keep: Callable[[list[Wanted]], None] | None = None

    @property
    def history(self) -> RecallHistory:
        """What was written."""
        return self.past.state.recall

    def write(self, *records: ModeSet | Chosen) -> None:
        """Append records, all or none.

        Raises:
            JournalError: the file cannot be written.
        """
        self.past.append(*records)
        for record in records:
            if isinstance(record, ModeSet) or record.token_index < record.made_at:
                self._void(record.token_index)

    def keep(self, blocks: list[Wanted]) -> None:
        """Make old blocks last before it is written that the stream attends to them."""
        if self.on_keep is not None:
            self.on_keep(blocks)

    def _void(self, token_index: int) -> None:
        if self.on_void is not None:
            self.on_void(token_index)

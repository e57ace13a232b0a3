"""What is known of one sequence that can recall: its modes, its choices, and what is still to come.

Invariant: what is in the log is what a restart would go on with, but for choices that are
`unwritten`; none of these is used, nor relied on by a checkpoint, before it is written. Nothing is
moved here.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from streamkv.digest_index import DigestIndex
from streamkv.journal_records import Chosen, ModeSet
from streamkv.observed_queries import ObservedQueries
from streamkv.recall_log import RecallLog
from streamkv.recall_schedule import Choice, Choosing, RecallSchedule
from streamkv.recalled import PositionPolicy


@dataclass(slots=True, eq=False)
class RecallStream:
    """One sequence, as its recaller sees it.

    Attributes:
        index: digests of its sealed blocks.
        queries: its newest queries.
        schedule: choices that were not taken yet.
        log: where it is written down.
        mode: in force for the next token to compute.
        due: modes that begin at later tokens, which are accepted and not yet computed.
        unwritten: choices that are not in the log yet, as (token_index, made_at, choosing).
        staged: the newest choice whose blocks were asked for ahead of their use.
        last_made_at: tokens that were computed at the newest choice.
        num_digested: sealed blocks that were looked at since the stream was opened.
        unfiled: blocks whose digests are not in their file yet.
        attended: blocks recalled since the last answer began, with the largest weight that each
            was chosen by; `None` if it is not known any more.
    """

    index: DigestIndex
    queries: ObservedQueries
    schedule: RecallSchedule
    log: RecallLog
    mode: ModeSet
    due: deque[ModeSet] = field(default_factory=deque)
    unwritten: list[tuple[int, int, Choosing]] = field(default_factory=list)
    staged: Choice | None = None
    last_made_at: int = -1
    num_digested: int = 0
    unfiled: set[int] = field(default_factory=set)
    attended: dict[int, float | None] = field(default_factory=dict)

    @property
    def newest(self) -> ModeSet:
        """The mode that the session is in, for tokens to be accepted."""
        return self.due[-1] if self.due else self.mode

    @property
    def is_on(self) -> bool:
        """Whether the next token to compute is computed in mode `recall`."""
        return self.mode.mode == "recall"

    def chooses_at(self, num_computed: int) -> bool:
        """Whether this is a boundary at which nothing was chosen yet, not even before a restart."""
        if not self.is_on or not self.schedule.chooses_at(num_computed):
            return False
        if num_computed <= max(self.last_made_at, self.mode.token_index):
            return False
        # A mode that is due ends what would be chosen.
        return not self.due or num_computed + self.mode.stride < self.due[0].token_index

    def next_boundary(self, num_computed: int) -> int | None:
        """The next token at which a step has to end: other blocks, or another mode, from there."""
        found = [self.due[0].token_index] if self.due else []
        if self.is_on:
            found.append(self.schedule.next_boundary(num_computed))
        if (due := self.schedule.next_due(num_computed)) is not None:
            found.append(due)
        return min(found, default=None)

    def write(self) -> None:
        """Write the choices that are not in the log yet; waits for them. Raises JournalError."""
        if self.unwritten:
            made = [Chosen(at, made_at, c.blocks()) for at, made_at, c in self.unwritten]
            self.log.write(*made)
            self.unwritten.clear()

    def file_digests(self) -> None:
        """Write the digests that are not in their file yet, and wait until they are on disk."""
        file = self.log.digests
        if file is None:
            return
        num_rewinds = len(self.log.past.state.rewinds)
        for index in sorted(self.unfiled):
            key = self.index.key(index)
            digest = None if key is None else self.index.digest(index).contiguous().cpu()
            bits = None if digest is None else digest.view(torch.int16).numpy().view(np.uint16)
            file.write(index, num_rewinds, key, bits)
        self.unfiled.clear()
        file.sync()

    def truncate(self, num_blocks: int) -> None:
        """Forget the digests of blocks from `num_blocks` on."""
        self.index.truncate(num_blocks)
        self.unfiled = {index for index in self.unfiled if index < num_blocks}
        if self.log.digests is not None:
            self.log.digests.truncate(num_blocks)


def policy_of(mode: ModeSet) -> PositionPolicy:
    """The position policy of a mode; records hold nothing else."""
    return cast(PositionPolicy, mode.policy)

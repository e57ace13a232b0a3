"""Mode `full`: a session attends to every block of its stream, whatever tier it lay in.

    the mode begins            blocks that left the window are brought back into the gpu pool
    tokens leave the window    their block gets one more owner before the window lets go of it
    the mode ends              what the window does not need is given back
    a session is resumed       the mode is that of its records; old blocks come with the next step

So every old block is a recalled entry of the table, at its true distance, and nothing is chosen.
Room in the pool is reserved before anything moves. A block that cannot be had is an error and never
a gap: `full` is for checking, and for short histories. No torch.

The stream's modes, with the salts that name its blocks apart, are in its `RecallLog`, whether or
not the engine can recall: a change of mode is written before a token is computed in it, and what is
in force is what the log says of the next token. So a resume computes every token in the mode it was
computed in, and finds each block by its name.

A step ends at multiples of the largest whole number of blocks that the window holds: then all that
leaves the window of one of its queries lies in blocks that were full before it began.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from streamkv.block_keys import BlockKeys
from streamkv.errors import ConfigError
from streamkv.journal_records import Chosen, ModeSet
from streamkv.live_blocks import give_back
from streamkv.mode_records import after_rewind, new_salt
from streamkv.old_blocks import OldBlocks
from streamkv.past_keys import chain_keys, replay_windows
from streamkv.recall_history import RecallHistory
from streamkv.recall_log import RecallLog
from streamkv.recall_schedule import question_start
from streamkv.sequence import Sequence
from streamkv.tiers.jobs import Wanted
from streamkv.tiers.manager import TierManager
from streamkv.window import Window


@dataclass(slots=True, eq=False)
class _Stream:
    """One sequence, as this module sees it.

    Attributes:
        log: where its modes are written down.
        created: the window of the session's creation.
        is_on: it attends to everything, or will when it has caught up.
        next_at: the next token at which another mode begins, of those that are known.
        reached: first blocks that were brought in; `None` while another mode is in force.
    """

    log: RecallLog
    created: Window
    is_on: bool = False
    next_at: int | None = None
    reached: int | None = None

    @property
    def history(self) -> RecallHistory:
        """The stream's modes."""
        return self.log.history


class FullAttention:
    """Sequences of an engine that attend to all of their blocks.

    Args:
        tiers: where blocks are.
        old: takes old blocks, and gives them back.
        trained_length: nothing seems farther away than this, less one.
        unset: the mode of a session that never had one, as records have it.
        problem: why sessions of this engine cannot attend so; empty if they can.
    """

    def __init__(
        self,
        tiers: TierManager,
        old: OldBlocks,
        trained_length: int,
        unset: ModeSet,
        problem: str = "",
    ) -> None:
        self._tiers = tiers
        self._old = old
        self._trained_length = trained_length
        self._unset = unset
        self._problem = problem
        self._streams: dict[Sequence, _Stream] = {}

    def open(self, sequence: Sequence, log: RecallLog, created: Window) -> None:
        """A sequence begins, to be resumed next.

        Args:
            sequence: new, or brought back.
            log: where its modes are.
            created: the window of the session's creation.
        """
        self._streams[sequence] = _Stream(log, created)

    def set_first_mode(self, sequence: Sequence) -> None:
        """Have a sequence that never had a mode attend to everything from the next token on.

        Raises:
            JournalError: it could not be written.
        """
        log = self._streams[sequence].log
        if log.history.newest is None:
            at = max(sequence.num_computed, sequence.num_tokens - 1)
            log.write(self._mode("full", at))

    def is_on(self, sequence: Sequence) -> bool:
        """Whether the sequence attends to all of its blocks, or will when it has caught up."""
        stream = self._streams.get(sequence)
        return stream is not None and stream.is_on

    def turn_on(self, sequence: Sequence, let_go: Callable[[], None]) -> None:
        """Attend to everything from the next token on; nothing of it may be under way.

        Args:
            sequence: in another mode, in which it stays if this raises.
            let_go: ends the other mode once this one is written; what that has recalled is had by
                then.

        Raises:
            ConfigError: sessions of this engine cannot.
            PoolFullError: the gpu pool has no room for the whole stream.
            AbsentBlockError: no tier has one of its blocks.
            JournalError: it could not be written.
        """
        if self._problem:
            remedy = "Use mode 'window', or 'recall' of an engine with recall_blocks."
            raise ConfigError("mode", "full", self._problem, remedy)
        stream = self._streams[sequence]
        end_block = self._end_block(sequence, sequence.num_computed + 1)
        try:
            self._name_blocks(sequence, stream)
            held = self._old.take(sequence, range(end_block), 0)
            try:
                stream.log.keep(self._wanted(sequence, held))
                stream.log.write(self._mode("full", sequence.num_computed))
            except BaseException:
                self._old.drop(held)
                raise
        except BaseException:
            sequence.keys = None
            self._old.release(sequence)
            raise
        let_go()
        self._begin(sequence, stream, held, end_block)
        self._read_log(sequence, stream)

    def turn_off(self, sequence: Sequence, mode: str, num_blocks: int) -> None:
        """Attend by another mode from the next token on, and give back what only this one needs.

        Args:
            sequence: nothing of it is under way.
            mode: `window` or `recall`.
            num_blocks: for `recall`.

        Raises:
            JournalError: it could not be written; nothing has changed.
        """
        stream = self._streams[sequence]
        turned = self._mode(mode, sequence.num_computed)
        stream.log.write(replace(turned, num_blocks=num_blocks))
        self.follow(sequence)

    def follow(self, sequence: Sequence) -> None:
        """Attend as the log says; old blocks come with the next step."""
        stream = self._streams.get(sequence)
        if stream is None:
            return
        mode = stream.history.mode_at(sequence.num_computed)
        if mode is not None and mode.mode == "full":
            if stream.reached is None:
                # Of a mode that chose them.
                self._old.give_back(sequence)
                self._name_blocks(sequence, stream)
                self._begin(sequence, stream, {}, 0)
        elif stream.reached is not None:
            self._end(sequence, stream)
        self._read_log(sequence, stream)

    def ask_again(self, sequence: Sequence) -> bool:
        """An answer begins: compute the question again if it was read in another mode.

        Returns:
            Whether it is computed again.

        Raises:
            JournalError: it could not be written; nothing has changed.
        """
        stream = self._streams.get(sequence)
        if stream is None or stream.reached is None:
            return False
        token_index = question_start(sequence.num_computed, sequence.block_size)
        read_before = token_index < _since(stream.history) <= sequence.num_computed
        if not read_before or not sequence.can_go_back(token_index):
            return False
        # What is stored of the question is void from here on, whatever happens next.
        stream.log.write(self._mode("full", token_index))
        give_back(self._tiers, sequence.go_back(token_index))
        self.follow(sequence)
        return True

    def before_step(self, sequence: Sequence, end: int) -> None:
        """Bring in what leaves the window of a query before `end`.

        Raises:
            PoolFullError: the gpu pool has no room for it.
            AbsentBlockError: no tier has it.
        """
        stream = self._streams.get(sequence)
        if stream is None or stream.reached is None:
            return
        end_block = self._end_block(sequence, end)
        if end_block > stream.reached:
            recalled = sequence.table.recalled
            blocks = range(stream.reached, end_block)
            held = self._old.take(sequence, blocks, len(recalled))
            recalled.set({index: recalled[index] for index in recalled} | held)
            stream.reached = end_block

    def after_step(self, sequence: Sequence) -> None:
        """Change modes where the log says so, and say where the next step has to end."""
        stream = self._streams.get(sequence)
        if stream is None:
            return
        if stream.next_at is not None and sequence.num_computed >= stream.next_at:
            self.follow(sequence)
        elif stream.reached is not None:
            self._set_boundary(sequence, stream)

    def fork(self, sequence: Sequence, forked: Sequence, log: RecallLog) -> None:
        """A sequence with the same past begins: blocks belong to both.

        Raises:
            PoolFullError: no room, should they go different ways.
        """
        source = self._streams[sequence]
        stream = self._streams[forked] = _Stream(log, source.created)
        if source.reached is not None:
            self._begin(forked, stream, self._old.share(sequence, forked), source.reached)
        self._read_log(forked, stream)

    def records_after_rewind(self, sequence: Sequence, num_tokens: int) -> list[ModeSet | Chosen]:
        """What is to be written with the record that the stream ends at `num_tokens` again."""
        stream = self._streams.get(sequence)
        if stream is None or stream.history.newest is None:
            return []
        return after_rewind(stream.history, self._unset, num_tokens)

    def has_all(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a stream that ends at `num_tokens` goes on with what is in the gpu pool now."""
        stream = self._streams.get(sequence)
        if stream is None or stream.reached is None:
            return False
        is_there = stream.reached >= self._end_block(sequence, sequence.num_computed)
        # A choice that is forgotten has its tokens computed anew.
        return is_there and stream.history.copy().rewind(num_tokens) is None

    def rewound(self, sequence: Sequence) -> None:
        """The stream ended earlier, as its log says."""
        stream = self._streams.get(sequence)
        if stream is not None and stream.reached is not None:
            num_full = sequence.num_computed // sequence.block_size
            self._old.give_back(sequence, num_full)
            stream.reached = min(stream.reached, num_full)
            self._old.reserve(sequence, len(sequence.table.recalled))
        self.follow(sequence)

    def old_blocks(self, sequence: Sequence) -> list[Wanted]:
        """What a resume needs besides the window."""
        stream = self._streams.get(sequence)
        if stream is None or stream.reached is None:
            return []
        recalled = sequence.table.recalled
        return self._wanted(sequence, {index: recalled[index] for index in recalled})

    def give_back(self, sequence: Sequence) -> None:
        """Give back what left the window; the next step brings it in again."""
        stream = self._streams.get(sequence)
        if stream is not None and stream.reached is not None:
            self._old.give_back(sequence)
            stream.reached = 0
            self._old.release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; it holds nothing any more."""
        self._streams.pop(sequence, None)
        self._old.release(sequence)

    def _mode(self, mode: str, token_index: int) -> ModeSet:
        return replace(self._unset, token_index=token_index, mode=mode, salt=new_salt())

    def _begin(
        self, sequence: Sequence, stream: _Stream, held: dict[int, int], reached: int
    ) -> None:
        recalled = sequence.table.recalled
        recalled.trained_length = self._trained_length
        recalled.set_policy("absolute")
        recalled.set(held)
        sequence.attends_to_all = True
        sequence.recall_boundary = None
        # What a step may have left there was computed in the mode before.
        sequence.head_is_written = False
        stream.reached = reached

    def _end(self, sequence: Sequence, stream: _Stream) -> None:
        self._old.give_back(sequence)
        self._old.release(sequence)
        sequence.table.recalled.set_policy("far")
        sequence.attends_to_all = False
        sequence.head_is_written = False
        sequence.keys = None
        stream.reached = None

    def _read_log(self, sequence: Sequence, stream: _Stream) -> None:
        """Take the salt in force and the next change of mode."""
        history, num_computed = stream.history, sequence.num_computed
        mode, newest = history.mode_at(num_computed), history.newest
        stream.is_on = newest is not None and newest.mode == "full"
        sequence.recall_salt = mode.salt if mode is not None else b""
        later = (mode.token_index for mode in history.modes(num_computed + 1))
        stream.next_at = next(later, None)
        self._set_boundary(sequence, stream)

    def _set_boundary(self, sequence: Sequence, stream: _Stream) -> None:
        found = [stream.next_at] if stream.next_at is not None else []
        if stream.reached is not None:
            size = sequence.block_size
            stride = sequence.window.window_size // size * size
            found.append((sequence.num_computed // stride + 1) * stride)
        sequence.mode_boundary = min(found, default=None)

    def _name_blocks(self, sequence: Sequence, stream: _Stream) -> None:
        """Make the names of all blocks anew that were computed so far, in whatever life."""
        keys, past = BlockKeys(self._old.num_blocks), stream.log.past
        windows = replay_windows(past, stream.created)
        named = chain_keys(sequence, past, windows, sequence.num_computed)
        for index, key in enumerate(islice(named, self._old.num_blocks)):
            keys.put(index, key)
        sequence.keys = keys

    def _wanted(self, sequence: Sequence, held: dict[int, int]) -> list[Wanted]:
        """All blocks so far, and where those lie that are held."""
        assert sequence.keys is not None
        num_full = sequence.num_computed // sequence.block_size
        named = ((index, sequence.keys.get(index)) for index in range(num_full))
        return [(key, held.get(index)) for index, key in named if key is not None]

    def _end_block(self, sequence: Sequence, end: int) -> int:
        """Blocks [0, n) have a token that left the window of a query before `end`."""
        return -(-max(0, end - sequence.window.window_size) // sequence.block_size)


def _since(history: RecallHistory) -> int:
    """The token from which on the newest mode is in force, whatever its salts."""
    since, last = 0, ""
    for mode in history.modes(0):
        if mode.mode != last:
            since, last = mode.token_index, mode.mode
    return since

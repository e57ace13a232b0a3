"""What the records of a stream say about its recall: modes, salts and choices by token index.

    modes     |0 window, no salt      |600 recall, salt a                |1400 window, salt b
    choices                           |600   |768        |1024   |1280
    blocks    sealed ....................... named with the salt of the newest mode that began
                                             before their end

A mode ends what was chosen under the one before. A choice replaces those for the same and later
tokens; if it is for tokens before the mode it was made in, the mode reaches back with it.

Invariant: the history after some records is the same whether they were just written or read back.
Takes about 100 bytes for each change of mode and 24 + 4 * blocks for each choice. Pure.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace

from streamkv.journal_records import Chosen, ModeSet, RecordKind, decode_record, encode_record


class RecallHistory:
    """Modes and choices of one stream, ascending by token index."""

    __slots__ = ("_blocks", "_chosen_at", "_ends", "_made_at", "_mode_at", "_modes")

    def __init__(self) -> None:
        self._mode_at = array("Q")
        self._modes: list[bytes] = []
        self._chosen_at = array("Q")
        self._made_at = array("Q")
        self._ends = array("Q")
        self._blocks = array("I")

    def set_mode(self, mode: ModeSet) -> None:
        """A mode begins; later ones, and what was chosen for tokens behind it, are void."""
        self._cut_modes(mode.token_index)
        self._cut_choices(bisect_left(self._chosen_at, mode.token_index))
        self._append_mode(mode)

    def choose(self, chosen: Chosen) -> None:
        """A choice was made."""
        newest = self.newest
        if newest is not None and chosen.token_index < newest.token_index <= chosen.made_at:
            # Made in this mode, for tokens before it: these are computed in it, too.
            self._cut_modes(chosen.token_index)
            self._append_mode(replace(newest, token_index=chosen.token_index))
        self._cut_choices(bisect_left(self._chosen_at, chosen.token_index))
        self._append_choice(chosen)

    def rewind(self, end: int) -> int | None:
        """The stream ends earlier now: forget what was decided by later tokens.

        Returns:
            The first token that is left and was computed with a choice that is forgotten.
        """
        self._cut_modes(end)
        kept = [chosen for chosen in self.choices(0) if chosen.made_at < end]
        lost = [chosen.token_index for chosen in self.choices(0) if chosen.made_at >= end]
        self._cut_choices(0)
        for chosen in kept:
            self._append_choice(chosen)
        return min((token_index for token_index in lost if token_index < end), default=None)

    @property
    def newest(self) -> ModeSet | None:
        """The mode that the stream is in, or comes to; `None` if none was ever set."""
        return self._mode(len(self._modes) - 1)

    @property
    def last_made_at(self) -> int:
        """Tokens that were computed when the newest choice was made; -1 without one.

        Boundaries up to there are behind: what they chose is here or gave way to something newer.
        """
        return max(self._made_at, default=-1)

    @property
    def has_salt(self) -> bool:
        """Whether blocks of the stream are named apart."""
        return any(mode.salt for mode in self.modes(0))

    @property
    def most_blocks(self) -> int:
        """Old blocks that the stream has attended to at once, at most, in mode `recall`."""
        modes = (mode for mode in self.modes(0) if mode.mode == "recall")
        return max((mode.num_blocks for mode in modes), default=0)

    def modes(self, start: int) -> Iterator[ModeSet]:
        """Modes that begin at token `start` or later."""
        for place in range(bisect_left(self._mode_at, start), len(self._modes)):
            mode = self._mode(place)
            assert mode is not None
            yield mode

    def mode_at(self, token_index: int) -> ModeSet | None:
        """The mode in which a token is computed; `None` before the first that was set."""
        return self._mode(bisect_right(self._mode_at, token_index) - 1)

    def salt_of(self, end: int) -> bytes:
        """The salt in the name of the block that ends before token `end`."""
        mode = self._mode(bisect_left(self._mode_at, end) - 1)
        return mode.salt if mode is not None else b""

    def choices(self, start: int, end: int | None = None) -> Iterator[Chosen]:
        """Choices for tokens from some index on, `start` <= index < `end`."""
        first = bisect_left(self._chosen_at, start)
        stop = len(self._chosen_at) if end is None else bisect_left(self._chosen_at, end)
        for place in range(first, stop):
            low = self._ends[place - 1] if place else 0
            blocks = tuple(self._blocks[low : self._ends[place]])
            yield Chosen(self._chosen_at[place], self._made_at[place], blocks)

    def choice_at(self, token_index: int) -> Chosen | None:
        """What a token attends to besides its window."""
        mode = self.mode_at(token_index)
        since = mode.token_index if mode is not None else 0
        place = bisect_right(self._chosen_at, token_index) - 1
        if place < 0 or self._chosen_at[place] < since:
            return None
        [chosen] = self.choices(self._chosen_at[place], self._chosen_at[place] + 1)
        return chosen

    def copy(self) -> "RecallHistory":
        """The same for a fork."""
        other = RecallHistory()
        for mode in self.modes(0):
            other._append_mode(mode)
        other._chosen_at, other._made_at = self._chosen_at[:], self._made_at[:]
        other._ends, other._blocks = self._ends[:], self._blocks[:]
        return other

    def _mode(self, place: int) -> ModeSet | None:
        if place < 0:
            return None
        mode = decode_record(RecordKind.MODE_SET, self._modes[place])
        assert isinstance(mode, ModeSet)
        return mode

    def _append_mode(self, mode: ModeSet) -> None:
        self._mode_at.append(mode.token_index)
        self._modes.append(encode_record(mode)[1])

    def _append_choice(self, chosen: Chosen) -> None:
        self._chosen_at.append(chosen.token_index)
        self._made_at.append(chosen.made_at)
        self._blocks.extend(chosen.blocks)
        self._ends.append(len(self._blocks))

    def _cut_modes(self, token_index: int) -> None:
        place = bisect_left(self._mode_at, token_index)
        del self._mode_at[place:], self._modes[place:]

    def _cut_choices(self, place: int) -> None:
        del self._chosen_at[place:], self._made_at[place:], self._ends[place:]
        del self._blocks[self._ends[-1] if self._ends else 0 :]

"""When a session chooses old blocks, from which, and when it attends to them. Pure.

A choice has a lag in tokens, never in time: what is chosen at a multiple b of the stride, from the
queries before it, is attended by the tokens [b + stride, b + 2 * stride), so that a disk has a
whole stride to deliver. At the start of an answer a choice is made at once, and the last tokens
before the answer are computed again with it: a question that attended to nothing old would have
told the answer nothing of it.

Candidates are the sealed blocks of which a token leaves the window of a query that the choice is
for: of a block that is still leaving, each query sees what has left.
"""

from collections import deque
from typing import NamedTuple, Protocol

from streamkv.window import Window

QUESTION_TOKENS = 64
"""Tokens before an answer that are computed again with its choice, up to a block's more. A resume
computes them anew, so that their queries are there to choose by."""


def question_start(num_computed: int, block_size: int) -> int:
    """The token from which on a stream is computed again when an answer begins."""
    return max(0, num_computed - QUESTION_TOKENS) // block_size * block_size


def question_tokens(block_size: int) -> int:
    """Tokens that are computed again at most, rounded up to blocks."""
    return -(-QUESTION_TOKENS // block_size) * block_size + block_size


class Choosing(Protocol):
    """A choice that was made, and may not be known yet."""

    def is_known(self) -> bool:
        """Whether nothing has to be waited for."""

    def blocks(self) -> tuple[int, ...]:
        """Block indices, ascending; waits for them."""

    def weights(self) -> tuple[float, ...]:
        """Of each of them, which share of their attention the queries would give it; waits.

        Empty if only the choice is known, as it is written down.
        """


class Known(NamedTuple):
    """A choice that is known.

    Attributes:
        indices: block indices, ascending.
        shares: weight of each, or nothing.
    """

    indices: tuple[int, ...]
    shares: tuple[float, ...] = ()

    def is_known(self) -> bool:
        """Always True."""
        return True

    def blocks(self) -> tuple[int, ...]:
        """They."""
        return self.indices

    def weights(self) -> tuple[float, ...]:
        """Theirs, if they are known."""
        return self.shares


class Choice(NamedTuple):
    """Blocks to attend to for the tokens from `token_index` on."""

    token_index: int
    choosing: Choosing

    def is_of(self, token_index: int, blocks: tuple[int, ...]) -> bool:
        """Whether it is the choice of these blocks for that token; waits for nothing."""
        is_for_it = self.token_index == token_index and self.choosing.is_known()
        return is_for_it and self.choosing.blocks() == blocks


class RecallSchedule:
    """Choices of one session.

    Args:
        stride: tokens between two choices.
        num_blocks: blocks of a choice, at most.
        block_size: tokens per block.
    """

    def __init__(self, stride: int, num_blocks: int, block_size: int) -> None:
        assert stride > 0 and num_blocks >= 0
        self.stride = stride
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._choices: deque[Choice] = deque()

    def next_boundary(self, num_computed: int) -> int:
        """The first token after `num_computed` at which a step has to end or begin anew."""
        return (num_computed // self.stride + 1) * self.stride

    def chooses_at(self, num_computed: int) -> bool:
        """Whether a choice is made once so many tokens are computed."""
        return num_computed > 0 and num_computed % self.stride == 0

    def candidates(self, window: Window, token_index: int, num_sealed: int) -> int:
        """Blocks [0, n) that a choice for the tokens from `token_index` on is made from.

        Args:
            window: in force.
            token_index: of the first query that the choice is for.
            num_sealed: full blocks of the stream.
        """
        last_query = token_index + 2 * self.stride - 1
        return min(-(-window.first_visible(last_query) // self._block_size), num_sealed)

    def first_within(self, token_index: int, trained_length: int) -> int:
        """The first block that no query of a choice is farther from than a model was trained for.

        Args:
            token_index: of the first query that the choice is for.
            trained_length: largest distance in use, plus one.
        """
        last_query = token_index + 2 * self.stride - 1
        return -(-max(0, last_query - trained_length + 1) // self._block_size)

    def put(self, choice: Choice) -> None:
        """A choice was made; one for the same or a later token gives way to it."""
        while self._choices and self._choices[-1].token_index >= choice.token_index:
            self._choices.pop()
        self._choices.append(choice)

    def next_choice(self) -> Choice | None:
        """The first choice that was not taken yet."""
        return self._choices[0] if self._choices else None

    def is_due(self, token_index: int) -> bool:
        """Whether there is a choice for `token_index` that was not taken yet."""
        return bool(self._choices) and self._choices[0].token_index <= token_index

    def next_due(self, num_computed: int) -> int | None:
        """The first token after `num_computed` that a choice is for."""
        later = (c.token_index for c in self._choices if c.token_index > num_computed)
        return next(later, None)

    def take(self, token_index: int) -> Choice | None:
        """The newest choice that is for `token_index`, if it was not taken yet; older ones go."""
        taken: Choice | None = None
        while self._choices and self._choices[0].token_index <= token_index:
            taken = self._choices.popleft()
        return taken

    def put_back(self, choice: Choice) -> None:
        """A choice that was taken could not be used yet."""
        self._choices.appendleft(choice)

    def copy(self) -> "RecallSchedule":
        """The same for a fork."""
        other = RecallSchedule(self.stride, self.num_blocks, self._block_size)
        other._choices = self._choices.copy()
        return other

    def clear(self) -> list[Choice]:
        """Forget all choices; returns them."""
        forgotten = list(self._choices)
        self._choices.clear()
        return forgotten

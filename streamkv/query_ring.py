"""Which token's queries lie in which place of a ring. Pure.

What is kept does not depend on how the input was cut into steps: place i holds the newest token
whose index is i, modulo the places. A token that is computed twice, because its logits were wanted
later, takes its own place again. On a GPU a step may have been launched for tokens that nobody has
asked for yet; they take places, too, which is why there are a few more than are ever read.
"""

NUM_OBSERVED = 16
"""Queries that choose together: with one or four, fewer needles were answered (docs/recall.md)."""

MAX_AHEAD = 2
"""Tokens of a stream that may be under way, or were given up, beyond those that are counted."""

NUM_PLACES = NUM_OBSERVED + MAX_AHEAD


class QueryRing:
    """Places of one stream."""

    def __init__(self) -> None:
        self._indices = [-1] * NUM_PLACES

    def take(self, first_index: int, count: int) -> list[int]:
        """Places of the newest of the tokens `[first_index, first_index + count)`, in order.

        As many as are ever read; older ones have none.
        """
        end = first_index + count
        places = []
        for index in range(max(first_index, end - NUM_OBSERVED), end):
            places.append(index % NUM_PLACES)
            self._indices[places[-1]] = index
        return places

    def before(self, end_index: int) -> list[int]:
        """Places of the newest tokens before one, in order, as far as none is missing."""
        first = end_index
        while first > max(0, end_index - NUM_OBSERVED) and self._has(first - 1):
            first -= 1
        return [index % NUM_PLACES for index in range(first, end_index)]

    def _has(self, index: int) -> bool:
        return self._indices[index % NUM_PLACES] == index

    def clear(self) -> None:
        """Forget all: the stream goes on elsewhere."""
        self._indices = [-1] * NUM_PLACES

    def copy(self) -> "QueryRing":
        """The same for a fork."""
        other = QueryRing()
        other._indices = list(self._indices)
        return other

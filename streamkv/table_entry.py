"""What attention reads of a block, as bookkeeping names it."""

from typing import NamedTuple


class TableEntry(NamedTuple):
    """A run of tokens of one block that attention reads.

    `distance = min(query_index - start, cap)`; slot j holds token `start + j`, valid from
    `first_valid` up to `end_valid`.
    """

    pool: str
    block_id: int
    start: int
    cap: int
    first_valid: int
    end_valid: int

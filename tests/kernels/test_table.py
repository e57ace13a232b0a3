"""Which slots a query sees, written out for one small table."""

import torch

from streamkv.kernels.table import NO_CAP, SequenceTable

# Blocks of four tokens: sink tokens 0 and 1 in block 7; tokens 4 to 9 of the window in 2 and 5.
TABLE = SequenceTable(
    block_ids=torch.tensor([7, 2, 5]),
    starts=torch.tensor([0, 4, 8]),
    caps=torch.tensor([5, NO_CAP, NO_CAP]),
    first_valid=torch.tensor([0, 0, 0]),
    end_valid=torch.tensor([2, 4, 2]),
    num_sink_entries=1,
)


def seen(query: int, window_size: int) -> list[int]:
    """Token indices that a query sees."""
    [visible] = TABLE.visible(torch.tensor([query]), window_size, block_size=4)
    tokens = TABLE.starts[:, None] + torch.arange(4)
    return tokens[visible].tolist()


def test_sink_tokens_are_seen_for_ever_and_others_for_a_window() -> None:
    assert seen(9, window_size=3) == [0, 1, 7, 8, 9]
    assert seen(9, window_size=6) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert seen(1000, window_size=3) == [0, 1]


def test_no_token_is_seen_before_its_time() -> None:
    assert seen(7, window_size=3) == [0, 1, 5, 6, 7]
    assert seen(0, window_size=3) == [0]


def test_the_distance_of_a_sink_entry_stops_growing() -> None:
    distances = TABLE.distances(torch.tensor([4, 9, 1000]))
    assert distances.tolist() == [[4, 0, -4], [5, 5, 1], [5, 996, 992]]


def test_an_unused_entry_is_never_seen() -> None:
    empty = torch.tensor([0])
    table = SequenceTable(torch.tensor([9]), empty, empty, empty, empty, 1)
    assert not table.visible(torch.tensor([0, 50]), 10**6, block_size=4).any()

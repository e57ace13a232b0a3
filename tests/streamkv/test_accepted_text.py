"""Text that a session still holds."""

from streamkv.accepted_text import accepted_text
from streamkv.journal_records import Fed, Generated, Record, Rewound


def held(*records: Record) -> str:
    return "".join(accepted_text(lambda: records))


def test_without_a_rewind_it_is_all_that_was_fed() -> None:
    assert held(Fed("ab", 0, (1,)), Generated((5,)), Fed("cd", 1, (2,))) == "abcd"


def test_what_was_given_up_is_left_out_and_what_came_after_follows() -> None:
    fed = [Fed("abc", 0, (1,)), Fed("def", 0, (2,))]
    assert held(*fed, Rewound(1, 4, False)) == "abcd"
    assert held(*fed, Rewound(1, 2, False), Fed("xyz", 0, (3,))) == "abxyz"
    assert held(*fed, Rewound(1, 2, False), Fed("xyz", 0, (3,)), Rewound(1, 3, False)) == "abx"


def test_a_later_rewind_may_reach_further_back() -> None:
    records = [Fed("abc", 0, (1,)), Rewound(1, 2, False), Fed("xyz", 0, (3,)), Rewound(1, 1, False)]
    assert held(*records, Fed("q", 0, (4,))) == "aq"

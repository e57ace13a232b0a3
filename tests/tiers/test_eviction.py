from streamkv.tiers.eviction import Eviction
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.store_tables import OrderRow


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def rows(eviction: Eviction, *numbers: int) -> list[OrderRow]:
    """Records of 2 pieces, whose sequence number is their number, from where a scan begins."""
    return [OrderRow(n, key(n), 2) for n in numbers if n >= eviction.scan_from]


def chosen(
    eviction: Eviction, num_pages: int, *numbers: int, protected: tuple[int, ...] = ()
) -> list[int]:
    """The numbers evicted, and remembered as removed."""
    keys = {key(n) for n in protected}
    victims = eviction.choose(rows(eviction, *numbers), num_pages, 3, keys)
    eviction.removed(victims)
    return [row.sequence for row in victims.rows]


def test_the_oldest_go_until_there_is_room() -> None:
    eviction = Eviction({})
    victims = eviction.choose(rows(eviction, 1, 2, 3), 7, 3, ())
    assert [row.sequence for row in victims.rows] == [1, 2]
    assert victims.num_pages == 12


def test_nothing_goes_when_there_is_room() -> None:
    assert chosen(Eviction({}), 0, 1, 2) == []
    assert chosen(Eviction({}), -5, 1, 2) == []


def test_locked_and_protected_records_are_passed_over() -> None:
    eviction = Eviction({"diary": (key(1), key(3))})
    assert chosen(eviction, 100, 1, 2, 3, 4, 5, protected=(4,)) == [2, 5]


def test_a_record_protected_once_may_go_the_next_time() -> None:
    eviction = Eviction({})
    assert chosen(eviction, 6, 1, 2, 3, protected=(1,)) == [2]
    assert chosen(eviction, 6, 1, 3) == [1]


def test_locked_records_are_looked_at_once() -> None:
    eviction = Eviction({"diary": (key(1), key(2))})
    assert chosen(eviction, 6, 1, 2, 3, 4) == [3]
    assert eviction.scan_from == 4


def test_a_key_stays_locked_while_any_session_names_it() -> None:
    eviction = Eviction({"a": (key(1), key(1)), "b": (key(1), key(2))})
    assert eviction.released_by("b", []) == [key(2)]
    eviction.replace("b", [], 2)
    assert eviction.is_locked(key(1))
    assert not eviction.is_locked(key(2))
    eviction.replace("a", [], 1)
    assert not eviction.is_locked(key(1))
    assert eviction.manifests == {}


def test_a_released_record_is_found_again() -> None:
    eviction = Eviction({"diary": (key(1), key(2))})
    assert chosen(eviction, 6, 1, 2, 3) == [3]
    assert eviction.released_by("diary", [key(1)]) == [key(2)]
    eviction.replace("diary", [key(1)], 2)
    assert chosen(eviction, 6, 1, 2) == [2]


def test_a_choice_that_was_undone_is_made_again() -> None:
    eviction = Eviction({})
    eviction.choose(rows(eviction, 1, 2), 6, 3, ())
    assert chosen(eviction, 6, 1, 2) == [1]

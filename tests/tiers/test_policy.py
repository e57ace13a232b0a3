"""Decisions of the tiers, and the claims of sessions on stored blocks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.tiers.policy import Claims, Policy
from streamkv.tiers.spec import BlockKey

A, B, C, D = (BlockKey(bytes([2 * number]) * 16) for number in range(1, 5))
PARTIAL = BlockKey(bytes([1]) * 16)


@pytest.mark.parametrize(
    ("retain", "has_cpu", "has_ssd", "copies"),
    [
        ("all", True, True, True),
        ("all", True, False, True),
        ("all", False, True, True),
        ("all", False, False, False),
        ("window", True, True, True),
        ("window", False, True, False),
        ("window", False, False, False),
        ("none", True, True, False),
    ],
)
def test_what_is_copied_when_a_block_is_sealed(
    retain: str, has_cpu: bool, has_ssd: bool, copies: bool
) -> None:
    policy = Policy(retain)  # type: ignore[arg-type]  # pytest passes plain strings
    assert policy.copies_at_seal(has_cpu=has_cpu, has_ssd=has_ssd) is copies


def test_retain_all_keeps_sealed_blocks_but_no_superseded_partial_record() -> None:
    policy = Policy("all")
    assert policy.keeps(A, num_users=0, claimed=False)
    assert not policy.keeps(PARTIAL, num_users=0, claimed=False)
    assert policy.keeps(PARTIAL, num_users=0, claimed=True)


def test_retain_window_keeps_what_a_window_or_a_manifest_needs() -> None:
    policy = Policy("window")
    assert not policy.keeps(A, num_users=0, claimed=False)
    assert policy.keeps(A, num_users=1, claimed=False)
    assert policy.keeps(A, num_users=0, claimed=True)


def test_writes_what_exceeds_the_watermark_a_batch_at_a_time() -> None:
    policy = Policy("all", watermark=0.75, batch_blocks=4)
    assert [policy.num_to_write(unstored, 8) for unstored in (0, 6, 7, 8, 40)] == [0, 0, 1, 2, 4]


def test_a_replaced_manifest_is_honoured_for_one_more_checkpoint() -> None:
    claims = Claims()
    released = []
    for keys in ([A, B], [B, C], [C, D], [D]):
        claims.begin(keys)
        released.append(claims.settle("diary", keys))
    assert released == [[], [], [A], [B]]
    assert [key in claims for key in (A, B, C, D)] == [False, False, True, True]
    claims.check_integrity()


def test_a_block_claimed_by_two_sessions_outlives_the_first() -> None:
    claims = Claims()
    for session in ("diary", "log"):
        claims.begin([A])
        claims.settle(session, [A])
    assert claims.forget("diary") == []
    assert claims.forget("log") == [A]
    assert claims.num_claims() == 0


def test_a_checkpoint_claims_from_the_moment_it_begins() -> None:
    claims = Claims()
    claims.begin([A])
    assert A in claims and not claims.knows("diary")
    assert claims.abandon([A]) == [A]
    assert A not in claims


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.lists(st.sampled_from([A, B, C, D])))))
def test_claims_equal_the_two_newest_manifests_of_each_session(
    steps: list[tuple[str, list[BlockKey]]],
) -> None:
    claims = Claims()
    manifests: dict[str, list[list[BlockKey]]] = {}
    for session, keys in steps:
        if keys:
            claims.begin(keys)
            claims.settle(session, keys)
            manifests.setdefault(session, []).append(keys)
        else:
            claims.forget(session)
            manifests.pop(session, None)
        claims.check_integrity()
        newest = [keys for kept in manifests.values() for keys in kept[-2:]]
        expected = Counter(key for keys in newest for key in keys)
        assert claims.num_claims() == expected.total()
        assert all((key in claims) == (key in expected) for key in (A, B, C, D))

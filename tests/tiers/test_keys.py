"""Block keys: the same in every process, different for whatever would change a block's bytes."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.errors import InputError
from streamkv.tiers.keys import (
    AttentionPolicy,
    Salting,
    child_key,
    is_partial,
    partial_key,
    root_key,
    salted_key,
    tenant_salt,
)
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16")
ROOT = root_key(b"weights", SPEC, b"rope", b"")
WINDOW = AttentionPolicy("window", 128, ((0, 4),), "cache")

_CHAIN = """
from streamkv.tiers.keys import child_key, partial_key, root_key
from streamkv.tiers.spec import KVSpec
spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16")
root = root_key(b"weights", spec, b"rope", b"")
child = child_key(root, range(64), b"dense")
print(root.hex(), child.hex(), partial_key("diary", child, [5, 6], b"dense").hex())
"""

_LITERAL = (
    "4808a9f4a7852c3fb34afa6bb4c8dcd7 "
    "209f0e914899ba02d0a8bb72f1b8e36d "
    "eb5dff519c942bd78e12e9177ab85948"
)


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_keys_are_the_same_in_every_process(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", _CHAIN]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == _LITERAL


def test_every_field_of_the_root_counts() -> None:
    other_dtype = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype="float16")
    other_heads = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    other_block = KVSpec(num_layers=2, num_kv_heads=3, head_dim=16, dtype="bfloat16", block_size=32)
    roots = [
        ROOT,
        root_key(b"other weights", SPEC, b"rope"),
        root_key(b"weights", other_dtype, b"rope"),
        root_key(b"weights", other_heads, b"rope"),
        root_key(b"weights", other_block, b"rope"),
        root_key(b"weights", SPEC, b"other rope"),
        root_key(b"weights", SPEC, b"rope", b"tenant"),
    ]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == 16 for root in roots)


def test_moving_bytes_between_fields_changes_the_key() -> None:
    assert root_key(b"ab", SPEC, b"c") != root_key(b"a", SPEC, b"bc")
    assert root_key(b"w", SPEC, b"rs") != root_key(b"w", SPEC, b"r", b"s")
    assert child_key(ROOT, [1, 2], b"") != child_key(ROOT, [1], b"\x02\x00\x00\x00")


def test_a_key_depends_on_parent_tokens_their_order_and_the_policy() -> None:
    ids = list(range(64))
    keys = [
        child_key(ROOT, ids, b"dense"),
        child_key(ROOT, ids[::-1], b"dense"),
        child_key(ROOT, [*ids[:-1], 64], b"dense"),
        child_key(ROOT, ids, b"window"),
        child_key(child_key(ROOT, ids, b"dense"), ids, b"dense"),
    ]
    assert len(set(keys)) == len(keys)


def test_partial_keys_belong_to_one_session_and_are_told_apart() -> None:
    ids = [1, 2, 3]
    diary = partial_key("diary", ROOT, ids, b"dense")
    assert diary == partial_key("diary", ROOT, ids, b"dense")
    assert diary != partial_key("log", ROOT, ids, b"dense")
    assert diary != partial_key("diary", ROOT, [1, 2], b"dense")
    assert is_partial(diary)
    assert not any(is_partial(child_key(ROOT, [i], b"dense")) for i in range(64))
    assert all(is_partial(partial_key("s", ROOT, [i], b"dense")) for i in range(64))


def test_token_ids_that_do_not_fit_are_refused() -> None:
    for ids in ([-1], [2**32]):
        with pytest.raises(InputError, match="token_ids"):
            child_key(ROOT, ids, b"dense")


def test_blocks_that_see_their_whole_past_are_shared_between_windows() -> None:
    wide = AttentionPolicy("window", 512, ((0, 4),), "cache")
    # With 4 sink tokens and a window of 128, token 131 is the last to see everything.
    assert WINDOW.in_force(64, 64) == b"dense" == wide.in_force(64, 64)
    assert WINDOW.num_dense(128, 64) == 4
    assert WINDOW.in_force(128, 64) != wide.in_force(128, 64)


def test_policies_that_differ_are_named_apart() -> None:
    others = [
        AttentionPolicy("window", 129, ((0, 4),), "cache"),
        AttentionPolicy("window", 128, ((0, 5),), "cache"),
        AttentionPolicy("window", 128, ((0, 4),), "absolute"),
        AttentionPolicy("window", 128, ((0, 4), (300, 310)), "cache"),
        AttentionPolicy("full", 128, ((0, 4),), "cache"),
    ]
    names = [policy.in_force(640, 64) for policy in (WINDOW, *others)]
    assert len(set(names)) == len(names)


def test_how_many_sinks_begin_in_a_block_counts_also_beyond_its_end() -> None:
    short, long = (
        AttentionPolicy("window", 64, ((0, 4), (650, end)), "cache") for end in (710, 720)
    )
    assert short.in_force(640, 64) != long.in_force(640, 64)


def test_sinks_that_come_later_do_not_count_for_earlier_blocks() -> None:
    kept_later = AttentionPolicy("window", 128, ((0, 4), (1000, 1010)), "cache")
    assert kept_later.in_force(640, 64) == WINDOW.in_force(640, 64)
    assert kept_later.in_force(960, 64) != WINDOW.in_force(960, 64)


@given(
    window_size=st.integers(1, 40),
    sinks=st.sampled_from([(), ((0, 3),), ((0, 3), (3, 9)), ((0, 2), (8, 20)), ((4, 6),)]),
    first=st.integers(0, 60),
)
def test_num_dense_agrees_with_counting_what_each_token_sees(
    window_size: int, sinks: tuple[tuple[int, int], ...], first: int
) -> None:
    def sees_everything(token: int) -> bool:
        window = set(range(max(token - window_size + 1, 0), token + 1))
        kept = {index for a, b in sinks for index in range(a, b)}
        return set(range(token + 1)) <= window | kept

    policy = AttentionPolicy("window", window_size, sinks, "cache")
    expected = 0
    while expected < 16 and sees_everything(first + expected):
        expected += 1
    assert policy.num_dense(first, 16) == expected


def chained(salting: Salting, num_blocks: int) -> list[bytes]:
    """Keys of the first blocks of a stream, the same ids in each."""
    parent, keys = root_key(b"weights", SPEC, b"rope", salting.root_salt), list[bytes]()
    for index in range(num_blocks):
        key = child_key(parent, range(64), b"dense")
        keys.append(key)
        parent = salting.after(index, key)
    return keys


def test_the_salt_enters_the_chain_behind_the_shared_blocks() -> None:
    plain, one, two = (
        chained(Salting(salt, shared), 5) for salt, shared in ((b"", 0), (b"1", 2), (b"2", 2))
    )
    assert plain[:2] == one[:2] == two[:2]
    assert not {*plain[2:]} & {*one[2:]} and not {*one[2:]} & {*two[2:]}
    assert one[2] == child_key(salted_key(BlockKey(one[1]), b"1"), range(64), b"dense")


def test_without_shared_blocks_the_salt_is_in_every_key() -> None:
    one, two = chained(Salting(b"1"), 3), chained(Salting(b"2"), 3)
    assert not {*one} & {*two}
    assert one == chained(Salting(b"1"), 3)
    assert chained(Salting(b"1", 5), 3) == chained(Salting(b"", 0), 3)


def test_the_salt_of_a_tenant_is_the_same_everywhere_and_not_its_name() -> None:
    assert tenant_salt("acme").hex() == "cb5f3c170529f27e09f8a825001494fd"
    assert tenant_salt("acme") != tenant_salt("Acme")
    assert len({tenant_salt(name) for name in ("", "a", "b", "ab", "ü")}) == 5

"""Sizes of the KV layout, written out, and what its hash tells apart."""

import dataclasses

import pytest

from streamkv.tiers.spec import KVSpec

SPEC = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_sizes_are_those_of_smollm2_135m() -> None:
    assert SPEC.block_shape == (30, 2, 3, 64, 64)
    assert SPEC.frame_bytes == 49_152
    assert SPEC.block_bytes == 1_474_560
    assert SPEC.token_bytes == 23_040


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_an_element_has_the_size_of_its_type(dtype: str, num_bytes: int) -> None:
    assert KVSpec(1, 1, 1, dtype, block_size=1).block_bytes == 2 * num_bytes


def test_every_other_layout_has_another_hash() -> None:
    others = [
        dataclasses.replace(SPEC, num_layers=3, num_kv_heads=30),
        dataclasses.replace(SPEC, head_dim=128),
        dataclasses.replace(SPEC, dtype="float16"),
        dataclasses.replace(SPEC, block_size=32),
    ]
    assert len({SPEC.spec_hash, *(other.spec_hash for other in others)}) == 5
    assert dataclasses.replace(SPEC).spec_hash == SPEC.spec_hash
    assert len(SPEC.spec_hash) == 8


def test_the_hash_is_the_same_on_every_machine() -> None:
    """It is written to disk: a change makes every store unreadable."""
    assert SPEC.spec_hash.hex() == "6542674dc32ab85f"

import json
from pathlib import Path

import pytest

from streamkv.errors import StoreFormatError
from streamkv.tiers.spec import KVSpec
from streamkv.tiers.store_format import StoreFormat, StoreIdentity

SPEC = KVSpec(30, 3, 64, "bfloat16")
STORED = StoreFormat(SPEC, StoreIdentity("smollm2-135m", b"\x01" * 16), 1 << 30, "zstd")
PATH = Path("/data/store")


def test_a_header_comes_back() -> None:
    assert StoreFormat.unpack(STORED.pack(), PATH) == STORED


def test_the_same_weights_may_have_another_name_limit_or_codec() -> None:
    opened = StoreFormat(SPEC, StoreIdentity("my-copy", b"\x01" * 16), 1 << 20, "raw")
    STORED.check(opened, PATH)


def test_other_weights_are_refused_with_both_named() -> None:
    opened = StoreFormat(SPEC, StoreIdentity("smollm2-135m", b"\x02" * 16), 1 << 30, "zstd")
    with pytest.raises(StoreFormatError) as caught:
        STORED.check(opened, PATH)
    assert str(caught.value) == (
        "/data/store holds model smollm2-135m (weights 0101010101010101), this engine has "
        "smollm2-135m (weights 0202020202020202). Use another --store: sessions "
        "belong to the model that made them."
    )


def test_another_layout_is_refused_with_both_named() -> None:
    other = KVSpec(30, 3, 64, "float32")
    opened = StoreFormat(other, STORED.identity, 1 << 30, "zstd")
    with pytest.raises(StoreFormatError, match=r"holds KV layout .*bfloat16.*this engine.*float32"):
        STORED.check(opened, PATH)


def test_another_format_version_is_refused_with_both_named() -> None:
    fields = json.loads(STORED.pack())
    fields["version"] = 99
    with pytest.raises(StoreFormatError, match="holds format version 99, this engine has 1"):
        StoreFormat.unpack(json.dumps(fields).encode(), PATH)


@pytest.mark.parametrize(
    "packed", [None, b"", b"{", b"[]", b"7", b'{"version": 1}', b'{"version": 1, "spec": {"x": 1}}']
)
def test_what_is_no_header_is_no_store(packed: bytes | None) -> None:
    with pytest.raises(StoreFormatError, match="/data/store is not a streamkv store"):
        StoreFormat.unpack(packed, PATH)

"""The seam to the ssd: what the manager asks for is what the real store offers."""

import inspect

import pytest

from streamkv.tiers.ssd import SsdTier
from streamkv.tiers.store import Store


@pytest.mark.parametrize(
    "name",
    ["write", "sync", "contains", "read", "delete", "set_manifest", "manifest", "usage"],
)
def test_the_ssd_tier_offers_what_the_seam_asks_for(name: str) -> None:
    asked = list(inspect.signature(getattr(Store, name)).parameters)
    offered = list(inspect.signature(getattr(SsdTier, name)).parameters)
    assert offered == asked

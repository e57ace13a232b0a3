"""Host memory: lazily resident, exactly as large as asked for."""

import numpy as np
import pytest

from streamkv.errors import ConfigError
from streamkv.tiers.host_memory import anonymous_memory, blocks_of


def test_rows_cover_the_memory_without_a_copy() -> None:
    memory = anonymous_memory("cpu_bytes", 1000)
    rows = blocks_of(memory, 10, 100)
    assert rows.shape == (10, 100) and rows.dtype == np.uint8 and not rows.any()
    rows[9] = 7
    assert memory[899:901] == b"\x00\x07" and memory[999] == 7
    assert len(memory) == 1000


def test_zero_rows_are_allowed() -> None:
    assert blocks_of(anonymous_memory("cpu_bytes", 1), 0, 100).shape == (0, 100)


def test_too_much_is_refused_by_the_name_of_the_option() -> None:
    with pytest.raises(ConfigError, match=f"cpu_bytes={2**62}: the system refuses"):
        anonymous_memory("cpu_bytes", 2**62)

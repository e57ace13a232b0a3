"""Stores with something wrong in them."""

from pathlib import Path


def flip_block(store: Path, content: bytes) -> int:
    """Damage every record of a block in a store whose codec is `raw`; returns how many."""
    path = store / "blocks" / "data.mdb"
    data, count, start = bytearray(path.read_bytes()), 0, 0
    while (place := data.find(content, start)) >= 0:
        data[place + 5] ^= 0xFF
        count, start = count + 1, place + 1
    path.write_bytes(data)
    return count

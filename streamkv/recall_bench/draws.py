"""Seeded draws that are the same on every machine and in every order.

Invariant: a draw depends on what it is for and on nothing else, neither on earlier draws nor on the
version of Python, so that a run can be continued and every mode is asked the same.
"""

from hashlib import blake2b


def draw(bound: int, *purpose: object) -> int:
    """A whole number of [0, bound), evenly spread.

    Args:
        bound: at least 1.
        purpose: what it is for, such as seed, length, index and a word.
    """
    assert bound >= 1
    digest = blake2b(repr(purpose).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") * bound >> 128

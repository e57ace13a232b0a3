"""Noise as a pure function of (seed, token_index, token_id): Philox-4x32-10 and the Gumbel law.

Invariant: the noise of a token depends on nothing else, so a resumed, re-batched or re-ordered
session draws the same, and a kernel that computes the same integers draws the same. It knows
neither logits nor vocabularies.
"""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[int, int]
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """Philox-4x32-10 (Salmon et al., 2011) of broadcastable counters.

    Args:
        counter: four 32-bit words, each held in uint64.
        key: two 32-bit words.

    Returns:
        Four random 32-bit words, each held in uint64, of the counters' common shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 bits fit 64, so nothing overflows and numpy's uint64 is exact.
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = (second >> _HALF) ^ (c1 ^ np.uint64(k0))
        c2 = (first >> _HALF) ^ (c3 ^ np.uint64(k1))
        c1, c3 = second & _LOW, first & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_words(seed: int, token_index: int, token_ids: npt.NDArray[np.int64]) -> UInt64:
    """One 32-bit word for each token id (shape of `token_ids`), for one place of the stream.

    Counter: (token_id, low and high half of token_index, 0); key: low and high half of the seed.
    """
    zero = np.zeros(1, dtype=np.uint64)
    counter = (
        token_ids.astype(np.uint64),
        zero + np.uint64(token_index & 0xFFFFFFFF),
        zero + np.uint64(token_index >> 32),
        zero,
    )
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[0]


def gumbel(seed: int, token_index: int, token_ids: npt.NDArray[np.int64]) -> Floats:
    """Gumbel noise for each token id: the argmax of `log p + gumbel` is a draw from `p`."""
    return gumbel_of_words(random_words(seed, token_index, token_ids))


def gumbel_of_words(words: UInt64) -> Floats:
    """Gumbel noise of 32-bit words. The uniform is (word + 1/2) / 2^32: noise in [-3.13, 22.88]."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: Floats = -np.log(-np.log(uniform))
    return noise

import numpy as np
import pytest

from streamkv.noise import gumbel, gumbel_of_words, philox, random_words

VOCAB = np.arange(50_000, dtype=np.int64)


def words_of(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    return [int(word[0]) for word in philox((c0, c1, c2, c3), key)]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: list[int]
) -> None:
    assert words_of(counter, key) == expected


def test_words_are_the_first_of_counter_token_then_index_under_the_seed() -> None:
    seed, token_index = 0x0123456789ABCDEF, 0x1_0000_0007
    word = random_words(seed, token_index, np.array([42]))[0]
    assert int(word) == words_of((42, 7, 1, 0), (0x89ABCDEF, 0x01234567))[0]


def test_words_of_a_subset_are_those_of_the_whole() -> None:
    ids = np.array([49_999, 3, 17, 3])
    assert np.array_equal(random_words(5, 9, ids), random_words(5, 9, VOCAB)[ids])


def test_noise_has_literal_values() -> None:
    ids = np.array([0, 1, 49_151])
    assert [int(w) for w in random_words(1234, 77, ids)] == [666880262, 1017479867, 739818997]
    assert gumbel(1234, 77, ids) == pytest.approx(
        [-0.621967297866337, -0.3647230333621294, -0.5646281545243562], abs=1e-12
    )


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_words_are_uniform(seed: int) -> None:
    counts = np.bincount((random_words(seed, 3, VOCAB) >> np.uint64(24)).astype(int), minlength=256)
    # 255 degrees of freedom: the 0.1 % and 99.9 % points are 190 and 331.
    assert 190 < chi_square(counts, np.full(256, VOCAB.size / 256)) < 331


@pytest.mark.parametrize(("seed", "token_index"), [(8, 4), (7, 5), (7, 4 + 2**32), (7 + 2**32, 4)])
def test_words_of_another_seed_or_place_are_independent(seed: int, token_index: int) -> None:
    first = (random_words(7, 4, VOCAB) >> np.uint64(28)).astype(int)
    other = (random_words(seed, token_index, VOCAB) >> np.uint64(28)).astype(int)
    counts = np.bincount(first * 16 + other, minlength=256)
    assert 190 < chi_square(counts, np.full(256, VOCAB.size / 256)) < 331


def test_neighbouring_tokens_and_indices_are_uncorrelated() -> None:
    grid = np.stack([random_words(11, t, VOCAB[:5000]).astype(np.float64) for t in range(40)])
    grid = (grid - grid.mean()) / grid.std()
    # 200,000 products: one standard deviation of their mean is 0.0022.
    assert abs((grid[:, 1:] * grid[:, :-1]).mean()) < 0.008
    assert abs((grid[1:] * grid[:-1]).mean()) < 0.008


def test_gumbel_noise_follows_the_gumbel_law() -> None:
    noise = gumbel(3, 5, VOCAB)
    # Probability integral transform: exp(-exp(-g)) is uniform.
    counts = np.histogram(np.exp(-np.exp(-noise)), bins=100, range=(0.0, 1.0))[0]
    assert 61 < chi_square(counts, np.full(100, VOCAB.size / 100)) < 149
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)


def test_the_extreme_words_give_finite_noise() -> None:
    low, high = gumbel_of_words(np.array([0, 2**32 - 1], dtype=np.uint64))
    assert low == pytest.approx(-3.13, abs=0.005)
    assert high == pytest.approx(22.87, abs=0.01)

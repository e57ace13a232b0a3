"""Histograms and the look at a batch, against counting one by one."""

from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from streamkv.batch import Batch, SequenceStep, Wanted
from streamkv.histogram import Histogram
from streamkv.instruments import COUNTED, HISTOGRAMS, Instruments
from streamkv.sequence import Sequence
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

BOUNDS = (0.5, 1.0, 4.0)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 10.0))


@given(st.lists(VALUES))
def test_a_histogram_is_what_counting_one_by_one_finds(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    seen = histogram.observed()
    up_to = [sum(value <= bound for value in values) for bound in BOUNDS]
    assert seen.up_to == [*up_to, len(values)]
    assert (seen.num_values, seen.total) == (len(values), sum(values, 0.0))


def test_no_observation_of_several_threads_is_lost() -> None:
    histogram = Histogram(BOUNDS)

    def observe(value: float) -> None:
        for _ in range(5000):
            histogram.observe(value)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(observe, (0.25, 0.75, 2.0, 8.0)))
    seen = histogram.observed()
    assert seen.counts == (5000,) * 4 and seen.total == 5000 * 11.0


def test_everything_is_there_from_the_start() -> None:
    instruments = Instruments()
    assert instruments.counted.snapshot() == dict.fromkeys(COUNTED, 0)
    assert {name: seen.num_values for name, seen in instruments.histograms().items()} == (
        dict.fromkeys(HISTOGRAMS, 0)
    )
    assert all(bisect_left(seen.bounds, 0) == 0 for seen in instruments.histograms().values())


PARTS = st.tuples(
    st.integers(0, 40),  # tokens that are computed
    st.integers(0, 40),  # tokens that once were
    st.integers(1, 20),  # tokens of the part
    st.sampled_from(Wanted),
)


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_tokens_of_a_step_are_told_apart_one_by_one(
    parts: list[tuple[int, int, int, Wanted]],
) -> None:
    instruments, steps = Instruments(), []
    wanted = dict.fromkeys(("decode_tokens", "prefill_tokens", "recomputed_tokens"), 0)
    for number, (start, was_computed_until, query_len, kind) in enumerate(parts):
        sequence = Sequence(number, Window(64, ()), 16, BlockKey(b"r" * 16))
        sequence.was_computed_until = was_computed_until
        steps.append(SequenceStep(sequence, query_len, kind, start=start))
        for index in range(start, start + query_len):
            if index < was_computed_until:
                wanted["recomputed_tokens"] += 1
            elif query_len == 1 and kind is Wanted.LOGITS:
                wanted["decode_tokens"] += 1
            else:
                wanted["prefill_tokens"] += 1
    batch = Batch(tuple(steps))
    assert instruments.launched(batch) == batch.num_tokens
    counted = instruments.counted.snapshot()
    assert {name: counted[name] for name in wanted} == wanted and counted["steps"] == 1
    assert instruments.batch_size.observed().total == len(parts)

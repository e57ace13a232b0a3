"""Whose turn it is, with sequences that compute nothing."""

from streamkv.batch import Wanted
from streamkv.scheduler import Scheduler, Work
from streamkv.sequence import Jump, Sequence
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

ROOT = BlockKey(b"r" * 16)


def sequence(seq_id: int, num_tokens: int) -> Sequence:
    made = Sequence(seq_id, Window(64, ((0, 4),)), 64, ROOT)
    made.append(list(range(num_tokens)))
    return made


def run(scheduler: Scheduler) -> list[tuple[int, int, Wanted]]:
    """Carry out everything; (sequence, tokens, wanted) of each step."""
    steps = []
    while taken := scheduler.schedule():
        [(work, step)] = taken
        step.sequence.advance(step.query_len)
        scheduler.postprocess(work, step.query_len)
        steps.append((step.sequence.seq_id, step.query_len, step.wanted))
    return steps


def test_a_long_feed_and_a_decode_take_turns() -> None:
    scheduler = Scheduler(prefill_chunk=100)
    scheduler.add(Work(sequence(1, 250), 250))
    scheduler.add(Work(sequence(2, 1), 1, Wanted.LOGITS))
    assert run(scheduler) == [
        (1, 100, Wanted.NOTHING),
        (2, 1, Wanted.LOGITS),
        (1, 100, Wanted.NOTHING),
        (1, 50, Wanted.NOTHING),
    ]


def test_chunks_end_at_absolute_multiples() -> None:
    scheduler = Scheduler(prefill_chunk=100)
    one = sequence(1, 270)
    one.advance(30)
    scheduler.add(Work(one, 240))
    assert [length for _, length, _ in run(scheduler)] == [70, 100, 70]


def test_scores_are_wanted_from_every_step_and_logits_from_the_last() -> None:
    scheduler = Scheduler(prefill_chunk=64)
    scheduler.add(Work(sequence(1, 128), 128, Wanted.SCORES))
    scheduler.add(Work(sequence(2, 128), 128, Wanted.LOGITS))
    assert [(seq_id, wanted) for seq_id, _, wanted in run(scheduler)] == [
        (1, Wanted.SCORES),
        (2, Wanted.NOTHING),
        (1, Wanted.SCORES),
        (2, Wanted.LOGITS),
    ]


def test_a_step_ends_where_the_window_changes() -> None:
    scheduler = Scheduler(prefill_chunk=512)
    one = sequence(1, 100)
    one.change_window(37, one.window.with_sinks(37, 45))
    scheduler.add(Work(one, 100))
    assert [length for _, length, _ in run(scheduler)] == [37, 63]
    assert one.window.sink_ranges == ((0, 4), (37, 45))


def test_a_jump_leaves_tokens_out() -> None:
    scheduler = Scheduler(prefill_chunk=512)
    one = sequence(1, 0)
    one.restart_at(0, ROOT, list(range(64 + 30)), Jump(64, 640, BlockKey(b"k" * 16)))
    assert one.num_tokens == 670
    scheduler.add(Work(one, 94))
    assert [length for _, length, _ in run(scheduler)] == [64, 30]
    assert (one.num_computed, one.chain_key) == (670, b"k" * 16)


def test_a_work_item_can_be_taken_back() -> None:
    scheduler = Scheduler(prefill_chunk=8)
    work = Work(sequence(1, 20), 20)
    scheduler.add(work)
    scheduler.remove(work)
    assert scheduler.schedule() == [] and len(scheduler) == 0


def test_a_stream_one_token_behind_its_chunks_takes_no_step_for_that_token() -> None:
    """Fed by whole chunks, the last token of each is computed with the next one."""
    sequence = Sequence(1, Window(64), 64, BlockKey(b"r" * 16))
    scheduler = Scheduler(128)
    sizes = []
    for _ in range(3):
        sequence.append(range(128))
        work = Work(sequence, sequence.num_pending - 1)
        scheduler.add(work)
        while taken := scheduler.schedule():
            [(_, step)] = taken
            sizes.append(step.query_len)
            sequence.advance(step.query_len)
            scheduler.postprocess(work, step.query_len)
    assert sizes == [127, 128, 128]


def take(scheduler: Scheduler, max_sequences: int) -> list[tuple[int, int]]:
    """(sequence, tokens) of each part of the next step, which is carried out."""
    taken = scheduler.schedule(max_sequences)
    for work, step in taken:
        step.sequence.advance(step.query_len)
        scheduler.postprocess(work, step.query_len)
    return [(step.sequence.seq_id, step.query_len) for _, step in taken]


def test_a_step_takes_rows_of_one_token_and_one_longer_part_in_the_order_of_the_queue() -> None:
    scheduler = Scheduler(prefill_chunk=10)
    for seq_id, num_tokens in ((1, 1), (2, 25), (3, 1), (4, 15), (5, 1)):
        scheduler.add(Work(sequence(seq_id, num_tokens), num_tokens))
    assert take(scheduler, 8) == [(1, 1), (2, 10), (3, 1), (5, 1)]
    # The part that had to wait comes before the rest of the one that was taken.
    assert take(scheduler, 8) == [(4, 10)]
    assert take(scheduler, 8) == [(2, 10)]
    assert take(scheduler, 8) == [(4, 5)]
    assert take(scheduler, 8) == [(2, 5)]
    assert take(scheduler, 8) == [] and len(scheduler) == 0


def test_a_step_takes_no_more_sequences_than_it_has_room_for() -> None:
    scheduler = Scheduler(prefill_chunk=10)
    for seq_id in range(1, 8):
        scheduler.add(Work(sequence(seq_id, 1), 1))
    assert take(scheduler, 3) == [(1, 1), (2, 1), (3, 1)]
    scheduler.add(Work(sequence(8, 1), 1))
    assert take(scheduler, 3) == [(4, 1), (5, 1), (6, 1)]
    assert take(scheduler, 3) == [(7, 1), (8, 1)]


def test_nobody_starves_behind_long_feeds_nor_behind_many_tokens() -> None:
    """Whoever comes back at once goes to the end of the queue."""
    scheduler = Scheduler(prefill_chunk=4)
    feeds = {seq_id: sequence(seq_id, 400) for seq_id in (1, 2, 3)}
    talks = {seq_id: sequence(seq_id, 400) for seq_id in range(4, 12)}
    for feed in feeds.values():
        scheduler.add(Work(feed, 400))
    for talk in talks.values():
        scheduler.add(Work(talk, 1))
    for _ in range(60):
        for seq_id, _ in take(scheduler, 4):
            if seq_id in talks:
                scheduler.add(Work(talks[seq_id], 1))
    for group in (feeds, talks):
        computed = [made.num_computed for made in group.values()]
        assert min(computed) > 15
        assert max(computed) - min(computed) <= 4


def test_a_work_item_that_was_taken_out_cannot_be_taken_back() -> None:
    scheduler = Scheduler(prefill_chunk=8)
    work = Work(sequence(1, 20), 20)
    scheduler.add(work)
    scheduler.schedule()
    scheduler.remove(work)
    assert not scheduler.postprocess(work, 8) and len(scheduler) == 1
    assert scheduler.drain() == [work] and len(scheduler) == 0
    scheduler.add(work)

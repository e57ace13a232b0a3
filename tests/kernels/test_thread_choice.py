"""Which number of threads is taken, with made-up times."""

from streamkv.kernels.thread_choice import PROBE_EVERY, ThreadChoice


def run(choice: ThreadChoice, times: dict[int, float], num_steps: int) -> list[int]:
    counts = []
    for _ in range(num_steps):
        counts.append(choice.next())
        choice.took(counts[-1], times[counts[-1]])
    return counts


def test_on_a_quiet_machine_all_threads_are_taken() -> None:
    counts = run(ThreadChoice(2), {2: 0.012, 1: 0.024}, 200)
    assert counts.count(1) <= 2 + 200 // PROBE_EVERY


def test_beside_a_busy_process_one_thread_is_taken_and_later_all_again() -> None:
    choice = ThreadChoice(4)
    run(choice, {4: 0.012, 1: 0.024}, 50)
    busy = run(choice, {4: 0.9, 1: 0.024}, 100)
    assert busy.count(4) <= 2 + 100 // PROBE_EVERY
    assert busy[-5:] == [1] * 5
    quiet = run(choice, {4: 0.012, 1: 0.024}, 20 * PROBE_EVERY)
    assert quiet[-5:] == [4] * 5


def test_one_thread_leaves_no_choice() -> None:
    assert set(run(ThreadChoice(1), {1: 0.1}, 70)) == {1}

"""Times of calls on a GPU: medians, after the clocks have risen."""

import time
from collections.abc import Callable, Sequence

import torch
from report import median

Call = Callable[[], object]

WARM_S = 0.4
"""Replays before the clock starts. What ran before (a check, random numbers) leaves the clocks low
for some tenths of a second: timed at once, a call took 0.556 ms, and 0.489 ever after."""


def graph_ms(calls: Sequence[Call], repeats: int = 40) -> float:
    """Median milliseconds of one of the calls, all captured in one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _median_ms(graph.replay, len(calls), repeats)


def round_ms(calls: Sequence[Call], repeats: int = 15) -> float:
    """Median milliseconds of one of the calls, launched one after another."""

    def run() -> None:
        for call in calls:
            call()

    return _median_ms(run, len(calls), repeats)


def _median_ms(run: Call, num_calls: int, repeats: int) -> float:
    warm_until = time.monotonic() + WARM_S
    while time.monotonic() < warm_until:
        run()
        torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / num_calls)
    return median(found)

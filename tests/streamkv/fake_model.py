"""A small language model that no mistake leaves alone, and what it makes of a stream.

It has two layers: what a token leaves in a layer, and what follows it, are hashes of everything
that it sees there and of how far away it is. So KV that is stale, in another place, of another
token or seen from elsewhere changes all that comes after.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkv.sampling_params import SamplingParams
from streamkv.window import Window

NUM_TOKENS = 300
"""Ids that the model answers with: from 3 on, so that none is special."""

Ints = npt.NDArray[np.int64]


def mix(first: Any, second: Any, salt: int) -> Any:
    """20 bits of two numbers, elementwise; float32 holds them exactly."""
    with np.errstate(over="ignore"):
        x = np.asarray(first).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = x + np.asarray(second).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        x = (x ^ (x >> np.uint64(29)) ^ np.uint64(salt)) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x >> np.uint64(40)) & np.uint64(0xFFFFF)).astype(np.int64)


def answer(seen: int, params: SamplingParams | None) -> int:
    """The token after one that saw `seen` in the last layer."""
    seed = 0 if params is None or params.is_greedy else (params.seed or 0)
    return 3 + int(mix(seen, seed, 5)) % NUM_TOKENS


def logprob(seen: int, token_id: int) -> float:
    """That of a token after one that saw `seen` in the last layer."""
    return -float(mix(seen, token_id, 6)) / 2**16


def is_drawn(params: SamplingParams | None) -> bool:
    """Whether the device chooses the token itself."""
    return params is not None and params.logprobs is None and params.repetition_penalty == 1.0


def visible(window: Window, query: Ints, index: Ints) -> npt.NDArray[np.bool_]:
    """Whether each query [n] sees each token [m], by their indices in the stream."""
    is_sink = np.zeros(len(index), dtype=bool)
    for start, end in window.sink_ranges:
        is_sink |= (start <= index) & (index < end)
    query, index = query[:, None], index[None]
    return (index <= query) & ((index > query - window.window_size) | is_sink)


def attend(
    layer: int, values: Ints, index: Ints, distance: Ints, mask: npt.NDArray[np.bool_]
) -> Ints:
    """What each query makes of the tokens that it sees [n], by their values and indices [m]."""
    seen: Ints = (mask * mix(mix(values, index, 2 + 2 * layer), distance, 7)).sum(axis=1)
    return seen


class Oracle:
    """What the model makes of a stream, from its ids alone.

    Args:
        window: in force at the start.

    Attributes:
        ids: of the stream.
    """

    def __init__(self, window: Window) -> None:
        self.ids: list[int] = []
        self._windows = [(0, window)]
        self._layers: list[list[int]] = [[], []]

    def keep(self, ids: list[int]) -> None:
        """Add tokens that every later one sees."""
        start = len(self.ids)
        self.change_window(start, self._windows[-1][1].with_sinks(start, start + len(ids)))
        self.extend(ids)

    def change_window(self, token_index: int, window: Window) -> None:
        """Compute the tokens from `token_index` on with `window`."""
        self._windows.append((token_index, window))

    def extend(self, ids: list[int]) -> None:
        """Add tokens."""
        for token_id in ids:
            index = len(self.ids)
            self.ids.append(token_id)
            self._layers[0].append(int(mix(token_id, index, 1)))
            self._layers[1].append(int(mix(self._seen(0, index), index, 3)))

    def give_up(self) -> None:
        """Take the newest token back."""
        self.ids.pop()
        for layer in self._layers:
            layer.pop()

    def token(self, params: SamplingParams | None) -> int:
        """The token after the last one."""
        return answer(self._seen(1, len(self.ids) - 1), params)

    def logprob(self, index: int) -> float:
        """That of a token after those before it."""
        return logprob(self._seen(1, index - 1), self.ids[index])

    def _seen(self, layer: int, index: int) -> int:
        window = [window for start, window in self._windows if start <= index][-1]
        where, values = np.arange(index + 1), np.array(self._layers[layer][: index + 1])
        distance = index - where
        for start, end in window.sink_ranges:
            for sink in range(start, min(end, index + 1)):
                distance[sink] = min(index - sink, window.sink_cap(sink))
        mask = visible(window, where[-1:], where)
        return int(attend(layer, values, where, distance[None], mask)[0])

"""Sampling on a GPU, from options to the columns that the kernels read.

Invariant: the token is the one that `streamkv.sampling.sample` chooses from the same logits, but
for near ties of float64. Nothing here waits for what a step computes: options travel to the device
in one copy from pinned memory, and damaged logits are reported by `GpuSampler.check` once the host
has read `out_info`. It knows neither sessions nor the model.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamkv.kernels import gpu_sample
from streamkv.kernels.gpu_sample import GREEDY, NOISY, PADDING, SampleRows
from streamkv.sampling import check_highest, drawn_seed
from streamkv.sampling_params import SamplingParams

_KIND, _SEED, _INDEX, _TEMPERATURE, _LOG_MIN_P, _EDGE_LOGIT, _EDGE_ID = range(7)
_CUT_ROW, _TOP_K, _TOP_P = 7, 8, 9
_NUM_COLUMNS = 10
_FLOATS = (_TEMPERATURE, _LOG_MIN_P, _EDGE_LOGIT, _TOP_P)
_NUM_BUFFERS = 2


def samples_on_gpu(params: SamplingParams) -> bool:
    """Whether the GPU can choose: log-probabilities and a repetition penalty stay on the CPU."""
    return params.logprobs is None and params.repetition_penalty == 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to choose.

    Attributes:
        params: that `samples_on_gpu`, with a seed (`resolve_seed`) unless greedy.
        token_index: index in the stream that the chosen token will have.
    """

    params: SamplingParams
    token_index: int


@dataclass(frozen=True, slots=True)
class Staged:
    """Draws whose options are on their way to the device.

    Attributes:
        serial: which call of `stage` it is from; only the newest can be sampled.
        num_draws: rows of logits that they take, from row 0 on.
        num_cut: how many of them have a top_k or top_p.
    """

    serial: int
    num_draws: int
    num_cut: int


class GpuSampler:
    """Chooses the tokens of a step's rows of logits on their device.

    `stage` and `sample` belong on one stream: its order keeps the options of a step on the device
    until that step has read them. The device side has fixed addresses, as a captured graph needs.

    Args:
        vocab_size: tokens of a row.
        max_rows: most rows of a step, padding included.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._scratch = gpu_sample.sample_scratch(vocab_size, max_rows, device)
        self._columns = torch.zeros(_NUM_COLUMNS, max_rows, dtype=torch.int64, device=device)
        is_cuda = self._columns.is_cuda
        self._buffers = deque(_HostBuffer(max_rows, is_cuda) for _ in range(_NUM_BUFFERS))
        self._serial = 0
        columns: list[Tensor] = list(self._columns)
        for index in _FLOATS:
            columns[index] = columns[index].view(torch.float64)
        self._rows = SampleRows(*columns[:_CUT_ROW])
        self._cuts = columns[_CUT_ROW:]

    @torch.inference_mode()
    def stage(self, draws: Sequence[Draw]) -> Staged:
        """Send the options of a step to the device, for the `sample` that comes next.

        It waits only if the copy of the step before the last is still pending.

        Args:
            draws: at most `max_rows`; draw i is for row i of the logits.

        Raises:
            ConfigError: a draw takes noise and has no seed.
        """
        params = [draw.params for draw in draws]
        buffer = self._buffers[0]
        if buffer.params == params:
            # As the step before the last: sessions go on with the same options.
            buffer.write_indices([draw.token_index for draw in draws])
        else:
            cut = [row for row, each in enumerate(params) if self._is_cut(each)]
            # Refused before a buffer is written, so that a bad draw leaves nothing half written.
            columns = [*_row_columns(draws, self._vocab_size), *self._cut_columns(draws, cut)]
            buffer.write(columns, params, len(cut))
        self._buffers.rotate(-1)
        buffer.send(self._columns)
        self._serial += 1
        return Staged(self._serial, len(draws), buffer.num_cut)

    @torch.inference_mode()
    def sample(self, logits: Tensor, staged: Staged, out_ids: Tensor, out_info: Tensor) -> None:
        """Choose the token of each draw; nothing waits for the device.

        Args:
            logits: [R, vocab_size], float16, bfloat16 or float32; R is at least the number of
                draws, and what is beyond them is padding.
            staged: of the newest `stage`.
            out_ids: int64 [R], on the device, written for the drawn rows.
            out_info: float32 [R, 2], on the device, written for the drawn rows: the highest raw
                logit minus the second, and the highest, which is NaN if any logit of the row is.

        Raises:
            ConfigError: a shape, stride or type that the kernels are not made for.
        """
        gpu_sample.find_highest(logits, self._rows, self._scratch, out_ids, out_info)
        if not self.choose_cut(logits, staged, out_ids, out_info):
            gpu_sample.draw(logits, self._rows, self._scratch, out_ids, out_info)

    @torch.inference_mode()
    def choose(self, logits: Tensor, out_ids: Tensor, out_info: Tensor) -> None:
        """What `sample` does for rows without top_k and top_p: of shape alone, for a graph."""
        gpu_sample.find_highest(logits, self._rows, self._scratch, out_ids, out_info)
        gpu_sample.draw(logits, self._rows, self._scratch, out_ids, out_info)

    @torch.inference_mode()
    def choose_cut(self, logits: Tensor, staged: Staged, out_ids: Tensor, out_info: Tensor) -> bool:
        """After `choose`: choose again where there is a top_k or top_p; whether there is."""
        assert staged.serial == self._serial, (staged.serial, self._serial)
        assert staged.num_draws <= logits.shape[0], (staged.num_draws, logits.shape)
        if staged.num_cut:
            cut_rows, top_ks, top_ps = (column[: staged.num_cut] for column in self._cuts)
            gpu_sample.find_edges(logits, self._rows, cut_rows, top_ks, top_ps)
            gpu_sample.draw(logits, self._rows, self._scratch, out_ids, out_info)
        return staged.num_cut > 0

    @staticmethod
    def check(highest: float, token_index: int) -> None:
        """Raise the `ModelError` of `streamkv.sampling` if `out_info` tells of damaged logits."""
        check_highest(highest, token_index)

    def _is_cut(self, params: SamplingParams) -> bool:
        is_cut = 0 < params.top_k < self._vocab_size or params.top_p < 1.0
        return is_cut and not params.is_greedy

    def _cut_columns(self, draws: Sequence[Draw], cut: list[int]) -> list[list[int] | list[float]]:
        params, most = [draws[row].params for row in cut], self._vocab_size
        top_ks = [min(each.top_k, most) or most for each in params]
        return [cut, top_ks, [each.top_p for each in params]]


class _HostBuffer:
    """One set of columns in host memory, not rewritten while a copy from it is pending.

    Attributes:
        params: options of the rows that it has.
        num_cut: how many of them have a top_k or top_p.
    """

    def __init__(self, max_rows: int, is_cuda: bool) -> None:
        shape = (_NUM_COLUMNS, max_rows)
        self._columns = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        # torch has no type for it.
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        words: npt.NDArray[np.int64] = self._columns.numpy()
        self._views = [
            row.view(np.float64) if index in _FLOATS else row for index, row in enumerate(words)
        ]

        self.params: list[SamplingParams] = []
        self.num_cut = 0

    def write(
        self,
        columns: Iterable[list[int] | list[float]],
        params: list[SamplingParams],
        num_cut: int,
    ) -> None:
        """Write each column from its first row on; rows beyond the draws become padding."""
        self._wait()
        # Whatever goes wrong on the way, nobody takes what it has for these.
        self.params = []
        self._views[_KIND].fill(PADDING)
        for view, column in zip(self._views, columns, strict=True):
            view[: len(column)] = column
        self.params, self.num_cut = params, num_cut

    def write_indices(self, token_indices: list[int]) -> None:
        """Write where the draws are in their streams; all else stays as it was."""
        self._wait()
        self._views[_INDEX][: len(token_indices)] = token_indices

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, target: Tensor) -> None:
        """Copy to the device, in the order of its current stream."""
        target.copy_(self._columns, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _row_columns(draws: Sequence[Draw], vocab_size: int) -> list[list[int] | list[float]]:
    """Columns of `SampleRows`, as plain numbers; every token is kept until an edge is found."""
    assert all(samples_on_gpu(draw.params) for draw in draws)
    params = [draw.params for draw in draws]
    return [
        [GREEDY if each.is_greedy else NOISY for each in params],
        [0 if each.is_greedy else _as_signed(drawn_seed(each)) for each in params],
        [draw.token_index for draw in draws],
        [each.temperature for each in params],
        [float(np.log(each.min_p)) if each.min_p > 0.0 else -np.inf for each in params],
        [-np.inf] * len(draws),
        [vocab_size] * len(draws),
    ]


def _as_signed(word: int) -> int:
    """The 64 bits of an unsigned word as the signed one that has them."""
    return word - 2**64 if word >= 2**63 else word

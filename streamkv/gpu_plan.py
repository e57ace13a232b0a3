"""How a GPU's memory is divided up: weights, graphs, working memory, and the gpu pool.

Pure arithmetic over sizes; nothing is allocated or measured here. Invariant: a plan that fits never
takes more than is free. The formulas, for steps of T = prefill_chunk + max_sessions tokens over
elements of e bytes, hidden states of h and layers of at most w elements per token:

    activations   T * (e * (2 h + 4 w) + 12 h)     residual and normed; gate, up, their activation
                                                   and product; three float32 copies in a norm
    logits        R * vocabulary * e               of scoring, R = T rows or 256 MiB of them, and
                  max_sessions * vocabulary * (e + 8)    of sampling, where a row may be sorted
    copies        e * (T * (4 h + 4 k) + 4 W k)    of a chunk and a window W, keys of k elements,
                                                   turned to one anchor, and what attends to
                                                   them; only where chunk and window are long
    graphs        512 MiB                          CUDA graphs, compiled kernels, workspaces of
                                                   cuBLAS and of attention: an allowance
    recall        max_sessions * P * l * h' * e    the newest queries of each session, of l layers
                  + 2 * 128 MiB                    with P places; keys and scores of a choice; only
                                                   with `recall_blocks`
    digests       `digest_bytes`, or               what is above it lies in host memory; 2,048
                  max_sessions * 2048 * 16 s d     blocks of each session, 8 heads of d elements,
                                                   s tokens; only with `recall_blocks`
    gpu pool      (blocks + 1) * block_bytes       one is the guard block

Nothing of this grows with a stream. The CUDA context is not part of it: what is free is measured
when there is one.
"""

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamkv.config import EngineConfig, format_size
from streamkv.digest_pages import page_bytes
from streamkv.errors import ConfigError
from streamkv.kernels.recall_limits import SCRATCH_BYTES
from streamkv.kernels.window_limits import MIN_QUERIES, MIN_WINDOW
from streamkv.query_ring import NUM_PLACES
from streamkv.sizing import blocks_of_session, digest_budget, digest_bytes, num_gpu_blocks
from streamkv.tiers.spec import BLOCK_SIZE, DTYPE_BYTES, KVSpec

GRAPH_BYTES = 512 << 20
"""Allowance for CUDA graphs, compiled kernels and the workspaces of libraries."""

LOGIT_BYTES = 256 << 20
"""Bytes of logits that scoring makes at once."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU as it would be without our model.

    Attributes:
        total_bytes: all of it.
        free_bytes: free, the CUDA context of this process already taken off.
    """

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a plan must know of a model.

    Attributes:
        weight_bytes: all weights, in the type that they are computed in.
        hidden_size: elements of a hidden state.
        layer_width: most elements that a layer makes of one token at once.
        vocab_size: logits of a token.
        query_width: elements of all queries of a token in one layer.
    """

    weight_bytes: int
    hidden_size: int
    layer_width: int
    vocab_size: int
    query_width: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], spec: KVSpec, weight_bytes: int) -> "ModelSize":
        """By the config of a model of transformers.

        Raises:
            KeyError: it states no `hidden_size`, `vocab_size` or `num_attention_heads`.
        """
        hidden_size = config["hidden_size"]
        widths = [config.get("intermediate_size"), config.get("moe_intermediate_size")]
        width = max((width for width in widths if isinstance(width, int)), default=4 * hidden_size)
        num_experts = config.get("num_experts_per_tok") or 1
        heads = config["num_attention_heads"] + 2 * spec.num_kv_heads
        layer_width = max(width * num_experts, heads * spec.head_dim)
        query_width = config["num_attention_heads"] * spec.head_dim
        return cls(weight_bytes, hidden_size, layer_width, config["vocab_size"], query_width)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The parts of a GPU's memory, in bytes.

    Attributes:
        total_bytes, free_bytes: as measured, without the weights.
        weight_bytes, graph_bytes, working_bytes, recall_bytes, digest_bytes: see the module.
        pool_bytes: the gpu pool, the guard block included.
        num_blocks: blocks of the gpu pool that can be allocated.
        max_sessions: the largest `max_sessions` that fits; 0: not even one.
        max_window: the largest `window_size` that fits one session, at most the one asked for.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    graph_bytes: int
    working_bytes: int
    pool_bytes: int
    num_blocks: int
    max_sessions: int
    max_window: int
    recall_bytes: int = 0
    digest_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """What all but the pool leave; negative if they do not fit themselves."""
        taken = self.weight_bytes + self.graph_bytes + self.working_bytes
        return self.free_bytes - taken - self.recall_bytes - self.digest_bytes

    @property
    def spare_bytes(self) -> int:
        """Free after all of it; negative if it does not fit."""
        return self.room_bytes - self.pool_bytes

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it."""
        return self.spare_bytes >= 0


def plan_gpu(memory: DeviceMemory, model: ModelSize, spec: KVSpec, config: EngineConfig) -> GpuPlan:
    """Divide a GPU's memory up as `config` wants it, whether it fits or not.

    Raises:
        ConfigError: `gpu_bytes` has no room for one session, or `digest_bytes` none for a page.
    """

    def fits(wanted: EngineConfig) -> bool:
        needed = _pool_bytes(spec, wanted) + _working_bytes(model, spec, wanted)
        needed += recall_bytes(model, spec, wanted) + digest_budget(wanted, spec)
        return model.weight_bytes + GRAPH_BYTES + needed <= memory.free_bytes

    one = dataclasses.replace(config, gpu_bytes=None, max_sessions=1)
    sessions = range(1, max(memory.free_bytes, 0) // _pool_bytes(spec, one) + 2)
    # By whole blocks; where the pool is given, the window asked for may fit though it is none.
    windows = range(spec.block_size, config.window_size + 1, spec.block_size)
    return GpuPlan(
        memory.total_bytes,
        memory.free_bytes,
        model.weight_bytes,
        GRAPH_BYTES,
        _working_bytes(model, spec, config),
        _pool_bytes(spec, config),
        num_gpu_blocks(config, spec),
        _largest(sessions, lambda number: fits(dataclasses.replace(one, max_sessions=number))),
        _largest(windows, lambda size: fits(with_window(one, size))),
        recall_bytes(model, spec, config),
        digest_budget(config, spec),
    )


def with_window(config: EngineConfig, window_size: int) -> EngineConfig:
    """The same with another window, and with a stride that it has room for."""
    least = 3 * BLOCK_SIZE
    if config.recall_blocks > 0 and window_size < least:
        window_size = least
    return dataclasses.replace(config, window_size=window_size, recall_stride=None)


def recall_bytes(model: ModelSize, spec: KVSpec, config: EngineConfig) -> int:
    """What recall needs besides digests and the blocks that it brings back."""
    if config.recall_blocks == 0:
        return 0
    element = DTYPE_BYTES[spec.dtype]
    ring = NUM_PLACES * spec.num_layers * model.query_width * element
    return config.max_sessions * ring + 2 * SCRATCH_BYTES


def require_room(plan: GpuPlan, spec: KVSpec, config: EngineConfig) -> None:
    """Raise if a plan does not fit.

    Raises:
        ConfigError: names `digest_bytes`, `gpu_bytes`, `max_sessions`, `window_size` or `device`,
            whichever helps; what there is; and what would fit.
    """
    if plan.fits:
        return
    digests = f", digests ({format_size(plan.digest_bytes)})" if plan.digest_bytes else ""
    problem = (
        f"the GPU has {format_size(plan.free_bytes)} of {format_size(plan.total_bytes)} free; "
        f"weights ({format_size(plan.weight_bytes)}), graphs ({format_size(plan.graph_bytes)})"
        f"{digests} and "
        f"working memory ({format_size(plan.working_bytes + plan.recall_bytes)}) leave "
        f"{format_size(max(plan.room_bytes, 0))} for the gpu pool, which needs "
        f"{format_size(plan.pool_bytes)}"
    )
    room = room_for_digests(plan, spec)
    if config.digest_bytes is not None and plan.digest_bytes and room is not None:
        remedy = f'Use at most "{room >> 20}MiB": the rest of the digests lies in host memory.'
        raise ConfigError("digest_bytes", config.digest_bytes, problem, remedy)
    smallest = blocks_of_session(config, spec, config.num_sink_tokens, config.window_size)
    remedies = []
    if config.gpu_bytes is not None and plan.room_bytes >= (smallest + 1) * spec.block_bytes:
        remedies.append(f'Use at most "{plan.room_bytes - spec.block_bytes >> 20}MiB".')
    if config.gpu_bytes is not None and plan.max_sessions > 0:
        remedies.append(f"Without it up to max_sessions={plan.max_sessions} fits.")
    if remedies:
        raise ConfigError("gpu_bytes", config.gpu_bytes, problem, " ".join(remedies))
    if plan.max_sessions > 0:
        remedy = f"Use at most max_sessions={plan.max_sessions}, or a smaller window_size."
        raise ConfigError("max_sessions", config.max_sessions, problem, remedy)
    if plan.max_window > 0:
        remedy = f"Use at most {plan.max_window} with max_sessions=1: no session of this one fits."
        raise ConfigError("window_size", config.window_size, problem, remedy)
    remedy = 'No session fits: free memory of the GPU, or use a smaller model or device="cpu".'
    raise ConfigError("device", "cuda", problem, remedy)


def room_for_digests(plan: GpuPlan, spec: KVSpec) -> int | None:
    """The largest `digest_bytes` with which a plan fits; `None`: not even with 0."""
    most = plan.digest_bytes + plan.spare_bytes
    if most < 0:
        return None
    return most if most >= page_bytes(0, digest_bytes(spec)) else 0


def _pool_bytes(spec: KVSpec, config: EngineConfig) -> int:
    return (num_gpu_blocks(config, spec) + 1) * spec.block_bytes


def _working_bytes(model: ModelSize, spec: KVSpec, config: EngineConfig) -> int:
    element = DTYPE_BYTES[spec.dtype]
    num_tokens = config.prefill_chunk + config.max_sessions
    hidden, width = model.hidden_size, model.layer_width
    activations = num_tokens * (element * (2 * hidden + 4 * width) + 12 * hidden)
    row_bytes = model.vocab_size * element
    logits = min(config.prefill_chunk, LOGIT_BYTES // row_bytes) * row_bytes
    logits += config.max_sessions * model.vocab_size * (element + 8)
    return activations + logits + _copied_bytes(model, spec, config)


def _copied_bytes(model: ModelSize, spec: KVSpec, config: EngineConfig) -> int:
    if config.prefill_chunk < MIN_QUERIES or config.window_size < MIN_WINDOW:
        return 0
    keys = spec.num_kv_heads * spec.head_dim
    chunk = config.prefill_chunk * 4 * (model.hidden_size + keys)
    return DTYPE_BYTES[spec.dtype] * (chunk + 4 * config.window_size * keys)


def _largest(values: range, fits: Callable[[int], bool]) -> int:
    """The largest of ascending values that fits; 0 if none does."""
    count = bisect.bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else 0

"""Which device an engine computes on, and what it makes for it: pools, transfer, runner.

A GPU needs CUDA in torch, and Triton for the kernels; without them it is refused with the reason.
`auto` is the CPU for now: a GPU has to be asked for until every part of the product has run on one.
"""

import importlib.util
from typing import Literal

import torch

from streamkv.config import EngineConfig
from streamkv.digest_memory import DigestMemory
from streamkv.errors import ConfigError
from streamkv.executor import StepRunner
from streamkv.full_attention import FullAttention
from streamkv.gpu_plan import DeviceMemory, GpuPlan, ModelSize, plan_gpu, require_room
from streamkv.head_measuring import find_retrieval_heads
from streamkv.journal_records import ModeSet
from streamkv.model import ModelAdapter
from streamkv.model_cache import cache_root
from streamkv.model_files import OnProgress
from streamkv.old_blocks import OldBlocks
from streamkv.pool_room import PoolRoom
from streamkv.recaller import Recaller, RecallOptions
from streamkv.runner import Runner
from streamkv.sizing import digest_budget, full_problem, table_capacity
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.manager import TierManager
from streamkv.tiers.pinning import CudaPageLock
from streamkv.tiers.spec import KVSpec
from streamkv.tiers.transfer import Transfer
from streamkv.tokenizer import Tokenizer

Device = Literal["cpu", "cuda"]


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device to compute on.

    Raises:
        ConfigError: `cuda` on a machine that cannot do that.
    """
    if wanted != "cuda":
        return "cpu"
    if (problem := gpu_problem()) is not None:
        raise ConfigError("device", "cuda", problem, 'Use device="auto" or "cpu".')
    return "cuda"


def gpu_problem() -> str | None:
    """Why nothing can be computed on a GPU here; `None` if it can."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        return "torch finds no GPU that it can use"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def plan_memory(adapter: ModelAdapter, config: EngineConfig) -> GpuPlan:
    """Divide up the memory of the GPU that the model's weights are on already.

    Raises:
        ConfigError: it has no room for what `config` wants.
    """
    torch.cuda.empty_cache()  # what loading left to torch is free
    free_bytes, total_bytes = torch.cuda.mem_get_info(adapter.base.device)
    weights = adapter.model.parameters()
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    memory = DeviceMemory(total_bytes, free_bytes + weight_bytes)
    text_config = adapter.model.config.get_text_config(decoder=True)
    size = ModelSize.of(text_config.to_dict(), adapter.spec, weight_bytes)
    plan = plan_gpu(memory, size, adapter.spec, config)
    require_room(plan, adapter.spec, config)
    return plan


def make_transfer(pool: GpuPool) -> Transfer:
    """What copies the pool's blocks."""
    if pool.data.device.type == "cpu":
        return Transfer(pool)
    # Imported only here: a machine without a GPU need not be able to.
    from streamkv.tiers.cuda_transfer import CudaTransfer

    return CudaTransfer(pool)


def make_cpu_pool(spec: KVSpec, num_bytes: int, device: torch.device) -> CpuPool:
    """The cpu pool below a gpu pool that lies on `device`: page-locked if that is a GPU.

    Raises:
        ConfigError: `cpu_bytes` has no room for a block, or is more than the system gives.
    """
    page_lock = CudaPageLock(device) if device.type == "cuda" else None
    return CpuPool(spec, num_bytes, page_lock)


def make_recaller(
    adapter: ModelAdapter,
    tokenizer: Tokenizer,
    pool: GpuPool,
    tiers: TierManager,
    config: EngineConfig,
    on_progress: OnProgress | None = None,
) -> Recaller | None:
    """What brings old blocks back, if the options ask for it.

    Raises:
        ConfigError: layers of the model have a window of their own.
    """
    if config.recall_blocks == 0:
        return None
    if problem := full_problem(adapter.sliding_windows):
        # Recalled blocks are for all layers, and such a layer has never seen anything old.
        remedy = "Use recall_blocks=0, or a model whose layers see everything."
        raise ConfigError("recall_blocks", config.recall_blocks, problem, remedy)
    heads = find_retrieval_heads(adapter, tokenizer, on_progress)
    options = RecallOptions(config.recall_blocks, config.stride, config.position_policy)
    device = pool.data.device
    # On a CPU all memory is the host's.
    budget = 0 if device.type == "cpu" else digest_budget(config, adapter.spec)
    memory = DigestMemory(device, budget)
    return Recaller(adapter, pool.data, tiers, heads, options, memory)


def make_full(
    adapter: ModelAdapter, pool: GpuPool, tiers: TierManager, room: PoolRoom, config: EngineConfig
) -> FullAttention:
    """What has sessions attend to everything, or says why they cannot."""
    old = OldBlocks(tiers, room, adapter.spec)
    unset = ModeSet(0, "window", config.recall_blocks, config.stride, config.position_policy, b"")
    problem = full_problem(adapter.sliding_windows)
    return FullAttention(tiers, old, adapter.trained_length, unset, problem)


def make_runner(adapter: ModelAdapter, pool: GpuPool, config: EngineConfig) -> StepRunner:
    """What runs the model over the pool."""
    if pool.data.device.type == "cpu":
        threads = config.num_threads or torch.get_num_threads()
        native_threads = threads if config.compile == "auto" else 0
        return Runner(
            adapter,
            pool.data,
            adapter.trained_length,
            native_threads,
            config.max_sessions,
            config.batch_invariant,
        )
    # Imported only here: Triton is not there on every system.
    from streamkv.triton_runner import TritonRunner

    captures = config.compile == "auto"
    return TritonRunner(
        adapter,
        pool.data,
        adapter.trained_length,
        capacity=table_capacity(config, adapter.spec) if captures else 0,
        max_sequences=config.max_sessions,
        max_chunk=config.prefill_chunk,
        cache=cache_root(),
        observes=config.recall_blocks > 0,
        batch_invariant=config.batch_invariant,
        mixed_chunk=min(config.mixed_chunk, config.prefill_chunk),
    )

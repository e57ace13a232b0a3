"""What of a plan for many sessions does not fit, and which option with which value would help.

Invariant: a remedy helps by itself: with its value, and all else as it was, that shortfall is gone.
Pure arithmetic.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamkv import stored_bytes
from streamkv.config import MAX_BYTES, EngineConfig, format_size, parse_size
from streamkv.errors import ConfigError
from streamkv.gpu_plan import (
    DeviceMemory,
    ModelSize,
    plan_gpu,
    require_room,
    room_for_digests,
    with_window,
)
from streamkv.session_needs import Workload, asleep_blocks, history_blocks, locked_blocks
from streamkv.tiers.spec import KVSpec

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Remedy:
    """An option, and the value with which a plan fits in that respect.

    Attributes:
        option: a field of `EngineConfig` or `Workload`, or `gpu_memory`.
        value: what to give it: bytes of a size, or a number.
        is_size: whether it is bytes.
    """

    option: str
    value: int
    is_size: bool = False


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What does not fit.

    Attributes:
        tier: `gpu`, `cpu` or `ssd`.
        problem: what is needed, and what there is.
        remedies: each by itself helps; none: a smaller model does.
    """

    tier: str
    problem: str
    remedies: tuple[Remedy, ...]


def room_on_ssd(config: EngineConfig, spec: KVSpec) -> int:
    """Blocks that the store of `config` has room for."""
    return stored_bytes.room_for_blocks(parse_size("ssd_bytes", config.ssd_bytes), spec)


def on_gpu(
    memory: DeviceMemory, model: ModelSize, spec: KVSpec, config: EngineConfig
) -> Iterator[Shortfall]:
    """Whether the awake sessions fit on the GPU."""
    plan = plan_gpu(memory, model, spec, config)
    try:
        require_room(plan, spec, config)
    except ConfigError as error:
        remedies = [Remedy("gpu_memory", _up(memory.total_bytes - plan.spare_bytes), is_size=True)]
        room = room_for_digests(plan, spec)
        if config.digest_bytes is not None and plan.digest_bytes and room is not None:
            remedies.append(Remedy("digest_bytes", room // _MIB * _MIB, is_size=True))
        if plan.max_sessions > 0:
            remedies.append(Remedy("num_awake", plan.max_sessions))

        def fits(window_size: int) -> bool:
            return plan_gpu(memory, model, spec, with_window(config, window_size)).fits

        yield Shortfall("gpu", error.problem, (*remedies, *_window_that(fits, spec, config)))


def in_cpu_pool(spec: KVSpec, config: EngineConfig) -> Iterator[Shortfall]:
    """Whether the cpu pool, if there is one, has room for a block."""
    if 0 < parse_size("cpu_bytes", config.cpu_bytes) < spec.block_bytes:
        problem = f"the cpu pool has no room for a block of {format_size(spec.block_bytes)}"
        remedies = (
            Remedy("cpu_bytes", _up(spec.block_bytes), is_size=True),
            Remedy("cpu_bytes", 0),
        )
        yield Shortfall("cpu", problem, remedies)


def on_ssd(spec: KVSpec, config: EngineConfig, work: Workload) -> Iterator[Shortfall]:
    """Whether the store holds every window, and with recall every history."""
    room = room_on_ssd(config, spec)
    if (needed := locked_blocks(config, spec, work)) > room:

        def fits(window_size: int) -> bool:
            return locked_blocks(with_window(config, window_size), spec, work) <= room

        # Each awake session counts twice.
        most = room // asleep_blocks(config, work.num_tokens, spec.block_size)
        remedies = list(_sessions_that(most - work.num_awake, work))
        if most > work.num_sessions:
            remedies.append(Remedy("num_awake", most - work.num_sessions))
        remedies += _window_that(fits, spec, config)
        yield _store_too_small("what sessions need to wake", needed, room, spec, remedies)
    of_history = history_blocks(work.num_tokens, spec)
    if config.recall_blocks > 0 and (needed := work.num_sessions * of_history) > room:
        remedies = list(_sessions_that(room // of_history, work))
        if (of_one := room // work.num_sessions) > 0:
            remedies.append(Remedy("num_tokens", of_one * spec.block_size - 1))
        yield _store_too_small("whole histories for recall", needed, room, spec, remedies)


def _store_too_small(
    what: str, needed: int, room: int, spec: KVSpec, remedies: list[Remedy]
) -> Shortfall:
    problem = f"{what} are {needed:,} blocks; the store has room for {room:,}"
    sizes = range(1, MAX_BYTES // _MIB + 1)
    at = bisect.bisect_left(
        sizes, True, key=lambda size: stored_bytes.room_for_blocks(size * _MIB, spec) >= needed
    )
    if at < len(sizes):
        remedies = [Remedy("ssd_bytes", sizes[at] * _MIB, is_size=True), *remedies]
    return Shortfall("ssd", problem, tuple(remedies))


def _sessions_that(most: int, work: Workload) -> tuple[Remedy, ...]:
    """As many sessions as have room, unless those were fewer than are awake."""
    return (Remedy("num_sessions", most),) if most >= work.num_awake else ()


def _window_that(
    fits: Callable[[int], bool], spec: KVSpec, config: EngineConfig
) -> tuple[Remedy, ...]:
    """The largest smaller window of whole blocks that fits, if there is one."""
    least = with_window(config, spec.block_size).window_size
    windows = range(least, config.window_size, spec.block_size)
    count = bisect.bisect_left(windows, True, key=lambda size: not fits(size))
    return (Remedy("window_size", windows[count - 1]),) if count else ()


def _up(num_bytes: int) -> int:
    """Rounded up to a MiB."""
    return -(-num_bytes // _MIB) * _MIB

"""Options of an engine, checked before any work.

Every option has its default here and nowhere else. A bad value raises `ConfigError` with field,
value and remedy; an option that does not exist raises `UnknownOptionError`.
"""

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from streamkv.errors import ConfigError, InputError, UnknownOptionError
from streamkv.recalled import POSITION_POLICIES, PositionPolicy
from streamkv.tiers.spec import BLOCK_SIZE

Attention = Literal["window", "recall", "full"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
DEFAULT_STRIDE = 256
Retain = Literal["all", "window", "none"]
OnPressure = Literal["wait", "drop"]

MAX_BYTES = 2**50
"""The largest size that is taken for one; systems refuse far smaller ones in ways of their own."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(field: str, value: int | str) -> int:
    """Bytes of a size such as `"10GiB"`, `"512MiB"`, `"2GB"` or `4096`.

    KiB, MiB, GiB, TiB (or K, M, G, T) are powers of 1024; kB, MB, GB, TB powers of 1000.

    Raises:
        ConfigError: not a size, negative, or more than a PiB.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return _require_possible(field, value, value)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ConfigError(
            field, value, "not a size", 'Write a number of bytes or a size such as "10GiB".'
        )
    num_bytes = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    return _require_possible(field, value, num_bytes)


def _require_possible(field: str, value: int | str, num_bytes: int) -> int:
    if num_bytes > MAX_BYTES:
        raise ConfigError(field, value, "more than a PiB", "Use what this machine has.")
    return num_bytes


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")

MAX_SECONDS = 10**10
"""The longest duration that is taken for one."""


def parse_duration(field: str, value: float | str) -> float:
    """Seconds of a duration such as `"30d"`, `"12h"`, `"90min"` or `3600`.

    Raises:
        ConfigError: not a duration, not above 0, or more than 300 years.
    """
    seconds = -1.0
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        seconds = float(match.group(1)) * _SECONDS.get(match.group(2), -1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 < seconds <= MAX_SECONDS:
        remedy = 'Write seconds or a duration such as "30d", "12h" or "90min".'
        raise ConfigError(field, value, "not a duration", remedy)
    return seconds


def format_size(num_bytes: float) -> str:
    """A size for people, such as `1.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def refuse_unknown_options(cls: type, given: dict[str, Any]) -> None:
    """Raise `UnknownOptionError` for the first key that is not a field of the dataclass `cls`."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."
            raise UnknownOptionError(name, value, f"{cls.__name__} has no such option", remedy)


def require_int(field: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise `ConfigError` unless `value` is an int within [minimum, maximum]."""
    bound = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    if not fits or (isinstance(value, int) and maximum is not None and value > maximum):
        raise ConfigError(field, value, "out of range", f"Use a whole number {bound}.")


def require_seconds(field: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a number of seconds above 0, or `None`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):  # type: ignore[operator]
        raise ConfigError(field, value, "not a number of seconds", "Use one above 0, or None.")


def check_priority(priority: object) -> None:
    """Raise `InputError` unless it is a priority."""
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or not -8 <= priority <= 8:  # type: ignore[operator]
        raise InputError("priority", priority, "not a priority", "Use a whole number, -8 to 8.")


def require_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        shown = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(field, value, "not a choice", f"Use one of {shown}.")


def _require_directory(field: str, value: object) -> None:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(field, value, "not a path", "Use the path of a directory, or None.")


def choose_dtype(wanted: str, device: str) -> str:
    """The element type of weights and KV: as wanted, or what the device is best at."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an `Engine`.

    Attributes:
        window_size: newest tokens attended, the current one included.
        num_sink_tokens: first tokens of the stream attended for ever; a system prompt is kept
            whole, whatever its length.
        dtype: element type of weights and KV. `auto`: float32 on a CPU, bfloat16 on a GPU.
        device: `cpu`, `cuda`, or `auto`: the CPU, as long as the GPU path is young.
        gpu_bytes: bytes of the gpu pool (on a CPU machine: ordinary memory); `None`: what
            `max_sessions` windows need.
        max_sessions: live sessions that the default gpu pool has room for; also the most that
            share a step.
        cpu_bytes: bytes of the cpu pool; 0 turns it off.
        store: directory of journals and of the ssd store; `None` keeps nothing across processes.
        ssd_bytes: limit of the *file* of the ssd store.
        codec: `zstd` (lossless, smaller) or `raw` (lossless, faster).
        retain: `all` keeps blocks that left the window; `window` keeps what a resume needs; `none`
            stores no blocks, so that a resume computes the window anew.
        on_pressure: when blocks are made faster than they can be written: `wait` slows the feed,
            `drop` gives up old blocks (counted).
        checkpoint_tokens: tokens between checkpoints; `None`: after half a second of work, at the
            next full block, so that a resume computes about half a second anew.
        prefill_chunk: tokens of a feed that are computed in one step.
        mixed_chunk: the same while other sessions are decoding, so that none of them waits long.
        turn_tokens: where more sessions have work than the gpu pool has room for, tokens that each
            computes before it gives way to the next.
        sleep_after: seconds without work after which a session's blocks leave the gpu pool, though
            no other session needs the room; `None`: only then.
        batch_invariant: what a session computes is the same to the bit, whoever shares its steps
            and however often it sleeps. Decode steps on a GPU then all have one size, and a chunk
            of a feed has a step of its own.
        num_threads: threads of the CPU path; `None` leaves torch's own choice.
        compile: `auto` compiles the decode step in the background when a C compiler is there,
            `off` stays on the eager path.
        attention: `window` attends to sink tokens and window, `recall` also to old blocks, `full`
            to every token, as long as `gpu_bytes` has room for all blocks; a session may change it,
            and keeps what it changed it to. `recall` needs `recall_blocks`. `full` needs no tier
            for what it read itself; with a `store` all of that is written there.
        recall_blocks: old blocks that a session may recall into attention; 0: none ever.
        recall_stride: tokens between two choices of old blocks, a multiple of 64; `None`: 256, or
            what the window has room for.
        position_policy: how far away recalled blocks seem: `far`, `cache` or `absolute`.
        digest_bytes: bytes of the GPU for the digests by which old blocks are chosen; those that
            find no room there lie in host memory; 0: all of them; `None`: 131,072 tokens of each of
            `max_sessions`. On a CPU all are in host memory.
        session_tokens: most tokens that a session may have; `None`: any number.
        max_stored_sessions: most sessions of the store, awake and asleep, for one more to be made;
            `None`: any number.
        expire_after: seconds, or a text such as `"30d"`: a session that has slept longer is
            deleted; `None`: none is. A session may be created with a time of its own.
        trust_remote_code: let a model's own Python code run.
    """

    window_size: int = 2048
    num_sink_tokens: int = 4
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_bytes: int | str | None = None
    max_sessions: int = 8
    cpu_bytes: int | str = "256MiB"
    store: str | None = None
    ssd_bytes: int | str = "20GiB"
    codec: Literal["zstd", "raw"] = "zstd"
    retain: Retain = "all"
    on_pressure: OnPressure = "wait"
    checkpoint_tokens: int | None = None
    prefill_chunk: int = 512
    mixed_chunk: int = 192
    turn_tokens: int = 256
    sleep_after: float | None = None
    batch_invariant: bool = False
    num_threads: int | None = None
    compile: Literal["auto", "off"] = "auto"
    attention: Attention = "window"
    recall_blocks: int = 0
    recall_stride: int | None = None
    position_policy: PositionPolicy = "far"
    digest_bytes: int | str | None = None
    session_tokens: int | None = None
    max_stored_sessions: int | None = None
    expire_after: float | str | None = None
    trust_remote_code: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse_unknown_options(cls, kwargs)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        require_int("window_size", self.window_size, 1)
        if self.window_size < BLOCK_SIZE:
            raise ConfigError(
                "window_size",
                self.window_size,
                f"smaller than one block ({BLOCK_SIZE} tokens)",
                f"Use at least {BLOCK_SIZE}.",
            )
        require_int("num_sink_tokens", self.num_sink_tokens, 0)
        require_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        require_choice("device", self.device, ("auto", "cpu", "cuda"))
        require_int("max_sessions", self.max_sessions, 1)
        if self.gpu_bytes is not None:
            parse_size("gpu_bytes", self.gpu_bytes)
        if self.digest_bytes is not None:
            parse_size("digest_bytes", self.digest_bytes)
        parse_size("cpu_bytes", self.cpu_bytes)
        parse_size("ssd_bytes", self.ssd_bytes)
        require_choice("codec", self.codec, ("zstd", "raw"))
        require_choice("retain", self.retain, ("all", "window", "none"))
        require_choice("on_pressure", self.on_pressure, ("wait", "drop"))
        if self.checkpoint_tokens is not None:
            require_int("checkpoint_tokens", self.checkpoint_tokens, BLOCK_SIZE)
        require_int("prefill_chunk", self.prefill_chunk, 1, 65536)
        require_int("mixed_chunk", self.mixed_chunk, 1, 65536)
        require_int("turn_tokens", self.turn_tokens, 1)
        require_seconds("sleep_after", self.sleep_after)
        require_choice("batch_invariant", self.batch_invariant, (False, True))
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1, 1024)
        if self.session_tokens is not None:
            require_int("session_tokens", self.session_tokens, 1)
        if self.max_stored_sessions is not None:
            require_int("max_stored_sessions", self.max_stored_sessions, 1)
        if self.expire_after is not None:
            parse_duration("expire_after", self.expire_after)
        require_choice("trust_remote_code", self.trust_remote_code, (False, True))
        if self.store is not None:
            _require_directory("store", self.store)
        require_choice("compile", self.compile, ("auto", "off"))
        require_choice("attention", self.attention, ATTENTIONS)
        require_int("recall_blocks", self.recall_blocks, 0, 65536)
        require_choice("position_policy", self.position_policy, POSITION_POLICIES)
        if self.recall_stride is not None:
            require_int("recall_stride", self.recall_stride, BLOCK_SIZE)
        if self.recall_blocks > 0:
            self._check_recall()
        elif self.attention == "recall":
            remedy = "Say how many blocks a session may recall, for example recall_blocks=16."
            raise ConfigError("attention", self.attention, "with recall_blocks=0", remedy)

    @property
    def stride(self) -> int:
        """Tokens between two choices of old blocks: as given, or what the window has room for."""
        if self.recall_stride is not None:
            return self.recall_stride
        room = (self.window_size - BLOCK_SIZE) // 2 // BLOCK_SIZE * BLOCK_SIZE
        return max(BLOCK_SIZE, min(DEFAULT_STRIDE, room))

    def _check_recall(self) -> None:
        stride, size = self.stride, BLOCK_SIZE
        if stride % size:
            below = stride // size * size
            remedy = f"Use {below} or {below + size}."
            raise ConfigError("recall_stride", stride, f"not a multiple of {size}", remedy)
        least = 2 * stride + size
        if self.window_size < least:
            shorter = "a shorter recall_stride, " if stride > size else ""
            raise ConfigError(
                "recall_stride",
                stride,
                f"too long for window_size={self.window_size}",
                f"A window needs 2 * recall_stride + {size} tokens: use window_size={least}, "
                f"{shorter}or recall_blocks=0.",
            )
        has_tier = self.store is not None or parse_size("cpu_bytes", self.cpu_bytes) > 0
        if self.retain != "all" or not has_tier:
            raise ConfigError(
                "recall_blocks",
                self.recall_blocks,
                f"with retain={self.retain!r} and cpu_bytes={self.cpu_bytes!r} nothing is kept "
                "that could be recalled",
                'Use retain="all", and a store or cpu_bytes for the history that matters.',
            )

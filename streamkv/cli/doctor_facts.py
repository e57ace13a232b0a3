"""What this machine has. Facts only; what they mean is said elsewhere."""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from streamkv.kernels.native_build import find_compiler
from streamkv.model_cache import cache_root
from streamkv.model_files import DEFAULT_MODEL, DEFAULT_WHEEL, wheel_gguf

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "lmdb",
    "zstandard",
    "isal",
    "websockets",
    "safetensors",
)
_ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and its software.

    Attributes:
        cpu: name of the processor.
        num_cores: cores that this process may use.
        isa_flags: vector and matrix instructions, of those that matter.
        memory_bytes, free_memory_bytes: main memory.
        gpus: names of the GPUs that torch sees.
        no_gpu_reason: why it sees none; empty if it does.
        compiler: path of the C compiler, or `None`.
        python: its version.
        platform: operating system and architecture.
        versions: version of each package, `None` if it is not installed.
        disk_path: existing directory at or above the store.
        free_disk_bytes: free there.
        disk_writable: whether it can be written.
    """

    cpu: str
    num_cores: int
    isa_flags: tuple[str, ...]
    memory_bytes: int
    free_memory_bytes: int
    gpus: tuple[str, ...]
    no_gpu_reason: str
    compiler: str | None
    python: str
    platform: str
    versions: dict[str, str | None]
    disk_path: str
    free_disk_bytes: int
    disk_writable: bool


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model whose files are on this machine; `place` is where."""

    name: str
    num_bytes: int
    place: str


def examine_machine(store: Path) -> Machine:
    """Look at this machine; `store` says which disk matters. Imports torch."""
    cpuinfo = _cpuinfo()
    total, free = _memory()
    gpus, reason = _gpus()
    disk = existing_parent(store)
    return Machine(
        cpu=cpuinfo.get("model name", "") or platform.processor() or platform.machine(),
        num_cores=_num_cores(),
        isa_flags=_isa_flags(cpuinfo),
        memory_bytes=total,
        free_memory_bytes=free,
        gpus=gpus,
        no_gpu_reason=reason,
        compiler=find_compiler(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={name: installed_version(name) for name in PACKAGES},
        disk_path=str(disk),
        free_disk_bytes=shutil.disk_usage(disk).free,
        disk_writable=os.access(disk, os.W_OK | os.X_OK),
    )


def cached_models() -> list[CachedModel]:
    """Models in the cache directory, in the installed wheel and in the hub's own cache."""
    found = [
        CachedModel(path.name, _tree_bytes(path), str(path.parent))
        for path in sorted((cache_root() / "models").glob("[!.]*"))
        if path.is_dir()
    ]
    wheel = wheel_gguf()
    if wheel is not None:
        name = f"{DEFAULT_MODEL} ({DEFAULT_WHEEL})"
        found.append(CachedModel(name, wheel.stat().st_size, str(wheel.parent)))
    for path in sorted(_hub_root().glob("models--*")):
        name = path.name.removeprefix("models--").replace("--", "/")
        found.append(CachedModel(name, _tree_bytes(path / "blobs"), str(path.parent)))
    return found


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    resolved = path.expanduser().absolute()
    return next(place for place in (resolved, *resolved.parents) if place.is_dir())


def installed_version(package: str) -> str | None:
    """Version of an installed package, or `None`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = text.split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _isa_flags(cpuinfo: dict[str, str]) -> tuple[str, ...]:
    flags = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())
    return tuple(flag for flag in _ISA_FLAGS if flag in flags)


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _memory() -> tuple[int, int]:
    """Total and free bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total, total
    [free] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")] or ["0"]
    return total, 1024 * int(free)


def _gpus() -> tuple[tuple[str, ...], str]:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return tuple(torch.cuda.get_device_name(place) for place in range(count)), ""
    if torch.version.cuda is None and torch.version.hip is None:
        return (), f"torch {torch.__version__} is built without CUDA"
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return (), "no NVIDIA driver is installed"
    return (), "torch cannot use the driver that is installed"


def _hub_root() -> Path:
    chosen = os.environ.get("HF_HUB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME")
    base = Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface"
    return base / "hub"


def _tree_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

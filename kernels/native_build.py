"""Compiles the native kernels, `decoder.c`, `attention.c` and the like, for this processor, once.

Compiling takes a second or a few and needs a C compiler; the result is kept in a directory of the
caller's under a name that says source, compiler and processor. This module knows no tensors.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from streamkv.errors import StreamKVError

_HERE = Path(__file__).parent
_SOURCES = [_HERE / name for name in ("attention.c", "decoder.c", "rows.c", "scores.c")]
_HEADERS = sorted(_HERE.glob("*.h"))

_FLAGS = ["-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"]
# Where a product and a sum are rounded once is said in the sources (`more` in vectors.h): what the
# compiler fuses differs from loop to loop, and so would the bits of a row in a batch and alone.
_FLAGS += ["-ffp-contract=off"]
# Not every compiler knows every flag: the first set that compiles is taken.
_FLAG_SETS = [
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-fopenmp"],
    ["-march=native"],
    [],
]


class NativeUnavailableError(StreamKVError):
    """There is no native kernel here; the message says why."""


def find_compiler() -> str | None:
    """Path of a C compiler: `CC`, else cc, gcc or clang."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build(directory: Path) -> Path:
    """The compiled library in `directory`, made if it is not there.

    Raises:
        NativeUnavailableError: no compiler, or none of the sets of flags compiles.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError("there is no C compiler. Install gcc or clang, or set CC.")
    target = directory / f"kernels-{_identity(compiler)}.so"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _compile(compiler, target)
    return target


def _identity(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    processor = platform.processor() + platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        processor += "".join(line for line in lines[:40] if line.startswith(("flags", "Features")))
    text = "".join(path.read_text() for path in (*_HEADERS, *_SOURCES))
    parts = [text, version.stdout, processor, repr((_FLAGS, _FLAG_SETS))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _compile(compiler: str, target: Path) -> None:
    errors = ""
    for flags in _FLAG_SETS:
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            path = Path(made) / target.name
            command = [compiler, *_FLAGS, *flags, *map(str, _SOURCES), "-o", str(path), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                # Renamed into place, so that two processes at once do no harm.
                path.rename(target)
                return
            errors = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
    raise NativeUnavailableError(f"{compiler} cannot compile the C sources: {errors}")

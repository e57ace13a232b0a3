"""Where things lie when nobody says: one store for each model.

Pure but for the environment; makes no directories.
"""

import hashlib
import os
import re
from pathlib import Path


def data_root() -> Path:
    """`XDG_DATA_HOME/streamkv`, else `~/.local/share/streamkv`."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "share") / "streamkv"


def default_store(model: str, dtype: str) -> Path:
    """The store of a model; KV of another element type needs another store."""
    suffix = "" if dtype in ("auto", "float32") else f"-{dtype}"
    return data_root() / (model_slug(model) + suffix)


def model_slug(model: str) -> str:
    """A directory name for a model: readable, and different for different paths."""
    path = Path(model).expanduser()
    if not path.exists():
        return re.sub(r"[^A-Za-z0-9._-]+", "--", model).strip(".-") or "model"
    resolved = str(path.resolve())
    digest = hashlib.blake2b(os.fsencode(resolved), digest_size=4).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip(".-")
    return f"{readable or 'model'}-{digest}"


def chosen_store(model: str, store: str | None, dtype: str | None) -> Path:
    """The store that was given, else that of the model."""
    return Path(store).expanduser() if store else default_store(model, dtype or "auto")

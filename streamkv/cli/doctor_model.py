"""The size of a model that is on this machine, by its config and the headers of its weights.

Reads no weights, fetches nothing and converts nothing: a model that is not here has no size yet.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

from streamkv.gpu_plan import ModelSize
from streamkv.model_cache import cache_root, file_stamp
from streamkv.model_files import DEFAULT_HUB_ID, DEFAULT_MODEL
from streamkv.tiers.spec import DTYPE_BYTES, KVSpec


def local_directory(model: str) -> Path | None:
    """Directory with the config and safetensors of a model; `None`: not on this machine yet."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model != DEFAULT_MODEL and path.suffix != ".gguf":
        return _hub_directory(model)
    if model != DEFAULT_MODEL and not path.is_file():
        return None
    stem = model if model == DEFAULT_MODEL else f"{path.stem}-{file_stamp([path])}"
    found = sorted((cache_root() / "models").glob(f"{stem}-v*"))
    converted = [place for place in found if place.is_dir()]
    if converted:
        return converted[-1]
    return _hub_directory(DEFAULT_HUB_ID) if model == DEFAULT_MODEL else None


def read_size(directory: Path, dtype: str) -> tuple[ModelSize, KVSpec]:
    """Sizes of the model in a directory, its weights computed in `dtype`.

    Raises:
        OSError: a file is missing or cannot be read.
        KeyError: its config does not state a size that is needed.
        ValueError: a file is damaged.
    """
    config = read_config(directory)
    num_heads = config["num_attention_heads"]
    spec = KVSpec(
        config["num_hidden_layers"],
        config.get("num_key_value_heads") or num_heads,
        config.get("head_dim") or config["hidden_size"] // num_heads,
        dtype,
    )
    num_weights = sum(_num_weights(path) for path in _weight_files(directory))
    return ModelSize.of(config, spec, num_weights * DTYPE_BYTES[dtype]), spec


def read_config(directory: Path) -> dict[str, Any]:
    """The config of the model in a directory, of several parts that of its decoder.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: it is damaged.
    """
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    decoder: dict[str, Any] = config.get("text_config", config)
    return decoder


def _hub_directory(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return [directory / name for name in sorted(set(names.values()))]


def _num_weights(path: Path) -> int:
    """Elements of all tensors of a safetensors file: its header is JSON behind its length."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"{path} is cut short")
        (length,) = struct.unpack("<Q", start)
        if length > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")

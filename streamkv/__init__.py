"""streamkv: language models that read or talk without end.

The public names are those of `__all__`; everything else may change. They are imported when first
used: every part of the package imports this file, and none of them should pay for all the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamkv.config import EngineConfig
    from streamkv.engine import Engine
    from streamkv.errors import StreamKVError
    from streamkv.outputs import (
        ChunkScores,
        Delta,
        FinishReason,
        Progress,
        Score,
        SessionStats,
        TokenLogprob,
    )
    from streamkv.sampling_params import SamplingParams
    from streamkv.session import Session
    from streamkv.ws_server.client import connect

__all__ = [
    "ChunkScores",
    "Delta",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Progress",
    "SamplingParams",
    "Score",
    "Session",
    "SessionStats",
    "StreamKVError",
    "TokenLogprob",
    "__version__",
    "connect",
]
__version__ = "0.1.0"

_HOMES = {
    "ChunkScores": "outputs",
    "Delta": "outputs",
    "Engine": "engine",
    "EngineConfig": "config",
    "FinishReason": "outputs",
    "Progress": "outputs",
    "SamplingParams": "sampling_params",
    "Score": "outputs",
    "Session": "session",
    "SessionStats": "outputs",
    "StreamKVError": "errors",
    "TokenLogprob": "outputs",
    "connect": "ws_server.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streamkv' has no attribute {name!r}")
    return getattr(import_module(f"streamkv.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

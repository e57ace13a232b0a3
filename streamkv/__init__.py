"""streamkv: language models that read or talk without end.

The public names are those of `__all__`; everything else may change.
"""

from streamkv.config import EngineConfig
from streamkv.errors import StreamKVError

__all__ = ["EngineConfig", "StreamKVError", "__version__"]
__version__ = "0.1.0"

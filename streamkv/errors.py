"""The exceptions of streamkv. This module imports nothing, so that every part may use it.

StreamKVError
├── ConfigError (also ValueError)       an option: names field, value and remedy
│   └── UnknownOptionError (TypeError)  an option that does not exist
├── InputError (also ValueError)        text, token ids or a name given by the caller
├── QuotaError (also ValueError)        more tokens or sessions than there may be
├── ModelError (also ValueError)        a model that cannot be found, loaded or supported
│   └── UnsupportedModelError           the numeric probe refused it
├── SessionError                        a session in a state that forbids the call
│   └── AbsentBlockError                mode `full` needs a block that cannot be had
├── PoolFullError                       no free block in a pool
├── StoreError                          the ssd store
│   ├── StoreFormatError (ValueError)   another format version, model or weights
│   │   └── StoreDamagedError           a file that cannot be read, whoever wrote it
│   ├── StoreLockedError                open in another process
│   └── StoreFullError                  no room left in the store, or on the disk below it
├── JournalError                        the journal cannot be written or read
├── EngineClosedError                   the engine was closed while the call waited
└── ServerError                         the WebSocket server or client
"""


class StreamKVError(Exception):
    """Root of every error that streamkv raises on purpose."""


class ConfigError(StreamKVError, ValueError):
    """A bad option. The message names the field, the value and what to do instead."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {problem}. {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy


class UnknownOptionError(ConfigError, TypeError):
    """An option that does not exist; the remedy names the nearest one that does."""


class InputError(StreamKVError, ValueError):
    """Bad text, token ids or names from the caller. Names field, value and remedy."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}={shown}: {problem}. {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy


class QuotaError(StreamKVError, ValueError):
    """More tokens or sessions than there may be. Names the quota, its value and the remedy."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {problem}. {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy


class ModelError(StreamKVError, ValueError):
    """A model that cannot be found, loaded or read."""


class UnsupportedModelError(ModelError):
    """The numeric probe refused the model: attention here would differ from the model's own."""


class SessionError(StreamKVError):
    """The session is in a state that forbids the call."""


class AbsentBlockError(SessionError):
    """Mode `full` needs a block that no tier has, or that is damaged. Names its tokens."""

    def __init__(self, start: int, end: int, problem: str) -> None:
        super().__init__(
            f"mode 'full' attends to every token, and the block of the tokens {start} to "
            f"{end - 1} cannot be had: {problem}. Go on in mode 'window' or 'recall', or feed the "
            "stream to a new session, with a store or cpu_bytes for all of it and retain='all', or "
            "in mode 'full' from its first token on."
        )
        self.start = start
        self.end = end
        self.problem = problem


class PoolFullError(StreamKVError):
    """A pool has no free block."""


class StoreError(StreamKVError):
    """The ssd store cannot do what was asked."""


class StoreFormatError(StoreError, ValueError):
    """The store was written by another format version, for another model or other weights."""


class StoreDamagedError(StoreFormatError):
    """The store's file is not one that can be read, whoever wrote it."""


class StoreLockedError(StoreError):
    """The store is open in another process; the message names it."""


class StoreFullError(StoreError):
    """The store, or the disk below it, has no room left."""


class JournalError(StreamKVError):
    """The journal cannot be written or read. Nothing was emitted that is not in it."""


class EngineClosedError(StreamKVError):
    """The engine was closed while the call waited."""


class ServerError(StreamKVError):
    """A problem of the WebSocket server or client."""

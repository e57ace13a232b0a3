"""What a command exits with. Scripts rely on these numbers."""

from enum import IntEnum

from streamkv.errors import JournalError, ModelError, ServerError, StoreError, StreamKVError


class ExitCode(IntEnum):
    """Exit status of `streamkv`."""

    OK = 0
    FOUND_PROBLEM = 1
    """A check did its work and found something wrong: `doctor`, `cache verify`, `plan`."""
    USAGE = 2
    """A bad option, input, name or session state; nothing was done."""
    MODEL = 3
    """The model cannot be found, read or supported."""
    STORE = 4
    """The store or a journal cannot be used; another process may have it."""
    SERVER = 5
    """The server cannot listen, or a connection failed."""
    BUG = 70
    """An error of streamkv itself, with its traceback."""
    INTERRUPTED = 130
    """Ctrl-C. Nothing that was accepted is lost."""


_BY_KIND: tuple[tuple[type[StreamKVError], ExitCode], ...] = (
    (ModelError, ExitCode.MODEL),
    (StoreError, ExitCode.STORE),
    (JournalError, ExitCode.STORE),
    (ServerError, ExitCode.SERVER),
)


def exit_code_of(error: StreamKVError) -> ExitCode:
    """The exit status of an error that streamkv raised on purpose."""
    for kind, code in _BY_KIND:
        if isinstance(error, kind):
            return code
    return ExitCode.USAGE

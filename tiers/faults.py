"""Places where a test can make the outside world fail: a full disk, a dead process, a slow worker.

Invariant: outside `inject` a fault point does nothing and costs one look at an empty dict. The
table of actions is module state, of which streamkv has next to none: a fault has to reach code that
knows nothing of tests. This module does not know what its callers do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

FAULT_POINTS = frozenset(
    {"ssd.put", "ssd.get", "ssd.commit", "ssd.fsync", "worker", "journal.write", "journal.fsync"}
)
"""Names that exist; each is called just before the step it is named after."""

_actions: dict[str, Callable[[], None]] = {}


def fault_point(name: str) -> None:
    """Run the action injected at `name`, if there is one; whatever it raises goes to the caller."""
    if _actions:
        action = _actions.get(name)
        if action is not None:
            action()


@contextmanager
def inject(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at every `fault_point(name)` of the process, until the `with` block ends.

    The action may raise, kill the process or wait; it runs on the thread that reached the point. An
    inner injection at the same name hides the outer one.
    """
    assert name in FAULT_POINTS, f"no fault point is called {name!r}"
    outer = _actions.get(name)
    _actions[name] = action
    try:
        yield
    finally:
        if outer is None:
            del _actions[name]
        else:
            _actions[name] = outer

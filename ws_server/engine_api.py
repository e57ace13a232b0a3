"""What the server needs of an engine. `streamkv.engine.Engine` fits, and so does a test's script.

The server knows sessions only by these methods: no model, no tiers.
"""

from collections.abc import Iterable
from typing import Protocol, Self, TypeVar

from streamkv.outputs import Delta, Progress, SessionStats
from streamkv.sampling_params import SamplingParams

Item_co = TypeVar("Item_co", covariant=True)


class Stream(Protocol[Item_co]):
    """An async iterator that `aclose` stops; an async generator is one."""

    def __aiter__(self) -> Self:
        """Itself."""

    async def __anext__(self) -> Item_co:
        """The next item, computed now."""

    async def aclose(self) -> None:
        """Stop: nothing more is computed, and the session is free again."""


class ServedSession(Protocol):
    """One stream of tokens. One request at a time; `stats` at any time."""

    @property
    def resumed(self) -> bool:
        """Whether the session existed before it was opened."""

    def afeed(self, items: str | Iterable[str | list[int]]) -> Stream[Progress]:
        """Read text or token ids; one `Progress` per step."""

    async def asay(self, text: str) -> None:
        """Read one turn of the user, and the header of the answer."""

    def agenerate(self, params: SamplingParams) -> Stream[Delta]:
        """One token per step; nothing is computed before it is asked for."""

    async def adelete(self) -> None:
        """Forget the session for good, and close it."""

    def stats(self) -> SessionStats:
        """Where the session stands."""

    async def aclose(self) -> None:
        """Leave the session as it is stored. Idempotent, also after `adelete`."""


class ServedEngine(Protocol):
    """Opens sessions by name."""

    @property
    def model_name(self) -> str:
        """Name of the model."""

    def session(self, name: str, *, system: str | None = None) -> ServedSession:
        """Create a session, or resume the one of that name."""

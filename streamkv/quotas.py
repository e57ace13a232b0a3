"""How much a session may have and how long it may sleep, by the engine and by its own header.

Invariant: what a session was created with counts before what the engine says, and stays with it.
Pure: no files, no clock.
"""

from dataclasses import dataclass

from streamkv.config import EngineConfig, parse_duration, require_int
from streamkv.errors import QuotaError, SessionError
from streamkv.journal_records import SessionHeader

NEVER = "never"
"""Of `expire_after`: the session is not deleted however long it sleeps."""

NEVER_S = 0.0
"""The same as seconds in a header."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """What a session is asked to be created with; `None`: as the engine says.

    Attributes:
        session_tokens: most tokens that it may have.
        expire_after: seconds of sleep after which it is deleted, a text such as `"30d"`, or
            `"never"`.

    Raises:
        ConfigError: not a number of tokens, or not a duration.
    """

    session_tokens: int | None = None
    expire_after: float | str | None = None

    def __post_init__(self) -> None:
        if self.session_tokens is not None:
            require_int("session_tokens", self.session_tokens, 1)
        self.expire_after_s  # noqa: B018 - checked by being made

    @property
    def expire_after_s(self) -> float | None:
        """As it lies in a header: 0 is never."""
        if self.expire_after is None:
            return None
        if self.expire_after == NEVER:
            return NEVER_S
        return parse_duration("expire_after", self.expire_after)

    def check(self, name: str, header: SessionHeader) -> None:
        """Raise `SessionError` unless a session was created with what is asked for now."""
        for field, asked, given in (
            ("session_tokens", self.session_tokens, header.session_tokens),
            ("expire_after", self.expire_after_s, header.expire_after_s),
        ):
            if asked is not None and asked != given:
                raise SessionError(
                    f"session {name!r} was created with another {field} ({given}). "
                    f"Open it without {field}, or use another name."
                )


UNLIMITED = Quotas()
"""As the engine says."""


def tokens_allowed(header: SessionHeader, config: EngineConfig) -> int | None:
    """Most tokens that a session may have; `None`: any number."""
    if header.session_tokens is not None:
        return header.session_tokens
    return config.session_tokens


def expires_after(header: SessionHeader, otherwise: float | None) -> float | None:
    """Seconds of sleep after which a session is deleted; `None`: never.

    Args:
        header: of the session.
        otherwise: what counts for sessions that say nothing.
    """
    if header.expire_after_s is None:
        return otherwise
    return header.expire_after_s or None


def require_tokens(name: str, num_tokens: int, allowed: int | None) -> None:
    """Raise `QuotaError` if a session would have more tokens than it may."""
    if allowed is not None and num_tokens > allowed:
        raise QuotaError(
            "session_tokens",
            allowed,
            f"session {name!r} would have {num_tokens} tokens",
            "Nothing of this was accepted: rewind the session, go on in another one, or open the "
            "engine with a larger session_tokens.",
        )

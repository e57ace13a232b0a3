"""Who may share blocks with a session, and what the sessions of an engine count together.

Invariant: streams share a block only if one salt, or none, is in the keys of both; the salt is kept
in the session's header, so that a resumed session has the keys it had. A tenant's name itself is
written nowhere.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamkv.cost_gate import CostGate
from streamkv.errors import InputError, SessionError
from streamkv.incremental import require_text
from streamkv.instruments import Instruments
from streamkv.journal_records import SessionHeader
from streamkv.tiers.keys import SALT_BYTES, Salting, tenant_salt
from streamkv.tiers.policy import Place
from streamkv.tiers.usage import Counters
from streamkv.under_way import UnderWay

REUSED: Mapping[Place | None, str] = {
    "gpu": "reused_gpu_tokens",
    "cpu": "reused_cpu_tokens",
    "ssd": "reused_ssd_tokens",
    None: "reused_unread_tokens",
}
"""Counters of reused tokens by where their blocks were; without a place: nobody sees those any more
at the end of the run, so that they were not read."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the sessions of one engine share besides blocks.

    Attributes:
        gate: chooses between reading blocks and computing them.
        under_way: what they are computing right now.
        instruments: where their work is counted and timed.
        counted: `reused_tokens`, tokens whose blocks were read instead of computed, and by `REUSED`
            where these were.
    """

    gate: CostGate = field(default_factory=CostGate)
    under_way: UnderWay = field(default_factory=UnderWay)
    instruments: Instruments = field(default_factory=Instruments)
    counted: Counters = field(default_factory=lambda: Counters(["reused_tokens", *REUSED.values()]))

    def counters(self) -> dict[str, int]:
        """All counters by name, those that never moved included."""
        own = self.counted.snapshot() | self.gate.counters()
        return own | self.instruments.counted.snapshot()


@dataclass(frozen=True, slots=True)
class Sharers:
    """With whom a session is asked to share blocks.

    Attributes:
        tenant: whose sessions; `None`: with no other.
        shared_prompt: the blocks of its system prompt with all that ask for it.

    Raises:
        InputError: a tenant without a name.
    """

    tenant: str | None = None
    shared_prompt: bool = False

    def __post_init__(self) -> None:
        if self.tenant is None:
            return
        require_text("tenant", self.tenant)
        if not self.tenant:
            remedy = "Name one, or leave tenant out: then nothing is shared."
            raise InputError("tenant", self.tenant, "an empty name", remedy)

    def new_salt(self) -> bytes:
        """The salt of a new session."""
        return secrets.token_bytes(SALT_BYTES) if self.tenant is None else tenant_salt(self.tenant)

    def num_shared(self, num_prompt_tokens: int) -> int:
        """First tokens of a new session that are shared with all.

        Raises:
            InputError: asked for, and there is no prompt.
        """
        if self.shared_prompt and num_prompt_tokens == 0:
            remedy = "Give system=..., or leave shared_prompt out."
            raise InputError("shared_prompt", True, "there is no system prompt to share", remedy)
        return num_prompt_tokens if self.shared_prompt else 0

    def check(self, name: str, header: SessionHeader) -> None:
        """Raise `SessionError` unless a session was created with what is asked for now."""
        if self.tenant is not None and header.salt != tenant_salt(self.tenant).hex():
            raise SessionError(
                f"session {name!r} was not created for tenant {self.tenant!r}, so none of its "
                "blocks are that tenant's. Open it without a tenant, or use another name."
            )
        if self.shared_prompt and header.num_shared_tokens == 0:
            raise SessionError(
                f"session {name!r} was created with a system prompt of its own. "
                "Open it without shared_prompt, or delete it first."
            )


PRIVATE = Sharers()
"""Nothing is shared."""


def salting_of(header: SessionHeader, block_size: int, fewest_left: int | None = None) -> Salting:
    """Where the salt of a session enters its chain of keys.

    Args:
        header: what it was created with.
        block_size: tokens per block.
        fewest_left: fewest tokens that a rewind left of it; `None` if there was none.
    """
    salting = Salting(bytes.fromhex(header.salt), header.num_shared_tokens // block_size)
    return salting if fewest_left is None else salting.cut(fewest_left // block_size)

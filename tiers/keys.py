"""Names of stored blocks: a hash chain over everything that decides the bytes of a block.

    root_key(weights, spec, rope, salt)  ->  child_key(parent, 64 token ids, policy)  ->  ...

A prompt that the operator marks shared has a root without salt; the salt of the stream enters with
`salted_key` between its last block and the one after it.

Invariant: equal keys mean blocks that are equal up to rounding and may stand in for each other, in
every process and on every machine. Every hashed field is preceded by its length, so that no two
different lists of fields hash alike; Python's own `hash` (seeded per process) is never used.

The lowest bit of the first byte tells a sealed block's key (0) from that of a partial record (1).
This module is pure and does not know where blocks are kept.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from streamkv.errors import InputError
from streamkv.tiers.spec import FORMAT_VERSION, BlockKey, KVSpec

KEY_BYTES = 16
SALT_BYTES = 16

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class AttentionPolicy:
    """What a token attends to.

    Attributes:
        mode: `window` or `full`.
        window_size: newest tokens attended, the current one included.
        sinks: half-open ranges [first, end) of token indices attended for ever, ascending.
        positions: the position policy, for example `cache`.
    """

    mode: str
    window_size: int
    sinks: tuple[tuple[int, int], ...]
    positions: str

    def num_dense(self, first_token_index: int, num_tokens: int) -> int:
        """How many of these tokens, from the first on, still attend to their whole past."""
        if self.mode == "full":
            return num_tokens
        end = 0
        for first, stop in self.sinks:
            if first > end:
                break
            end = max(end, stop)
        # Token t is dense iff tokens [0, t - window_size] are all sink tokens.
        return min(max(end + self.window_size - first_token_index, 0), num_tokens)

    def in_force(self, first_token_index: int, num_tokens: int) -> bytes:
        """Canonical bytes of the policy for the block of tokens that starts at `first_token_index`.

        Blocks whose tokens all attend to their whole past are named alike under every window, so
        that sessions with different options share them.
        """
        num_dense = self.num_dense(first_token_index, num_tokens)
        if num_dense == num_tokens:
            return b"dense"
        end = first_token_index + num_tokens
        # Whole, also where a range goes on behind the block: how far sink tokens seem depends on
        # their number.
        sinks = ",".join(f"{a}-{b}" for a, b in self.sinks if a < end)
        rest = f"{self.mode}|{self.window_size}|{sinks}|{self.positions}"
        return f"{num_dense} dense, then {rest}".encode()


@dataclass(frozen=True, slots=True)
class Salting:
    """Where the salt enters a stream's chain of keys: at its root, or behind a shared prompt.

    Attributes:
        salt: equal for streams that share blocks.
        num_shared_blocks: first blocks of the stream that are named without it.
        was_cut: there were more of them, until the stream gave up tokens of the prompt. Then the
            root stays as it was, whatever is left.
    """

    salt: bytes = b""
    num_shared_blocks: int = 0
    was_cut: bool = False

    @property
    def root_salt(self) -> bytes:
        """The salt of the root key."""
        return b"" if self._enters_later else self.salt

    @property
    def _enters_later(self) -> bool:
        return self.was_cut or self.num_shared_blocks > 0

    def after(self, block_index: int, key: BlockKey) -> BlockKey:
        """The parent of the block after `block_index`, whose own key is `key`: -1 for the root."""
        is_last_shared = block_index + 1 == self.num_shared_blocks
        return salted_key(key, self.salt) if is_last_shared and self._enters_later else key

    def cut(self, num_blocks: int) -> "Salting":
        """The same once all blocks but the first `num_blocks` were given up.

        What the stream goes on with is its own, and not the prompt that is shared.
        """
        if num_blocks >= self.num_shared_blocks:
            return self
        return Salting(self.salt, num_blocks, was_cut=True)


def root_key(weights: bytes, spec: KVSpec, rope: bytes, salt: bytes = b"") -> BlockKey:
    """The parent of a stream's first block.

    Args:
        weights: fingerprint of the loaded parameters.
        spec: layout of the KV; its hash, dtype and block size count.
        rope: identity of the rotation (frequencies, rotated dimensions, scaling).
        salt: tenant of the stream; empty for prompts that the operator marks shared.
    """
    version = struct.pack("<I", FORMAT_VERSION)
    block_size = struct.pack("<I", spec.block_size)
    fields = (
        b"root",
        version,
        weights,
        spec.spec_hash,
        spec.dtype.encode(),
        rope,
        block_size,
        salt,
    )
    return _key(fields, partial=False)


def child_key(parent: BlockKey, token_ids: Sequence[int], policy: bytes) -> BlockKey:
    """The key of a sealed block.

    Args:
        parent: key of the block before it, or the root key.
        token_ids: all tokens of the block.
        policy: `AttentionPolicy.in_force` for the block.

    Raises:
        InputError: a token id does not fit in 32 bits.
    """
    return _key((b"block", parent, policy, _id_bytes(token_ids)), partial=False)


def salted_key(parent: BlockKey, salt: bytes) -> BlockKey:
    """The parent of the first block that is not shared: `parent` is the last that is."""
    return _key((b"salt", parent, salt), partial=False)


def tenant_salt(tenant: str) -> bytes:
    """The salt of a tenant's streams: the same in every process and on every machine.

    It keeps the name out of files, not from whoever guesses it.
    """
    return hashlib.blake2b(
        tenant.encode(), digest_size=SALT_BYTES, person=b"streamkv tenant"
    ).digest()


def partial_key(
    session: str, parent: BlockKey, token_ids: Sequence[int], policy: bytes
) -> BlockKey:
    """The key of a session's open block that holds these tokens so far.

    Raises:
        InputError: a token id does not fit in 32 bits.
    """
    fields = (b"partial", session.encode(), parent, policy, _id_bytes(token_ids))
    return _key(fields, partial=True)


def is_partial(key: BlockKey) -> bool:
    """Whether a key names the record of an open block, which is worthless once superseded."""
    return bool(key[0] & 1)


def _id_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        raise InputError(
            "token_ids",
            list(token_ids),
            "an id is no whole number from 0 to 2**32 - 1",
            "Use ids of the model's vocabulary.",
        ) from None


def _key(fields: tuple[bytes, ...], *, partial: bool) -> BlockKey:
    # At once, not field by field: a look ahead makes a thousand keys.
    told = b"".join([part for field in fields for part in (_LENGTH.pack(len(field)), field)])
    value = bytearray(hashlib.blake2b(told, digest_size=KEY_BYTES).digest())
    value[0] = (value[0] & 0xFE) | partial
    return BlockKey(bytes(value))

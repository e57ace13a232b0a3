"""What a store says of itself: format version, layout, model, weights, and how it was last opened.

Invariant: a store is opened for writing only by an engine whose KV it can hold; any difference is
refused with both sides named. This module is pure: bytes in, bytes out.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from streamkv.errors import StoreFormatError
from streamkv.tiers.spec import FORMAT_VERSION, KVSpec


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Whose KV a store holds.

    Attributes:
        model: name for people.
        weights: fingerprint of the loaded weights; decides.
    """

    model: str
    weights: bytes


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """The header of a store.

    Attributes:
        spec: layout of its blocks.
        identity: model and weights.
        limit_bytes: limit of the file when last opened for writing.
        codec: codec of new records when last opened for writing.
        version: format version.
    """

    spec: KVSpec
    identity: StoreIdentity
    limit_bytes: int
    codec: str
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        """The header as stored."""
        fields = {
            "version": self.version,
            "spec": asdict(self.spec),
            "model": self.identity.model,
            "weights": self.identity.weights.hex(),
            "limit_bytes": self.limit_bytes,
            "codec": self.codec,
        }
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, packed: bytes | None, path: Path) -> "StoreFormat":
        """The header of the store at `path`.

        Raises:
            StoreFormatError: none, unreadable, or of another format version.
        """
        try:
            fields = json.loads(packed or b"")
            version = int(fields["version"])
            if version != FORMAT_VERSION:
                _refuse(path, "format version", version, FORMAT_VERSION)
            spec = KVSpec(**fields["spec"])
            identity = StoreIdentity(fields["model"], bytes.fromhex(fields["weights"]))
            return cls(spec, identity, int(fields["limit_bytes"]), str(fields["codec"]))
        except StoreFormatError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise StoreFormatError(f"{path} is not a streamkv store. {_REMEDY}") from error

    def check(self, opened: "StoreFormat", path: Path) -> None:
        """Compare this, read from the store at `path`, with what it is being opened as.

        Raises:
            StoreFormatError: another layout or other weights.
        """
        if self.identity.weights != opened.identity.weights:
            _refuse(path, "model", _describe(self.identity), _describe(opened.identity))
        if self.spec != opened.spec:
            _refuse(path, "KV layout", self.spec, opened.spec)


_REMEDY = "Use another --store: sessions belong to the model that made them."


def _describe(identity: StoreIdentity) -> str:
    return f"{identity.model} (weights {identity.weights.hex()[:16]})"


def _refuse(path: Path, what: str, stored: object, wanted: object) -> None:
    raise StoreFormatError(f"{path} holds {what} {stored}, this engine has {wanted}. {_REMEDY}")

"""Looking for bytes in every file of a store, and the bytes by which a session would be found."""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from streamkv import Engine
from streamkv.deletion import created_window
from streamkv.journal import Journal
from streamkv.sharing import salting_of
from streamkv.store import blocks_path, digests_path, journal_path
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.keys import root_key
from streamkv.tiers.record import decode_frames
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.ssd import SsdReader

SAMPLE = 24
"""Bytes of a sample: chance does not make so many."""

Traces = dict[str, list[bytes]]


def files_below(directory: Path) -> list[Path]:
    """Every file, whatever it is called."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def found_in(directory: Path, samples: Iterable[bytes]) -> set[bytes]:
    """Those of the samples that stand in a file below the directory, or in the name of one."""
    wanted, found = set(samples), set()
    for path in files_below(directory):
        content = path.read_bytes() + b"\0" + str(path.relative_to(directory)).encode()
        found |= {sample for sample in wanted - found if sample in content}
    return found


def keys_of(engine: Engine, store: Path, name: str) -> set[BlockKey]:
    """Keys of all blocks that a session has or had."""
    with Journal.read_beside(journal_path(store, name)) as journal:
        salting = salting_of(journal.header, 64)
        adapter = engine.model
        root = root_key(adapter.fingerprint, adapter.spec, adapter.rope_identity, salting.root_salt)
        keys = StreamKeys(root, 64, created_window(journal.header), salting)
        keys.read(journal.scan())
        return keys.own | keys.public


def text_and_ids(store: Path, name: str) -> Traces:
    """Samples of a session's text, and of its token ids as they lie in its journal."""
    with Journal.read_beside(journal_path(store, name)) as journal:
        records = list(journal.scan())
        ids = journal.ids(0, journal.state.num_tokens)
    text = "".join(getattr(record, "text", "") for record in records).encode()
    coded = struct.pack(f"<{len(ids)}I", *ids.tolist())
    every = range(0, len(text) - SAMPLE, SAMPLE)
    return {
        "text": [text[start : start + SAMPLE] for start in every],
        "ids": [coded[start : start + SAMPLE] for start in range(0, len(coded) - SAMPLE, SAMPLE)],
    }


def kv_of(store: Path, keys: Iterable[BlockKey]) -> Traces:
    """Keys of blocks that are stored, and samples of their bytes: as attention reads them (`kv`),
    and as they are coded.
    """
    traces: Traces = {"keys": [], "kv": [], "coded": []}
    with SsdReader(blocks_path(store)) as reader:
        spec = reader.format.spec
        for key in keys:
            with reader._snapshot() as view:
                header = view.tables.header(view.txn, key)
                if header is None:
                    continue
                coded = np.empty(header.num_bytes, dtype=np.uint8)
                view.tables.read_payload(view.txn, header, 0, coded)
                plain = np.empty((spec.num_layers, spec.frame_bytes), dtype=np.uint8)
                every = range(spec.num_layers)
                decode_frames(key, header, every, coded, plain, view.tables.codecs)
            traces["keys"].append(bytes(key))
            traces["kv"] += samples_of(plain.tobytes())
            traces["coded"] += samples_of(coded.tobytes())
    return traces


def samples_of(content: bytes) -> list[bytes]:
    """A few samples of a block, none of which chance would make.

    Of its second half: the first layer's KV is that of the token alone, whoever has it.
    """
    step = max(SAMPLE, len(content) // 10)
    half = range(len(content) // 2, len(content) - SAMPLE, step)
    cut = [content[at : at + SAMPLE] for at in half]
    return [sample for sample in cut if len(set(sample)) > SAMPLE // 2]


def digests_of(store: Path, name: str) -> Traces:
    """Samples of a session's digests."""
    path = digests_path(store, name)
    content = path.read_bytes() if path.exists() else b""
    return {"digests": [content[at : at + SAMPLE] for at in range(64, len(content) - 99, 200)]}

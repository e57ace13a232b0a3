"""Of a session that was deleted no byte is left in a compacted store, wherever one looks."""

import shutil
from pathlib import Path

import pytest
from recall_child import options, some_ids
from store_search import (
    Traces,
    digests_of,
    files_below,
    found_in,
    keys_of,
    kv_of,
    samples_of,
    text_and_ids,
)

from streamkv import Engine, SamplingParams
from streamkv.cli.app import execute
from streamkv.cli.feed_notes import FeedNote, FeedNotes
from streamkv.session_copy import BlockSource
from streamkv.store import blocks_path, digests_path, journal_path, notes_path
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.ssd import SsdReader

NAME = "victim-of-deletion"
COMMON = some_ids(5 * 64, seed=1)  # whole blocks: else KV of a block is partly that of others
SECRET = "".join(
    f"Safe number {n * 7919 % 9973} opens with {n * 104729 % 9949}.\n" for n in range(50)
)


def live_through_much(engine: Engine) -> None:
    """A session that slept, recalled, was taken back, and left open blocks behind."""
    with engine.session(NAME, tenant="acme") as session:
        session.feed([COMMON]).run()
        session.feed(SECRET).run()
        session.rewind(900)
        session.set_mode("recall")
        session.feed(SECRET).run()
        session.generate(SamplingParams(max_tokens=70, ignore_eos=True)).run()
    with engine.session(NAME) as session:
        session.feed([some_ids(130, seed=2)]).run()


def make_store(model: Path, store: Path, codec: str) -> Traces:
    """A store with the session and a neighbour; by what the session alone would be found."""
    with Engine(str(model), options(str(store), codec=codec, attention="window")) as engine:
        live_through_much(engine)
        with engine.session("neighbour", tenant="acme") as other:
            other.feed([COMMON]).run()
            other.feed([some_ids(500, seed=3)]).run()
        session = engine.session(NAME)
        session.feed([some_ids(300, seed=4)]).run()
        engine._tiers.flush()
        # A kill leaves what the checkpoint before had stored, an open block among it.
        killed = store.with_name("killed")
        shutil.copytree(store, killed)
    shutil.rmtree(store)
    killed.rename(store)
    notes = FeedNotes(notes_path(store, NAME), "x")
    notes.write(FeedNote("x", f"/home/me/{NAME}.txt", 0, 0))
    with Engine(str(model), options(str(store), codec=codec, attention="window")) as engine:
        own, others = keys_of(engine, store, NAME), keys_of(engine, store, "neighbour")
        traces = text_and_ids(store, NAME) | digests_of(store, NAME) | {"name": [NAME.encode()]}
        assert len(own & others) == 5
    shared = journal_path(store, "neighbour").read_bytes()
    shared += digests_path(store, "neighbour").read_bytes()
    for kind in ("ids", "digests"):
        traces[kind] = [sample for sample in traces[kind] if sample not in shared]
    # Blocks of equal tokens may have equal KV under different names.
    with BlockSource(blocks_path(store)) as source:
        kept = b"".join(block.tobytes() for _, block in source.read_all(stored_of(source, others)))
        read = source.read_all(stored_of(source, own - others))
    alone = [
        key
        for key, block in read
        if not any(sample in kept for sample in samples_of(block.tobytes()))
    ]
    return traces | kv_of(store, alone)


def compact(model: Path, store: Path) -> None:
    assert execute(["cache", "compact", "--model", str(model), "--store", str(store)]) == 0


def stored_of(source: BlockSource, keys: set[BlockKey]) -> list[BlockKey]:
    return [key for entry in source.entries() if (key := entry.key) in keys]


def stored_keys(store: Path) -> set[bytes]:
    with SsdReader(blocks_path(store)) as reader:
        return {bytes(entry.key) for entry in reader.entries()}


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_nothing_is_found_of_a_session_that_was_deleted(
    tiny_model_dir: Path, tmp_path: Path, codec: str
) -> None:
    store = tmp_path / "store"
    traces = make_store(tiny_model_dir, store, codec)
    for kind, samples in traces.items():
        assert len(samples) > 20 or kind == "name"
        if kind != "kv" or codec == "raw":
            # Where one record ends and the next begins a sample may lie in neither.
            there = len(found_in(store, samples)) / len(set(samples))
            assert there > 0.8, f"{kind} is found while it is there"
    before = stored_keys(store)
    with Engine(
        str(tiny_model_dir), options(str(store), codec=codec, attention="window")
    ) as engine:
        engine.session(NAME).delete()
        kept = keys_of(engine, store, "neighbour")
    compact(tiny_model_dir, store)
    for kind, samples in traces.items():
        assert found_in(store, samples) == set(), kind
    left = kv_of(store, kept)
    assert len(left["keys"]) >= 11 and set(left["keys"]) <= before
    names = {path.relative_to(store).as_posix() for path in files_below(store)}
    assert names == {
        *(f"blocks/{name}" for name in ("data.mdb", "lock.mdb", "owner.lock", "readers.lock")),
        "blocks/reserve",
        "sessions/neighbour.journal",
        "sessions/neighbour.digests",
    }
    with Engine(
        str(tiny_model_dir), options(str(store), codec=codec, attention="window")
    ) as engine:
        stats = engine.session("neighbour").stats()
        assert stats.num_computed >= stats.num_tokens - 128, "its own blocks stay"

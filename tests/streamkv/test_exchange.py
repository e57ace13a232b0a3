"""Sessions out into files, and in from them: they go on elsewhere as if nothing had happened."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import crash_child
import import_child
import pytest
from recall_child import options, seeded, some_ids

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.errors import (
    ConfigError,
    InputError,
    JournalError,
    SessionError,
    StoreError,
    StoreFullError,
)
from streamkv.session_copy import BlockSource, read_snapshot
from streamkv.session_export import export_session
from streamkv.store import blocks_path, journal_path
from streamkv.tiers.faults import inject

TEXT = "".join(f"Entry {number}: the dog sleeps on in the sun.\n" for number in range(160))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def config(store: Path | None, **others: object) -> EngineConfig:
    given = {"window_size": 128, "prefill_chunk": 64, "ssd_bytes": "64MiB", "compile": "off"}
    given |= {"cpu_bytes": "256KiB", "max_sessions": 3} | others
    return EngineConfig(store=str(store) if store else None, **given)  # type: ignore[arg-type]


def tokens_of(session: Session) -> list[int | None]:
    return [delta.token_id for delta in session.generate(GREEDY)]


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path) -> list[int | None]:
    """What an engine without a store goes on with after the text."""
    with Engine(str(tiny_model_dir), config(None)) as engine:
        session = engine.session("calm", system="You keep a diary.")
        session.feed(TEXT).run()
        session.say("What now?")
        return tokens_of(session)


@pytest.fixture(scope="module")
def exported(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a sleeping session, `diary`; its store is compacted and has it no more."""
    directory = tmp_path_factory.mktemp("exported")
    with Engine(str(tiny_model_dir), config(directory / "store")) as engine:
        with engine.session("diary", system="You keep a diary.") as session:
            session.feed(TEXT).run()
            session.say("What now?")
        done = engine.export_session("diary", directory / "diary.skv")
        assert (done.num_absent, done.needs_old) == (0, False)
        assert done.num_bytes == (directory / "diary.skv").stat().st_size
        assert done.num_blocks >= 4
        session = engine.session("diary")
        session.delete()
        engine._store.blocks.compact()  # type: ignore[union-attr]
    return directory / "diary.skv"


@pytest.mark.parametrize("name", [None, "under another name"])
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_it_goes_on_in_another_store_with_the_tokens_of_an_undisturbed_one(
    tiny_model_dir: Path,
    tmp_path: Path,
    exported: Path,
    undisturbed: list[int | None],
    name: str | None,
    tenant: str | None,
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        done = engine.import_session(exported, name, tenant=tenant)
        assert done.name == (name or "diary")
        assert done.num_unknown == 0
        session = engine.session(done.name, tenant=tenant)
        assert session.resumed
        assert (session.num_tokens, session.text_chars) == (done.num_tokens, done.text_chars)
        stats = session.stats()
        assert stats.num_computed == stats.num_tokens - 1, "nothing is computed anew"
        assert stats.counters["misses"] == 0
        assert tokens_of(session) == undisturbed
        session.close()
        session = engine.session(done.name)
        assert session.stats().num_computed == session.num_tokens - 1
        session.delete()
        assert engine.session_names() == []
        assert engine.usage()["ssd"].num_blocks == 0, "its names are known to the last block"


def test_with_all_blocks_it_recalls_and_goes_back_as_the_original_would(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Old blocks, their digests and their names in a stream that was taken back come along."""
    file, ids = tmp_path / "one.skv", some_ids(1500)
    with Engine(str(tiny_model_dir), options(str(tmp_path / "a"), attention="window")) as engine:
        session = engine.session("one")
        session.feed([ids[:1100]]).run()
        session.rewind(1000)
        session.set_mode("recall")
        session.feed([ids[1000:]]).run()
        done = engine.export_session("one", file, all_blocks=True)
        assert done.num_blocks >= 1500 // 64 - 1 and done.num_absent == 0
        lean = engine.export_session("one", tmp_path / "lean.skv")
        assert lean.needs_old and lean.num_blocks < done.num_blocks // 2
        expected = tokens_after_all(session)
        assert expected["attended"]
    with Engine(str(tiny_model_dir), options(str(tmp_path / "b"))) as engine:
        assert engine.import_session(file, "two").num_unknown == 0
        locked = engine._store.blocks.manifest("two")  # type: ignore[union-attr]
        assert len(locked) == lean.num_blocks, "old blocks may be evicted like any other"
        session = engine.session("two")
        assert session.mode == "recall"
        assert tokens_after_all(session) == expected
        assert engine.counters()["absent"] == 0
        session.delete()
        assert engine.usage()["ssd"].num_blocks == 0
        assert list((tmp_path / "b" / "sessions").iterdir()) == []


def tokens_after_all(session: Session) -> dict[str, object]:
    """What a session answers now, and after it was taken back to an old block."""
    answer = [delta.token_id for delta in session.generate(seeded(40))]
    attended = {(each.start, each.end) for each in session.attended()}
    session.rewind(700)
    computed = session.stats().num_computed
    again = [delta.token_id for delta in session.generate(seeded(20))]
    return {"answer": answer, "attended": attended, "computed": computed, "again": again}


def test_an_open_session_is_exported_as_its_journal_tells(
    tiny_model_dir: Path, tmp_path: Path, undisturbed: list[int | None]
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path / "a", checkpoint_tokens=64)) as engine:
        session = engine.session("diary", system="You keep a diary.")
        session.feed(TEXT).run()
        session.say("What now?")
        engine.export_session("diary", tmp_path / "diary.skv")
        assert tokens_of(session) == undisturbed, "the original goes on"
        # Beside the original, and again from what was imported.
        engine.import_session(tmp_path / "diary.skv", "second")
        engine.export_session("second", tmp_path / "second.skv")
        # How far the newest checkpoint lies back is a matter of the disk; what it has is kept.
        num_stored = read_snapshot(journal_path(tmp_path / "a", "second")).num_stored
        assert num_stored > 0
        with engine.session("second") as second:
            assert num_stored <= second.stats().num_computed < second.num_tokens
            assert tokens_of(second) == undisturbed
        engine.import_session(tmp_path / "second.skv", "third")
        with engine.session("third") as third:
            assert tokens_of(third) == undisturbed
        engine.session("second").delete()
        session.close()
        stats = engine.session("diary").stats()
        assert stats.num_computed == stats.num_tokens - 1, "none stands on another's blocks"


def test_what_came_in_a_file_is_shown_to_no_other_session(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Whoever made the file may have put anything under a tenant's, or a shared prompt's, names."""
    file, ids, prompt = tmp_path / "one.skv", some_ids(400), "Be brief. " * 40
    with Engine(str(tiny_model_dir), config(tmp_path / "a")) as engine:
        with engine.session("one", system=prompt, tenant="acme", shared_prompt=True) as session:
            session.feed([ids]).run()
        engine.export_session("one", file, all_blocks=True)
    with Engine(str(tiny_model_dir), config(tmp_path / "b")) as engine:
        engine.import_session(file)
        with engine.session("two", system=prompt, tenant="acme", shared_prompt=True) as session:
            session.feed([ids]).run()
        assert engine.counters()["reused_tokens"] == 0
        with pytest.raises(SessionError, match="not created for tenant 'acme'"):
            engine.session("one", tenant="acme")
    with Engine(str(tiny_model_dir), config(tmp_path / "c")) as engine:
        engine.import_session(file, tenant="acme")
        with engine.session("two", system=prompt, tenant="acme") as session:
            session.feed([ids]).run()
        assert engine.counters()["reused_tokens"] > 300, "a tenant that was named trusts the file"


def test_a_damaged_file_is_refused_wherever_the_damage_is(
    tiny_model_dir: Path, tmp_path: Path, exported: Path
) -> None:
    whole = exported.read_bytes()
    file = tmp_path / "damaged.skv"
    places = [*range(0, 300, 7), *range(300, len(whole), len(whole) // 60), len(whole) - 1]
    with Engine(str(tiny_model_dir), config(tmp_path / "store")) as engine:
        for place in places:
            flipped = bytearray(whole)
            flipped[place] ^= 0x10
            for content in (flipped, whole[:place]):
                file.write_bytes(content)
                with pytest.raises(InputError, match=r"^file='.*damaged.skv': ") as caught:
                    engine.import_session(file)
                assert caught.value.remedy
        file.write_bytes(whole + b"more")
        with pytest.raises(InputError, match="something follows its end"):
            engine.import_session(file)
        assert nothing_came(engine, tmp_path / "store")


def nothing_came(engine: Engine, store: Path) -> bool:
    """Whether a store holds nothing at all."""
    tier = engine._store.blocks  # type: ignore[union-attr]
    assert tier.manifests() == {} and tier.usage().num_blocks == 0
    assert list((store / "sessions").iterdir()) == []
    return engine.session_names() == []


def test_what_cannot_be_exchanged_is_refused_before_anything_is_made(
    tiny_model_dir: Path, tmp_path: Path, exported: Path
) -> None:
    file = tmp_path / "diary.skv"
    with Engine(str(tiny_model_dir), config(None)) as engine:
        with pytest.raises(ConfigError, match="store=None"):
            engine.import_session(exported)
        with pytest.raises(ConfigError, match="store=None"):
            engine.export_session("diary", file)
    with Engine(str(tiny_model_dir), config(tmp_path / "store")) as engine:
        with pytest.raises(JournalError, match="no such journal"):
            engine.export_session("diary", file)
        with pytest.raises(InputError, match="not a valid session name"):
            engine.import_session(exported, "../diary")
        with pytest.raises(InputError, match="an empty name"):
            engine.import_session(exported, tenant="")
        with pytest.raises(InputError, match="No such file"):
            engine.import_session(tmp_path / "none.skv")
        with pytest.raises(InputError, match="not an exported session"):
            engine.import_session(Path(__file__))
        assert nothing_came(engine, tmp_path / "store")
        engine.import_session(exported)
        with pytest.raises(InputError, match="name='diary': there is a session of this name"):
            engine.import_session(exported)
        file.write_text("mine")
        with pytest.raises(InputError, match="exists already"):
            engine.export_session("diary", file)
        assert file.read_text() == "mine"
        with pytest.raises(StoreError, match="cannot be written"):
            engine.export_session("diary", tmp_path / "missing" / "diary.skv")
        engine.export_session("diary", file, overwrite=True)
        assert file.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"store", "diary.skv"}


def test_another_model_and_another_layout_are_refused(
    tiny_model_dir: Path, narrow_model_dir: Path, tmp_path: Path, exported: Path
) -> None:
    with (
        Engine(str(narrow_model_dir), config(tmp_path / "a")) as engine,
        pytest.raises(InputError, match=r"of model .* and this engine has .*Import it with"),
    ):
        engine.import_session(exported)
    with (
        Engine(str(tiny_model_dir), config(tmp_path / "b", dtype="bfloat16")) as engine,
        pytest.raises(InputError, match="and this engine has"),
    ):
        engine.import_session(exported)


@pytest.mark.parametrize("point", ["ssd.put", "ssd.commit", "ssd.fsync"])
def test_an_import_that_fails_half_way_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path, exported: Path, point: str
) -> None:
    left = [3 if point == "ssd.put" else 1]

    def fail_later() -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(5, "Input/output error")

    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        with inject(point, fail_later), pytest.raises(StoreError):
            engine.import_session(exported)
        assert engine.session_names() == []
        if point != "ssd.commit":  # a disk that takes nothing back keeps it until the next open
            assert nothing_came(engine, tmp_path)
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        assert nothing_came(engine, tmp_path)
        engine.import_session(exported)
        assert engine.session_names() == ["diary"]


def test_a_session_that_is_larger_than_the_store_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "long.skv"
    with Engine(str(tiny_model_dir), config(tmp_path / "a")) as engine:
        engine.session("long").feed([some_ids(64 * 120)]).run()
        engine.export_session("long", file, all_blocks=True)
    with Engine(str(tiny_model_dir), config(tmp_path / "b", ssd_bytes="2MiB")) as engine:
        with pytest.raises(StoreFullError, match="Raise ssd_bytes"):
            engine.import_session(file)
        assert nothing_came(engine, tmp_path / "b")


@pytest.mark.parametrize("point", ["ssd.put", "ssd.commit", "ssd.fsync", "journal.link"])
def test_a_kill_half_way_leaves_nothing_that_looks_like_a_session(
    tiny_model_dir: Path, tmp_path: Path, exported: Path, point: str
) -> None:
    store = tmp_path / "store"
    command = [sys.executable, import_child.__file__, str(tiny_model_dir), str(store)]
    done = subprocess.run([*command, str(exported), point], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    left = [path.suffix for path in (store / "sessions").iterdir()]
    assert ".journal" not in left
    with Engine(str(tiny_model_dir), config(store)) as engine:
        assert nothing_came(engine, store)
        engine.import_session(exported)
        stats = engine.session("diary").stats()
        assert stats.num_computed == stats.num_tokens - 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_takes_no_file_and_no_session(
    tiny_model_dir: Path, tmp_path: Path, small_disk: Path, exported: Path
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path / "a", codec="raw")) as engine:
        engine.session("long").feed([some_ids(64 * 120)]).run()
        with pytest.raises(StoreError, match=r"long.skv: cannot be written \(No space left"):
            engine.export_session("long", small_disk / "long.skv", all_blocks=True)
        assert list(small_disk.iterdir()) == []
        engine.export_session("long", tmp_path / "long.skv", all_blocks=True)
    with Engine(str(tiny_model_dir), config(small_disk / "b", codec="raw")) as engine:
        (small_disk / "ballast").write_bytes(bytes(800_000))
        with pytest.raises(StoreError, match=r"Free some space|Free space"):
            engine.import_session(tmp_path / "long.skv")
        assert nothing_came(engine, small_disk / "b")
        (small_disk / "ballast").unlink()
        engine.import_session(exported)
        assert engine.session("diary").resumed


def test_it_is_exported_beside_a_process_that_feeds_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    store, file = tmp_path / "store", tmp_path / "victim.skv"
    command = [sys.executable, crash_child.__file__, str(tiny_model_dir), str(store), "all", "feed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            for _ in range(20):
                child.stdout.readline()
            with BlockSource(blocks_path(store)) as source:
                done = export_session(store, "victim", file, source, source.format)
            child.stdout.readline()
        finally:
            child.kill()
    text = crash_child.TEXT
    assert done.num_blocks > 0 and 0 < done.text_chars < 9000
    found = []
    for target, name in ((tmp_path / "b", "victim"), (None, "calm")):
        with Engine(str(tiny_model_dir), config(target)) as engine:
            if target is not None:
                engine.import_session(file)
            session = engine.session(name, system="You keep a diary.")
            assert (session.num_tokens == done.num_tokens) == (target is not None)
            session.feed(text[session.text_chars : 9000]).run()
            found.append(tokens_of(session))
    assert found[0] == found[1]

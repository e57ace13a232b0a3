"""Looking at and cleaning up the blocks of a real store."""

from pathlib import Path

import numpy as np
import pytest
from cli_runner import Run

from streamkv.store import blocks_path, journal_path
from streamkv.tiers.keys import is_partial
from streamkv.tiers.ssd import open_existing

TEXT = "".join(f"Line {n} of the text that fills some blocks.\n" for n in range(60))


@pytest.fixture
def filled(run: Run, small: list[str], tmp_path: Path) -> None:
    """A store with one session of many blocks, uncompressed."""
    (tmp_path / "text").write_text(TEXT)
    assert run("session", "feed", "a", tmp_path / "text", *small, "--codec", "raw").code == 0


def flip_a_byte_of_a_block(store: Path) -> str:
    """Damage the newest whole block in the store's file."""
    with open_existing(blocks_path(store)) as tier:
        *_, key = (entry.key for entry in tier.entries() if not is_partial(entry.key))
        block = np.empty(tier.spec.block_bytes, dtype=np.uint8)
        assert tier.read(key, block)
    path = blocks_path(store) / "data.mdb"
    content = bytearray(path.read_bytes())
    place = content.find(block[-192:-128].tobytes())
    assert place > 0
    content[place] ^= 1
    path.write_bytes(content)
    return key.hex()


def test_a_summary_counts_what_is_stored(
    run: Run, where: list[str], store: Path, filled: None
) -> None:
    ran = run("cache", "ls", *where, "--json").json
    assert ran["store"] == str(store)
    assert ran["codecs"] == {"raw": ran["num_blocks"]}
    assert ran["sessions"] == {"a": ran["num_locked"]}
    assert 0 < ran["num_locked"] < ran["num_blocks"]
    assert ran["live_bytes"] <= ran["file_bytes"] <= ran["limit_bytes"] == 20 * 2**30
    assert ran["owner"] is None
    text = run("cache", "ls", *where).out
    assert "of at most 20.0 GiB" in text and "locked" in text


def test_every_block_is_listed(run: Run, where: list[str], filled: None) -> None:
    summary = run("cache", "ls", *where, "--json").json
    blocks = run("cache", "ls", "--blocks", *where, "--json").json_lines
    assert len(blocks) == summary["num_blocks"]
    assert sum(bool(block["sessions"]) for block in blocks) == summary["num_locked"]
    assert {block["kind"] for block in blocks} == {"block", "partial"}
    assert len(run("cache", "ls", "--blocks", *where).out.splitlines()) == len(blocks)


def test_a_sound_store_verifies(run: Run, where: list[str], filled: None) -> None:
    ran = run("cache", "verify", *where, "--json")
    assert ran.code == 0
    assert ran.json["ok"] is True
    assert ran.json["num_journals"] == 1
    assert ran.json["num_blocks"] > 10


def test_a_flipped_byte_is_found(run: Run, where: list[str], store: Path, filled: None) -> None:
    key = flip_a_byte_of_a_block(store)
    ran = run("cache", "verify", *where, "--json")
    assert ran.code == 1
    assert list(ran.json["bad_blocks"]) == [key]
    text = run("cache", "verify", *where)
    assert text.code == 1
    assert f"damaged block {key}: " in text.out


def test_a_damaged_journal_is_found(run: Run, where: list[str], store: Path, filled: None) -> None:
    path = journal_path(store, "a")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ran = run("cache", "verify", *where, "--json")
    assert ran.code == 1
    assert "damaged record at byte" in ran.json["bad_journals"]["a"]


@pytest.mark.parametrize("damage", ["version", "noise", "half", "empty"])
def test_a_file_of_blocks_that_cannot_be_read_is_damage_with_its_remedy(
    run: Run, where: list[str], store: Path, filled: None, damage: str
) -> None:
    path = blocks_path(store) / "data.mdb"
    content = bytearray(path.read_bytes())
    if damage == "version":
        content[20] ^= 0x55
        content[4096 + 20] ^= 0x55
    elif damage == "noise":
        content[: 2 * 4096] = bytes(range(256)) * 32
    content = content[: {"half": len(content) // 2, "empty": 0}.get(damage, len(content))]
    path.write_bytes(content)
    ran = run("cache", "verify", *where, "--json")
    assert ran.code == 1 and not ran.json["ok"]
    assert "Delete that directory" in ran.json["tables"] or "delete that" in ran.json["tables"]
    assert ran.json["num_journals"] == 1 and not ran.json["bad_journals"]


def test_unlocked_blocks_are_removed(run: Run, where: list[str], filled: None) -> None:
    before = run("cache", "ls", *where, "--json").json
    ran = run("cache", "rm", "--all-unlocked", "--yes", *where, "--json")
    assert ran.json["removed_blocks"] == before["num_blocks"] - before["num_locked"]
    assert run("cache", "ls", *where, "--json").json["num_blocks"] == before["num_locked"]


def test_a_session_without_its_blocks_goes_on_the_same(
    run: Run, small: list[str], where: list[str], filled: None, tmp_path: Path
) -> None:
    run("session", "feed", "b", tmp_path / "text", *small)
    greedy = ["--temperature", "0", "--max-tokens", "8", "--json"]
    undisturbed = run("chat", "b", *small, *greedy, stdin="what?\n")
    assert run("cache", "rm", "a", *where).code == 0
    assert "a" not in run("cache", "ls", *where, "--json").json["sessions"]
    assert run("cache", "rm", "--all-blocks", "--yes", *where).code == 0
    assert run("cache", "ls", *where, "--json").json["num_blocks"] == 0
    assert run("chat", "a", *small, *greedy, stdin="what?\n").json == undisturbed.json


def test_compacting_gives_the_room_back(run: Run, where: list[str], filled: None) -> None:
    before = run("cache", "ls", *where, "--json").json["file_bytes"]
    run("cache", "rm", "--all-blocks", "--yes", *where)
    ran = run("cache", "compact", *where, "--json").json
    assert ran["gained_bytes"] > 0
    assert ran["file_bytes"] == before - ran["gained_bytes"]


def test_a_whole_store_is_removed_but_nothing_beside_it(
    run: Run, where: list[str], store: Path, filled: None
) -> None:
    (store / "mine.txt").write_text("keep")
    ran = run("cache", "rm", "--whole-store", "--yes", *where, "--json")
    assert ran.json["deleted_sessions"] == ["a"]
    assert [path.name for path in store.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rm"], "say exactly one thing to remove"),
        (["rm", "a", "--all-unlocked"], "say exactly one thing to remove"),
        (["rm", "--all-blocks"], "Add --yes."),
        (["rm", "zz"], "no blocks are stored for it"),
    ],
)
def test_an_unclear_removal_is_2(
    run: Run, where: list[str], filled: None, args: list[str], message: str
) -> None:
    ran = run("cache", *args, *where)
    assert ran.code == 2
    assert message in ran.err


@pytest.mark.parametrize("command", ["ls", "verify", "compact"])
def test_no_store_is_4(run: Run, where: list[str], command: str) -> None:
    ran = run("cache", command, *where)
    assert ran.code == 4
    assert "there is none" in ran.err

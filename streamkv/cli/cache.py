"""`streamkv cache`: the blocks of a store, looked at and cleaned up, without the model.

`ls` and `verify` read beside an engine that writes; `rm` and `compact` want the store for
themselves and name its owner when they do not get it. Blocks are a cache: a session without them
computes its window anew.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkv.cli.cache_check import StoreCheck, check_store
from streamkv.cli.cache_view import (
    StoreSummary,
    describe_entry,
    open_reader,
    open_writer,
    summarize_store,
)
from streamkv.cli.confirm import confirm
from streamkv.cli.console import Output
from streamkv.cli.exit_codes import ExitCode
from streamkv.cli.options import DtypeOption, JsonOption, ModelOption, StoreOption, YesOption
from streamkv.cli.places import chosen_store
from streamkv.config import format_size
from streamkv.errors import InputError
from streamkv.journal import delete_journal
from streamkv.model_files import DEFAULT_MODEL
from streamkv.store import journal_path, session_names
from streamkv.store_cleaning import clean_store, drop_superseded
from streamkv.tiers.ssd import SsdReader, SsdTier

DELETED_AT_ONCE = 256
STORE_PARTS = ("sessions", "feeds", "summaries", "blocks")


def make_app() -> typer.Typer:
    """The commands of `streamkv cache`."""
    app = typer.Typer(help="Stored blocks: list, verify, remove, compact.", rich_markup_mode=None)
    app.command("ls")(ls)
    app.command()(verify)
    app.command()(rm)
    app.command()(compact)
    return app


def ls(
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    blocks: Annotated[bool, typer.Option("--blocks", help="List every block.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a store holds; may run beside an engine."""
    output = Output(as_json)
    path = chosen_store(model, store, dtype)
    with open_reader(path) as reader:
        if blocks:
            _list_blocks(reader, output)
        else:
            _show_summary(summarize_store(reader, path), output)


def verify(
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every block and journal and compare checksums; may run beside an engine.

    Exits with 1 if anything is damaged. A damaged block is computed anew when it is needed.
    """
    output = Output(as_json)
    check = check_store(chosen_store(model, store, dtype), output)
    _show_check(check, output)
    if not check.ok:
        raise typer.Exit(ExitCode.FOUND_PROBLEM)


def rm(
    names: Annotated[
        list[str] | None, typer.Argument(help="Sessions whose blocks to remove.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    all_unlocked: Annotated[
        bool, typer.Option("--all-unlocked", help="Remove all blocks that no resume needs.")
    ] = False,
    all_blocks: Annotated[
        bool, typer.Option("--all-blocks", help="Remove every block; sessions stay.")
    ] = False,
    whole_store: Annotated[
        bool, typer.Option("--whole-store", help="Remove the store with all its sessions.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove stored blocks; sessions stay and compute their window anew when they resume.

    Blocks removed by NAME are those that the resume of that session needs.
    """
    output = Output(as_json)
    path = chosen_store(model, store, dtype)
    _require_one_choice(names, all_unlocked, all_blocks, whole_store)
    if whole_store:
        _remove_store(path, yes, output)
        return
    with open_writer(path) as tier:
        before = tier.usage().num_blocks
        if names:
            _forget_sessions(tier, names)
        else:
            confirm(f"Remove blocks of {path}?", yes)
            _delete_blocks(tier, path, keep_locked=all_unlocked)
        removed = before - tier.usage().num_blocks
    output.line(f"Removed {removed:,} blocks; streamkv cache compact makes the file smaller.")
    output.json({"store": str(path), "removed_blocks": removed})


def compact(
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rewrite the store's file: without free pages, and nothing of what was deleted."""
    output = Output(as_json)
    path = chosen_store(model, store, dtype)
    with open_writer(path) as tier:
        before = tier.file_bytes()
        clean_store(path / "sessions", tier, session_names(path))
        drop_superseded(tier)
        with output.busy(f"Rewriting {format_size(before)} ..."):
            gained = tier.compact()
    output.line(f"{format_size(before)} became {format_size(before - gained)}.")
    output.json({"store": str(path), "file_bytes": before - gained, "gained_bytes": gained})


def _require_one_choice(names: list[str] | None, *flags: bool) -> None:
    if sum((bool(names), *flags)) != 1:
        raise InputError(
            "what",
            names or "",
            "say exactly one thing to remove",
            "Give session names, or --all-unlocked, --all-blocks or --whole-store.",
        )


def _forget_sessions(tier: SsdTier, names: Iterable[str]) -> None:
    known = tier.manifests()
    for name in names:
        if name not in known:
            raise InputError(
                "name", name, "no blocks are stored for it", "streamkv cache ls lists sessions."
            )
    for name in names:
        tier.delete_session(name)


def _delete_blocks(tier: SsdTier, path: Path, *, keep_locked: bool) -> None:
    if not keep_locked:
        for session in tier.manifests():
            tier.set_manifest(session, [])
    doomed = [entry.key for entry in tier.entries() if not (keep_locked and entry.sessions)]
    for start in range(0, len(doomed), DELETED_AT_ONCE):
        tier.delete(doomed[start : start + DELETED_AT_ONCE])
    tier.sync()


def _remove_store(path: Path, yes: bool, output: Output) -> None:
    names = session_names(path)
    confirm(f"Delete {path} with {len(names)} sessions for good?", yes)
    # Holding the lock of the blocks keeps engines out while the rest goes.
    with open_writer(path):
        for name in names:
            delete_journal(journal_path(path, name))
        for part in STORE_PARTS:
            shutil.rmtree(path / part, ignore_errors=True)
    with contextlib.suppress(OSError):  # what else lies there is not ours
        path.rmdir()
    output.line(f"Deleted {path} with {len(names)} sessions.")
    output.json({"store": str(path), "deleted_sessions": names})


def _list_blocks(reader: SsdReader, output: Output) -> None:
    for entry in reader.entries():
        shown = describe_entry(entry)
        locked = ", ".join(entry.sessions) or "-"
        size = format_size(entry.num_bytes)
        output.line(f"{shown['key']}  {shown['kind']:7}  {size:>10}  {entry.codec:7}  {locked}")
        output.json(shown)


def _show_summary(summary: StoreSummary, output: Output) -> None:
    limit, size = summary.limit_bytes, summary.file_bytes
    share = f"{size / limit:.0%}" if limit else "no limit"
    output.columns(
        [
            ("store", summary.store),
            ("model", summary.model),
            ("blocks", f"{summary.num_blocks:,} of {format_size(summary.block_bytes)} each"),
            ("file", f"{format_size(size)} of at most {format_size(limit)} ({share})"),
            ("live", f"{format_size(summary.live_bytes)}, compression {summary.ratio:.2f}"),
            ("locked", f"{summary.num_locked:,} blocks, which resumes need"),
            ("writer", f"process {summary.owner}" if summary.owner else "none"),
        ]
    )
    codecs = [(name, f"{count:,}") for name, count in summary.codecs.items()]
    output.columns(codecs, ("codec", "blocks"))
    sessions = [(name, f"{count:,}") for name, count in summary.sessions.items()]
    output.columns(sessions, ("session", "locked blocks"))
    output.json(dataclasses.asdict(summary) | {"ratio": summary.ratio})


def _show_check(check: StoreCheck, output: Output) -> None:
    output.line(
        f"{check.num_blocks:,} blocks read, {len(check.bad_blocks)} damaged; "
        f"{check.num_journals} journals read, {len(check.bad_journals)} damaged"
    )
    for key, fault in check.bad_blocks.items():
        output.line(f"damaged block {key}: {fault}", "red")
    for name, fault in check.bad_journals.items():
        output.line(f"damaged journal of session {name!r}: {fault}", "red")
    if check.tables:
        output.line(f"damaged tables: {check.tables}", "red")
    result: dict[str, Any] = dataclasses.asdict(check)
    output.json(result | {"ok": check.ok})

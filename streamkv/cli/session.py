"""`streamkv session`: sessions of a store, listed, fed, forked, rewound and exchanged.

`ls` and `show` read journals beside whoever writes them, without the model.
"""

import dataclasses
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkv.cli.cache_view import open_writer
from streamkv.cli.confirm import confirm
from streamkv.cli.console import Output
from streamkv.cli.feed import Feeder
from streamkv.cli.opening import open_engine, resumable
from streamkv.cli.options import (
    DtypeOption,
    EngineOptions,
    JsonOption,
    ModelOption,
    SharedPromptOption,
    StoreOption,
    SystemOption,
    TenantOption,
    YesOption,
    with_engine,
)
from streamkv.cli.places import chosen_store
from streamkv.cli.progress import format_duration
from streamkv.cli.session_expire import ExpireAfterOption, expire, seconds_given
from streamkv.cli.session_files import export, import_
from streamkv.cli.session_view import SessionView, view_session, view_sessions
from streamkv.cli.text_file import TextFile, stdin_lines
from streamkv.config import format_size
from streamkv.errors import ConfigError, InputError, ModelError
from streamkv.journal import delete_journal
from streamkv.model_files import DEFAULT_MODEL
from streamkv.names import validate_session_name
from streamkv.store import delete_companions, journal_path, session_names

NameArgument = Annotated[str, typer.Argument(help="The session.")]


def make_app() -> typer.Typer:
    """The commands of `streamkv session`."""
    app = typer.Typer(
        help="Sessions of a store: list, show, remove, feed, fork, rewind, export, import, expire.",
        rich_markup_mode=None,
    )
    app.command("ls")(ls)
    app.command()(show)
    app.command()(rm)
    app.command()(feed)
    app.command()(fork)
    app.command()(rewind)
    app.command()(export)
    app.command("import")(import_)
    app.command()(expire)
    return app


def ls(
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    expire_after: ExpireAfterOption = None,
    as_json: JsonOption = False,
) -> None:
    """List sessions, open and sleeping; may run beside an engine."""
    output = Output(as_json)
    path = chosen_store(model, store, dtype)
    otherwise_s = seconds_given("expire_after", expire_after)
    views = list(view_sessions(path))
    rows = [
        (
            view.name,
            f"{view.num_tokens:,}",
            f"{view.text_chars:,}",
            _state(view),
            _age(view),
            _expiry(view.expires_s(otherwise_s)),
        )
        for view in views
    ]
    output.columns(rows, ("name", "tokens", "characters fed", "state", "changed", "expires"))
    if not views:
        output.line(f"No sessions in {path}.")
    output.json({"store": str(path), "sessions": [_listed(view, otherwise_s) for view in views]})


def show(
    name: NameArgument,
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one session; may run beside an engine."""
    output = Output(as_json)
    path = chosen_store(model, store, dtype)
    _require_known(path, name)
    view = view_session(path, name)
    output.columns(
        [
            ("name", view.name),
            ("state", _state(view)),
            ("model", view.model),
            ("tokens", f"{view.num_tokens:,}"),
            ("characters fed", f"{view.text_chars:,}"),
            ("window", f"{view.window_size:,} tokens"),
            ("sink tokens", f"{view.num_sink_tokens:,}"),
            ("mode", view.mode),
            ("needs", _needed(view)),
            ("stored up to token", f"{view.checkpoint_token_index:,}"),
            ("created", _date(view.created_s)),
            ("changed", _date(view.changed_s)),
            ("journal", f"{view.journal}, {format_size(view.journal_bytes)}"),
            ("digests", format_size(view.digest_bytes)),
            ("most tokens", _own_limit(view.session_tokens)),
            ("expires", _own_expiry(view)),
        ]
    )
    output.json({"store": str(path), **_as_json(view)})


def _listed(view: SessionView, otherwise_s: float | None) -> dict[str, Any]:
    return _as_json(view) | {"expires_s": view.expires_s(otherwise_s)}


def _expiry(expires_s: float | None) -> str:
    if expires_s is None:
        return "-"
    left_s = expires_s - time.time()
    return f"in {format_duration(left_s)}" if left_s > 0 else "now"


def _own_limit(session_tokens: int | None) -> str:
    return f"{session_tokens:,}" if session_tokens is not None else "as the engine says"


def _own_expiry(view: SessionView) -> str:
    if view.expire_after_s is None:
        return "as the engine says"
    expires_s = view.expires_s(None)
    return _expiry(expires_s) if expires_s is not None else "never"


def _needed(view: SessionView) -> str:
    """Options without which an engine refuses a session."""
    return f"--recall-blocks {view.recall_blocks} or more" if view.recall_blocks else "nothing"


@with_engine
def rm(
    options: EngineOptions,
    name: NameArgument,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a session: its journal and all of its blocks."""
    output = Output(as_json)
    _require_known(options.store, name)
    confirm(f"Delete session {name!r} for good?", yes)
    view = view_session(options.store, name)
    try:
        if view.problem:
            _delete_unreadable(options.store, name)
        else:
            with open_engine(options, output) as engine, engine.session(name) as session:
                session.delete()
    except (ConfigError, ModelError) as error:
        # Nobody needs a model to be rid of a session.
        output.note(f"No engine opens ({error}), so its older blocks stay until they are evicted.")
        _delete_unreadable(options.store, name)
    output.line(f"Deleted session {name!r} of {view.num_tokens:,} tokens.")
    output.json({"deleted": name, "num_tokens": view.num_tokens})


@with_engine
def feed(
    options: EngineOptions,
    name: NameArgument,
    files: Annotated[list[str], typer.Argument(help="Text files, UTF-8; - is standard input.")],
    system: SystemOption = None,
    tenant: TenantOption = None,
    shared_prompt: SharedPromptOption = False,
    again: Annotated[
        bool, typer.Option("--again", help="Read files from the start, also if read before.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read files into a session, each once: after a kill the same command goes on."""
    output = Output(as_json)
    validate_session_name(name)
    _require_files(files)
    with (
        resumable(output, f"streamkv session feed {name} ..., the same command"),
        open_engine(options, output) as engine,
        engine.session(name, system=system, tenant=tenant, shared_prompt=shared_prompt) as session,
    ):
        feeder = Feeder(session, options.store, output)
        for file in files:
            if file == "-":
                feeder.feed_pieces(stdin_lines(newline=""), "standard input")
            else:
                feeder.feed(Path(file).expanduser(), again=again)


@with_engine
def fork(
    options: EngineOptions,
    name: NameArgument,
    new_name: Annotated[str, typer.Argument(metavar="NEW", help="The session to be made.")],
    as_json: JsonOption = False,
) -> None:
    """Make a second session with the same past; from there each goes its own way."""
    output = Output(as_json)
    _require_known(options.store, name)
    validate_session_name(new_name)
    if new_name in session_names(options.store):
        raise InputError(
            "new", new_name, f"there is one in {options.store}", "Use another name, or rm it first."
        )
    with open_engine(options, output) as engine, engine.session(name) as session:
        Feeder(session, options.store, output).fork(new_name)
        num_tokens = session.num_tokens
    output.line(f"Session {new_name!r} goes on from token {num_tokens:,} of {name!r}.")
    output.json({"session": name, "fork": new_name, "num_tokens": num_tokens})


@with_engine
def rewind(
    options: EngineOptions,
    name: NameArgument,
    token_index: Annotated[int, typer.Argument(help="Tokens to be left, at least 1.")],
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """End a session at an earlier token again; later tokens are forgotten."""
    output = Output(as_json)
    _require_known(options.store, name)
    view = view_session(options.store, name)
    if not view.problem:
        _require_token(token_index, view.num_tokens)
        num_tokens = view.num_tokens - token_index
        confirm(f"Forget the last {num_tokens:,} tokens of session {name!r} for good?", yes)
    with open_engine(options, output) as engine, engine.session(name) as session:
        before = session.num_tokens
        session.rewind(token_index)
        left = session.text_chars
    output.line(
        f"Session {name!r} ends at token {token_index:,} again, after {left:,} characters fed; "
        f"{before - token_index:,} tokens are forgotten."
    )
    output.json(
        {
            "session": name,
            "num_tokens": token_index,
            "num_forgotten": before - token_index,
            "text_chars": left,
        }
    )


def _require_token(token_index: int, num_tokens: int) -> None:
    """Refuse what is no token of the session before the model is loaded."""
    if not 0 < token_index <= num_tokens:
        remedy = f"Use a whole number from 1 to {num_tokens}." if num_tokens else "It is empty."
        raise InputError("token_index", token_index, "outside the stream", remedy)


def _require_files(files: list[str]) -> None:
    """Refuse every file that cannot be read before anything is, and before the model is loaded."""
    for file in files:
        path = Path(file).expanduser()
        if file == "-":
            continue
        if path.is_dir():
            raise InputError(
                "file", file, "a directory", "Give the files in it, such as DIR/*.txt."
            )
        if not path.exists():
            raise InputError("file", file, "no such file", "Check the path.")
        if path.is_file():
            TextFile.check(path)


def _delete_unreadable(store: Path, name: str) -> None:
    """Delete a session of which no engine can tell the blocks; what is not locked ages out."""
    with open_writer(store) as tier:
        tier.delete_session(name)
        delete_companions(store, name)
        delete_journal(journal_path(store, name))


def _require_known(store: Path, name: str) -> None:
    validate_session_name(name)
    if name not in session_names(store):
        raise InputError(
            "name", name, f"no such session in {store}", "streamkv session ls lists them."
        )


def _as_json(view: SessionView) -> dict[str, Any]:
    return dataclasses.asdict(view) | {"journal": str(view.journal)}


def _state(view: SessionView) -> str:
    if view.problem:
        return f"damaged: {view.problem}"
    return f"open in process {view.owner}" if view.owner else "sleeping"


def _age(view: SessionView) -> str:
    return f"{format_duration(max(time.time() - view.changed_s, 0.0))} ago"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")

"""`streamkv session expire`: sessions that have slept for long, deleted."""

import time
from typing import Annotated

import typer

from streamkv.cli.confirm import confirm
from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine
from streamkv.cli.options import EngineOptions, JsonOption, YesOption, with_engine
from streamkv.cli.progress import format_duration
from streamkv.cli.session_view import view_sessions
from streamkv.config import parse_duration
from streamkv.expiry import Sleeper, is_due, sleepers

ExpireAfterOption = Annotated[
    str | None,
    typer.Option(
        "--expire-after",
        help="What the engine is opened with: when sessions expire that say nothing themselves.",
    ),
]


def seconds_given(field: str, duration: str | None) -> float | None:
    """Seconds of an option; `None` if it was not given."""
    return parse_duration(field, duration) if duration is not None else None


@with_engine
def expire(
    options: EngineOptions,
    older_than: Annotated[
        str, typer.Option("--older-than", help="Of sleep, such as 30d, 12h or 90min.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List them only; may run beside an engine.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete sessions that have slept for longer, but for those made to be kept for ever."""
    output = Output(as_json)
    older_than_s = parse_duration("older_than", older_than)
    awake = {view.name for view in view_sessions(options.store) if view.owner is not None}
    due = [
        each
        for each in sleepers(options.store, None, time.time())
        if is_due(each, older_than_s) and each.name not in awake
    ]
    deleted: list[str] = []
    _show(due, output)
    if due and not dry_run:
        confirm(f"Delete {len(due)} sessions for good?", yes)
        with open_engine(options, output) as engine:
            deleted = engine.expire(older_than_s)
        output.line(f"Deleted {len(deleted)} sessions.")
    output.json({"due": [each.name for each in due], "deleted": deleted})


def _show(due: list[Sleeper], output: Output) -> None:
    if not due:
        output.line("No session has slept for so long.")
    rows = [(each.name, format_duration(each.slept_s)) for each in due]
    output.columns(rows, ("name", "asleep for"))

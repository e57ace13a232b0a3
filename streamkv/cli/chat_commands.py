"""What can be typed in a chat besides turns: lines that begin with a slash."""

import textwrap
from collections.abc import Callable
from pathlib import Path

from streamkv.cli.feed import Feeder
from streamkv.cli.stats import show_stats, stats_as_json
from streamkv.config import ATTENTIONS
from streamkv.errors import ConfigError, InputError

HELP = (
    ("/stats", "tokens, window and tiers"),
    ("/keep TEXT", "add TEXT to what is attended for ever"),
    ("/feed FILE", "read a file into the session, each file once"),
    ("/fork NAME", "make a second session that goes on from here by itself"),
    ("/rewind N", "forget all after the first N tokens; /stats says how many there are"),
    ("/mode", "how the session attends"),
    ("/mode MODE", "attend by MODE from here on: window, recall or full"),
    ("/recalled", "what the last answer attended to besides the window"),
    ("/system", "how the session began"),
    ("/save", "where the session is (it is always saved)"),
    ("/help", "this list"),
    ("/quit", "leave; so does Ctrl-D"),
    ("//...", "a turn that begins with a slash"),
)

TEXT_CHARS = 90
"""Of a recalled block that are shown to people; scripts get all."""

SlashCommand = Callable[[str, Feeder], None]


def run_slash_command(line: str, feeder: Feeder) -> bool:
    """Carry out a line that begins with a slash; False if it asks to leave.

    Args:
        line: as typed.
        feeder: holds the session and the output.

    Raises:
        InputError: no such command, or its argument is missing or bad.
    """
    word, _, argument = line.partition(" ")
    if word in ("/quit", "/exit"):
        return False
    command = _COMMANDS.get(word)
    if command is None:
        raise InputError("command", word, "there is none", "/help lists all; // begins a turn.")
    command(argument.strip(), feeder)
    return True


def _help(argument: str, feeder: Feeder) -> None:
    feeder.output.columns(HELP)


def _stats(argument: str, feeder: Feeder) -> None:
    stats = feeder.session.stats()
    show_stats(stats, feeder.output)
    feeder.output.json(stats_as_json(stats))


def _keep(argument: str, feeder: Feeder) -> None:
    if not argument:
        raise InputError("command", "/keep", "no text", "Write /keep TEXT.")
    feeder.session.keep(argument + "\n")
    feeder.output.note(
        f"Kept; {feeder.session.stats().num_sink_tokens} tokens are attended for ever."
    )


def _feed(argument: str, feeder: Feeder) -> None:
    if not argument:
        raise InputError("command", "/feed", "no file", "Write /feed FILE.")
    feeder.feed(Path(argument).expanduser())


def _fork(argument: str, feeder: Feeder) -> None:
    if not argument:
        raise InputError("command", "/fork", "no name", "Write /fork NAME.")
    feeder.fork(argument)
    feeder.output.line(f"{argument!r} goes on from here too: streamkv chat {argument!r}")


def _rewind(argument: str, feeder: Feeder) -> None:
    before = feeder.session.num_tokens
    try:
        token_index = int(argument)
    except ValueError:
        remedy = f"Write /rewind N, a whole number from 1 to {before}."
        raise InputError("command", "/rewind", "no number of tokens", remedy) from None
    feeder.session.rewind(token_index)
    feeder.output.note(f"{before - token_index:,} tokens are forgotten, {token_index:,} are left.")


def _mode(argument: str, feeder: Feeder) -> None:
    if argument and argument not in ATTENTIONS:
        remedy = f"Write /mode and one of {', '.join(ATTENTIONS)}."
        raise InputError("command", f"/mode {argument}", "there is no such mode", remedy)
    if argument:
        try:
            feeder.session.set_mode(argument)
        except ConfigError as error:
            if argument != "recall":
                raise
            remedy = "Leave, and begin the chat again with --recall-blocks 16."
            raise InputError("command", "/mode recall", error.problem, remedy) from error
    feeder.output.note(f"The session is in mode {feeder.session.mode!r}.")


def _recalled(argument: str, feeder: Feeder) -> None:
    recalled = feeder.session.attended()
    if not recalled:
        feeder.output.note("Nothing was recalled for the last answer.")
    rows = [
        (
            f"{block.start:,} to {block.end - 1:,}",
            "" if block.weight is None else f"{block.weight:.1%}",
            textwrap.shorten(block.text, TEXT_CHARS, placeholder="..."),
        )
        for block in recalled
    ]
    feeder.output.columns(rows, ("tokens", "weight", "text"))
    feeder.output.json({"recalled": [block._asdict() for block in recalled]})


def _system(argument: str, feeder: Feeder) -> None:
    stats = feeder.session.stats()
    feeder.output.line(
        f"{stats.num_sink_tokens} tokens from the start are attended for ever. A system prompt is "
        "given when a session begins: streamkv chat NAME --system TEXT"
    )


def _save(argument: str, feeder: Feeder) -> None:
    feeder.output.line(
        f"Every token is saved before it is shown: streamkv chat {feeder.session.name}"
    )


_COMMANDS: dict[str, SlashCommand] = {
    "/help": _help,
    "/stats": _stats,
    "/keep": _keep,
    "/feed": _feed,
    "/fork": _fork,
    "/rewind": _rewind,
    "/mode": _mode,
    "/recalled": _recalled,
    "/system": _system,
    "/save": _save,
}

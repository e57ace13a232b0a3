"""The commands, and what an error looks like.

Every error that streamkv raises on purpose is one `error: ...` line on standard error and an exit
status of `ExitCode`; anything else is our own bug and shows its traceback. No command handles
errors itself.
"""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import streamkv
from streamkv.cli import bench, cache, session
from streamkv.cli.chat import chat
from streamkv.cli.console import print_error, warnings_as_lines
from streamkv.cli.demo import demo
from streamkv.cli.doctor import doctor
from streamkv.cli.exit_codes import ExitCode, exit_code_of
from streamkv.cli.options import flag_of
from streamkv.cli.plan import plan
from streamkv.cli.serve import serve
from streamkv.cli.summarize_cmd import summarize
from streamkv.errors import StreamKVError

# The class of all errors of usage lies in a private place that moves with typer's versions.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

EPILOG = (
    "Exit status: 0 done; 1 a check found a problem; 2 bad option, input or state; 3 model; "
    "4 store or journal; 5 server; 70 a bug; 130 interrupted."
)


def make_app() -> typer.Typer:
    """The typer application with all commands."""
    app = typer.Typer(
        name="streamkv",
        help="Language models that read or talk without end.",
        epilog=EPILOG,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_global_options)
    app.command()(demo)
    app.command()(chat)
    app.command()(serve)
    app.command()(summarize)
    app.add_typer(session.make_app(), name="session")
    app.add_typer(bench.make_app(), name="bench")
    app.command()(doctor)
    app.command()(plan)
    app.add_typer(cache.make_app(), name="cache")
    return app


def execute(args: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status.

    Args:
        args: without the program's name; `None`: those of the process.
    """
    try:
        with warnings_as_lines():
            code = make_app()(args=args, prog_name="streamkv", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except StreamKVError as error:
        print_error(_as_given(error))
        return exit_code_of(error)
    except _UsageError as error:
        print_error(f"{_message(error)} See: {_help_command(error)}")
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception:
        traceback.print_exc()
        print_error("this is a bug of streamkv. Sessions resume from what was journaled.")
        return ExitCode.BUG


def _as_given(error: StreamKVError) -> str:
    """What an error says, of an option by its name on the command line."""
    text, field = str(error), getattr(error, "field", None)
    flag = flag_of(field) if isinstance(field, str) else None
    if flag is None or not text.startswith(f"{field}="):
        return text
    return flag + text.removeprefix(str(field))


def _message(error: Exception) -> str:
    text: str = getattr(error, "format_message", error.__str__)()
    return text if text.endswith((".", "?", ")")) else text + "."


def _help_command(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'streamkv'} --help"


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"streamkv {streamkv.__version__}\n")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Language models that read or talk without end."""

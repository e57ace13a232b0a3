"""`streamkv chat`: an endless conversation in the terminal, or over a pipe.

Invariant: whatever was shown is in the session's journal, so a conversation goes on by its name
after any end. Ctrl-C stops an answer, and leaves when pressed again before the next input.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from streamkv.cli.chat_commands import run_slash_command
from streamkv.cli.console import Output
from streamkv.cli.feed import Feeder
from streamkv.cli.opening import open_engine, resumable
from streamkv.cli.options import (
    EngineOptions,
    JsonOption,
    SharedPromptOption,
    SystemOption,
    TenantOption,
    with_engine,
    with_sampling,
)
from streamkv.cli.text_file import stdin_lines
from streamkv.errors import AbsentBlockError, ConfigError, InputError, PoolFullError
from streamkv.names import validate_session_name
from streamkv.outputs import Delta
from streamkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from streamkv.session import Session

DEFAULT_NAME = "chat"
PROMPT = "> "


@with_engine
@with_sampling
def chat(
    options: EngineOptions,
    params: SamplingParams,
    name: Annotated[str, typer.Argument(help="The session; it resumes if it exists.")] = (
        DEFAULT_NAME
    ),
    system: SystemOption = None,
    tenant: TenantOption = None,
    shared_prompt: SharedPromptOption = False,
    as_json: JsonOption = False,
) -> None:
    """Talk with the model for ever; the session resumes by its name.

    From a pipe every line is a turn. /help lists what can be typed besides.
    """
    output = Output(as_json)
    validate_session_name(name)
    with (
        resumable(output, f"streamkv chat {name}"),
        open_engine(options, output) as engine,
        engine.session(name, system=system, tenant=tenant, shared_prompt=shared_prompt) as session,
    ):
        _greet(output, session)
        feeder = Feeder(session, options.store, output)
        Conversation(session, feeder, params, output).run()


GOES_ON = (InputError, ConfigError, PoolFullError, AbsentBlockError)
"""After these a person goes on otherwise: with another line, or in another mode."""


class Conversation:
    """Turns of a person and answers of the model, one after the other.

    Args:
        session: open; who opened it closes it.
        feeder: reads files into it.
        params: of every answer.
        output: of the command.
    """

    def __init__(
        self, session: "Session", feeder: Feeder, params: SamplingParams, output: Output
    ) -> None:
        self._session = session
        self._feeder = feeder
        self._params = params
        self._output = output
        self._interrupted = False

    def run(self) -> None:
        """Until the input ends, /quit, or a second Ctrl-C, which is raised."""
        interactive = sys.stdin.isatty() and not self._output.as_json
        lines = _typed_lines() if interactive else stdin_lines()
        while True:
            try:
                line = next(lines)
                self._interrupted = False
                if not self._handle(line):
                    return
            except StopIteration:
                return
            except KeyboardInterrupt:
                if self._interrupted or not interactive:
                    raise
                self._interrupted = True
                self._output.note("\nStopped. Ctrl-C again or /quit leaves.")
                lines = _typed_lines()
            except GOES_ON as error:
                if not interactive:
                    raise
                self._output.note(f"error: {error}")

    def _handle(self, line: str) -> bool:
        """Carry out one line; False if it asks to leave."""
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            return run_slash_command(text, self._feeder)
        if text:
            self._answer(text.removeprefix("/") if text.startswith("//") else line.rstrip("\n"))
        return True

    def _answer(self, text: str) -> None:
        self._session.say(text)
        deltas: list[Delta] = []
        answer = self._session.generate(self._params)
        try:
            for delta in answer:
                deltas.append(delta)
                self._output.fragment(delta.text)
        finally:
            answer.close()
            self._output.line()
        reason = deltas[-1].finish_reason
        self._output.json(
            {
                "role": "assistant",
                "text": "".join(delta.text for delta in deltas),
                "num_tokens": sum(delta.token_id is not None for delta in deltas),
                "token_index": deltas[-1].token_index,
                "finish_reason": reason.value if reason is not None else None,
            }
        )


def _greet(output: Output, session: "Session") -> None:
    if session.resumed:
        output.note(f"Session {session.name!r} goes on at token {session.num_tokens:,}.")
    elif sys.stdin.isatty():
        output.note(f"New session {session.name!r}. /help lists commands, Ctrl-D leaves.")


def _typed_lines() -> Iterator[str]:
    """Lines typed at the prompt, with editing and history, until Ctrl-D."""
    import readline  # noqa: F401  # input() uses it once it is imported

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            return

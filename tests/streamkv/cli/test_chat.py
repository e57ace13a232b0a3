"""Conversations over a pipe and at a prompt, with the real engine."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Ran, Run

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.cli.console import Output

GREEDY = ["--temperature", "0", "--max-tokens", "8"]


def test_each_line_of_a_pipe_is_a_turn(run: Run, small: list[str]) -> None:
    ran = run("chat", "diary", *small, *GREEDY, stdin="hello\n\nand now?\n")
    assert ran.code == 0
    assert ran.out.count("\n") >= 2
    assert ran.err == ""


def test_json_has_one_answer_per_line(run: Run, small: list[str]) -> None:
    ran = run("chat", "diary", *small, *GREEDY, "--json", stdin="hello\nand now?\n")
    first, second = ran.json_lines
    assert first["role"] == "assistant"
    assert first["num_tokens"] == second["num_tokens"] == 8
    assert first["finish_reason"] == "length"
    assert second["token_index"] > first["token_index"]
    assert ran.err == ""


def test_a_conversation_goes_on_by_its_name(run: Run, small: list[str]) -> None:
    whole = run("chat", "whole", *small, *GREEDY, "--json", stdin="one\ntwo\n")
    run("chat", "parts", *small, *GREEDY, stdin="one\n")
    rest = run("chat", "parts", *small, *GREEDY, "--json", stdin="two\n")
    assert rest.json == whole.json_lines[1]
    assert "goes on at token" in run("chat", "parts", *small, stdin="").err


def test_a_system_prompt_may_be_shared(run: Run, small: list[str]) -> None:
    prompt = ["--system", "Answer in one word, and be kind. " * 12, "--shared-prompt"]
    run("chat", "one", *small, *GREEDY, *prompt, "--tenant", "a", stdin="one\n")
    ran = run("chat", "two", *small, *GREEDY, *prompt, "--tenant", "b", stdin="/stats\n")
    assert "reused_tokens" not in ran.out
    ran = run("chat", "two", *small, *GREEDY, stdin="one\n/stats\n")
    assert "reused_tokens" in ran.out and "gate_reads" in ran.out
    ran = run("chat", "none", *small, *GREEDY, "--shared-prompt", stdin="one\n")
    assert ran.code == 2 and "no system prompt to share" in ran.err


def test_the_answer_is_the_engines(run: Run, small: list[str], tiny_model_dir: Path) -> None:
    ran = run("chat", "a", *small, *GREEDY, "--json", stdin="one\n")
    with (
        Engine(str(tiny_model_dir), EngineConfig(window_size=128)) as engine,
        engine.session("a") as session,
    ):
        session.say("one")
        deltas = session.generate(SamplingParams(temperature=0.0, max_tokens=8)).run()
    assert ran.json["text"] == "".join(delta.text for delta in deltas)


def test_commands_begin_with_a_slash(run: Run, small: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The moon is full.\n")
    lines = f"/help\n/feed {tmp_path / 'notes.txt'}\n/stats\n/system\n/save\n/quit\nnever said\n"
    ran = run("chat", "a", *small, *GREEDY, stdin=lines)
    assert ran.code == 0
    assert "/keep TEXT" in ran.out
    assert "attended: 4 sink tokens" in ran.out
    assert "streamkv chat a" in ran.out
    assert "notes.txt: 18 characters" in ran.err


def test_kept_text_becomes_sink_tokens(run: Run, small: list[str]) -> None:
    ran = run("chat", "a", *small, "--json", stdin="/keep The moon.\n/stats\n")
    assert ran.json["num_sink_tokens"] > 4


def test_a_conversation_is_forked_and_rewound(run: Run, small: list[str]) -> None:
    lines = "/keep The moon is full.\n/fork b\n/rewind 3\n/stats\n"
    ran = run("chat", "a", *small, "--json", stdin=lines)
    assert ran.code == 0
    assert ran.json["num_tokens"] == 3
    forked = run("chat", "b", *small, "--json", stdin="/stats\n")
    assert forked.json["num_tokens"] > 3
    told = run("chat", "b", *small, stdin="/fork c\n/rewind 2\n")
    assert "streamkv chat 'c'" in told.out
    assert "2 are left." in told.err


def test_a_conversation_tells_what_it_recalled(run: Run, where: list[str]) -> None:
    """Read in one mode, answered in another."""
    recalls = [*where, "--window", "192", "--recall-blocks", "2"]
    said = "word " * 700
    lines = f"{said}\n/recalled\n/mode recall\nWhich word?\n/mode window\n/recalled\n"
    ran = run("chat", "a", *recalls, *GREEDY, stdin=lines)
    assert ran.code == 0
    assert "Nothing was recalled" in ran.err and "mode 'recall'" in ran.err
    assert "mode 'window'" in ran.err
    assert "%" in ran.out and "weight" in ran.out
    told = run("chat", "b", *recalls, *GREEDY, "--json", stdin=lines)
    recalled = json.loads(told.out.splitlines()[-1])["recalled"]
    assert [sorted(each) for each in recalled] == [["end", "start", "text", "weight"]] * 2


def test_two_slashes_begin_a_turn(run: Run, small: list[str]) -> None:
    told = run("chat", "a", *small, *GREEDY, "--json", stdin="//quit\n")
    said = run("chat", "b", *small, *GREEDY, "--json", stdin=" /quit\n")
    assert told.json["num_tokens"] == 8
    assert (said.code, said.out) == (0, "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/frob", "command='/frob': there is none."),
        ("/keep", "command='/keep': no text."),
        ("/feed", "command='/feed': no file."),
        ("/fork", "command='/fork': no name."),
        ("/fork a", "name='a': there is a session of this name."),
        ("/rewind", "command='/rewind': no number of tokens."),
        ("/mode recal", "command='/mode recal': there is no such mode."),
        ("/mode recall", "command='/mode recall': the engine has no room for recalled blocks."),
        ("/rewind 5", "token_index=5: outside the stream."),
        ("/feed nowhere.txt", "file='nowhere.txt': No such file or directory."),
        ("a\udcff", "stdin='a\\udcff\\n': line 1 is not UTF-8."),
    ],
)
def test_a_bad_line_of_a_pipe_ends_with_2(
    run: Run, small: list[str], line: str, message: str
) -> None:
    ran = run("chat", "a", *small, stdin=line + "\n")
    assert ran.code == 2
    assert ran.err.startswith(f"error: {message}")


def test_a_bad_name_is_refused_before_the_model_is_loaded(run: Run) -> None:
    ran = run("chat", "../up", "--model", "no such model")
    assert ran.code == 2
    assert ran.err.startswith("error: name='../up': not a valid session name.")


def test_a_system_prompt_is_kept_and_cannot_change(run: Run, small: list[str]) -> None:
    run("chat", "a", *small, "--system", "You keep my diary.", stdin="")
    again = run("chat", "a", *small, "--system", "You are a pirate.", stdin="")
    assert again.code == 2
    assert "another system prompt" in again.err


class Prompt(io.StringIO):
    """A terminal at which these lines are typed; `^C` is Ctrl-C."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline()
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


Typed = Callable[[str], Ran]


@pytest.fixture
def typed(run: Run, small: list[str]) -> Typed:
    """Run a chat at a prompt."""
    return lambda text: run("chat", "a", *small, *GREEDY, stdin=Prompt(text))


def test_a_mistake_at_the_prompt_does_not_end_the_chat(typed: Typed) -> None:
    ran = typed("/frob\nhello\n")
    assert ran.code == 0
    assert "error: command='/frob'" in ran.err
    assert len(ran.out) > len("> > > ")


def test_a_mode_that_cannot_be_does_not_end_the_chat(run: Run, small: list[str]) -> None:
    """What an option would help with is named by its option."""
    lines = "hello\n/mode foo\n/mode recall\n/mode\n/mode full\nhello\n/mode\n"
    ran = run("chat", "a", *small, *GREEDY, stdin=Prompt(lines))
    assert ran.code == 0
    assert "error: command='/mode foo': there is no such mode." in ran.err
    assert "begin the chat again with --recall-blocks 16" in ran.err
    assert ran.err.count("The session is in mode 'window'.") == 1
    assert ran.err.count("The session is in mode 'full'.") == 2


def test_a_stream_that_outgrows_the_pool_stays_at_the_prompt(run: Run, small: list[str]) -> None:
    lines = f"{'hello there ' * 400}\n/mode full\n/mode\nhello\n"
    ran = run("chat", "a", *small, *GREEDY, "--gpu-bytes", "500KiB", stdin=Prompt(lines))
    assert ran.code == 0, ran.err
    assert "error: mode 'full' needs room for" in ran.err
    assert "The session is in mode 'window'." in ran.err


def test_ctrl_c_twice_leaves_and_says_how_to_go_on(typed: Typed) -> None:
    ran = typed("hello\n^C\n^C\n")
    assert ran.code == 130
    assert "Ctrl-C again or /quit leaves." in ran.err
    assert "Go on with: streamkv chat a" in ran.err


def test_ctrl_c_once_stays(typed: Typed) -> None:
    ran = typed("^C\nhello\n^C\n/quit\n")
    assert ran.code == 0


def test_ctrl_c_stops_the_answer_only(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed_at_the_third(fragments: Iterator[int]) -> Callable[[Output, str], None]:
        def fragment(output: Output, text: str) -> None:
            if next(fragments) == 2:
                raise KeyboardInterrupt

        return fragment

    monkeypatch.setattr(Output, "fragment", pressed_at_the_third(iter(range(100))))
    ran = typed("hello\n/stats\nand now?\n")
    assert ran.code == 0
    assert ran.err.count("Stopped.") == 1
    assert "tokens; attended" in ran.out


@dataclass(frozen=True)
class Talking:
    """A chat in another process that has answered one turn."""

    process: subprocess.Popen[str]
    answer: dict[str, Any]


@pytest.fixture
def other(small: list[str]) -> Iterator[Talking]:
    command = [sys.executable, "-m", "streamkv", "chat", "a", *small, *GREEDY, "--json"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        yield Talking(process, json.loads(process.stdout.readline()))
        process.kill()


def test_beside_another_process_and_after_its_kill(
    run: Run, small: list[str], where: list[str], other: Talking
) -> None:
    owner = f"process {other.process.pid}"

    refused = run("chat", "b", *small, stdin="hi\n")
    assert refused.code == 4
    assert owner in refused.err and "--store" in refused.err

    listed = run("session", "ls", *where, "--json").json
    assert [session["owner"] for session in listed["sessions"]] == [other.process.pid]
    assert run("cache", "ls", *where, "--json").json["owner"] == other.process.pid
    assert run("cache", "verify", *where).code == 0
    compacted = run("cache", "compact", *where)
    assert compacted.code == 4 and owner in compacted.err

    os.kill(other.process.pid, signal.SIGKILL)
    other.process.wait()
    shown = run("session", "show", "a", *where, "--json").json
    assert shown["owner"] is None
    assert shown["num_tokens"] == other.answer["token_index"] + 1

    resumed = run("chat", "a", *small, *GREEDY, "--json", stdin="and now?\n")
    whole = run("chat", "w", *small, *GREEDY, "--json", stdin="hello\nand now?\n")
    assert resumed.json == whole.json_lines[1]

"""`streamkv serve` in front of the real engine."""

import os
import queue
import signal
import socket
import threading

import pytest
from cli_runner import Run

from streamkv import connect
from streamkv.cli.console import Output


def test_sessions_are_served_until_a_signal(
    run: Run, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: queue.Queue[str] = queue.Queue()
    outcome: queue.Queue[object] = queue.Queue()
    print_json = Output.json

    def notice(output: Output, value: dict[str, object]) -> None:
        print_json(output, value)
        ready.put(str(value["url"]))

    def talk() -> None:
        url = ready.get(timeout=60)
        try:
            with connect(url) as client:
                client.open("web")
                deltas = list(client.say("hello", max_tokens=8, ignore_eos=True, token_ids=True))
                outcome.put(len({delta.token_id for delta in deltas} - {None}) > 0)
        except BaseException as error:
            outcome.put(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Output, "json", notice)
    client = threading.Thread(target=talk)
    client.start()
    ran = run("serve", *small, "--port", 0, "--json")
    client.join()
    monkeypatch.undo()
    assert ran.code == 0
    assert ran.json["url"].startswith("ws://127.0.0.1:")
    assert outcome.get() is True


def test_a_port_in_use_is_5(run: Run, small: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run("serve", *small, "--port", taken.getsockname()[1])
    assert ran.code == 5
    assert "Use another port" in ran.err


def test_a_bad_port_is_2(run: Run, small: list[str]) -> None:
    assert run("serve", *small, "--port", 70000).code == 2

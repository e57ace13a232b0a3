"""The server in front of the real engine, with the tiny model."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from wire import wire

from streamkv.config import EngineConfig
from streamkv.engine import Engine
from streamkv.sampling_params import SamplingParams
from streamkv.ws_server.async_client import aconnect
from streamkv.ws_server.client import connect
from streamkv.ws_server.messages import DoneReason
from streamkv.ws_server.server import Server, ServerConfig

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
TEXT = "".join(
    f"Line {n}: the window holds the newest tokens, 東京 {n * n} 🙂.\n" for n in range(40)
)
SERVE = """
import sys
from streamkv.config import EngineConfig
from streamkv.engine import Engine
from streamkv.ws_server.server import serve

config = EngineConfig(window_size=128, prefill_chunk=32, store=sys.argv[2])
with Engine(sys.argv[1], config) as engine:
    serve(engine, port=0, ready=lambda url: print(url, flush=True))
"""


def engine_config(store: Path | None) -> EngineConfig:
    return EngineConfig(
        window_size=128, prefill_chunk=32, store=None if store is None else str(store)
    )


def with_server(engine: Engine, test: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Server(engine, ServerConfig(port=0)) as server:
            await test(server)

    asyncio.run(main())


def alone(model_dir: Path, text: str, max_tokens: int) -> list[int | None]:
    """Token ids of the answer to `text` from the Python API, in an engine of its own."""
    with (
        Engine(str(model_dir), engine_config(None)) as engine,
        engine.session("alone") as session,
    ):
        session.say(text)
        params = SamplingParams(max_tokens=max_tokens, **GREEDY)
        return [delta.token_id for delta in session.generate(params)]


def test_a_turn_over_the_wire_is_the_turn_of_the_python_api(tiny_model_dir: Path) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            params = {"max_tokens": 30, **GREEDY}
            await client.send("say", text="Hello 🙂", params=params, token_ids=True)
            *deltas, done = await client.until("done")
            ids = [delta["token_id"] for delta in deltas if "token_id" in delta]
            assert ids == alone(tiny_model_dir, "Hello 🙂", 30)
            assert (done["reason"], done["usage"]["output_tokens"]) == ("length", 30)
            seqs = [delta["seq"] for delta in deltas]
            assert seqs == sorted(set(seqs))

    with Engine(str(tiny_model_dir), engine_config(None)) as engine:
        with_server(engine, test)


def test_a_turn_that_stops_at_its_first_token_kills_nothing(tiny_model_dir: Path) -> None:
    [first_id] = alone(tiny_model_dir, "Hi", 1)

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            done = await client.ask(
                "say", text="Hi", params={"temperature": 0.0, "stop_ids": [first_id]}
            )
            assert (done["type"], done["reason"]) == ("done", "stop")
            await client.send("say", text="Hi", params={"max_tokens": 5, **GREEDY})
            done = (await client.until("done"))[-1]
            assert (done["reason"], done["usage"]["output_tokens"]) == ("length", 5)

    with Engine(str(tiny_model_dir), engine_config(None)) as engine:
        with_server(engine, test)


def test_sessions_at_once_answer_as_they_would_alone(tiny_model_dir: Path) -> None:
    texts = [f"Question {number}" for number in range(3)]

    async def talk(url: str, text: str) -> list[int | None]:
        async with await aconnect(url) as client:
            await client.open(text)
            deltas = client.say(text, token_ids=True, max_tokens=20, **GREEDY)
            return [delta.token_id async for delta in deltas if delta.token_id is not None]

    async def test(server: Server) -> None:
        answers = await asyncio.gather(*(talk(server.url, text) for text in texts))
        assert answers == [alone(tiny_model_dir, text, 20) for text in texts]

    with Engine(str(tiny_model_dir), engine_config(None)) as engine:
        with_server(engine, test)


def test_a_cancelled_turn_leaves_the_session_usable(tiny_model_dir: Path) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            opened = await client.open("a")
            await client.send("say", text="Go on", params=GREEDY, token_ids=True)
            await client.receive()
            await client.send("cancel")
            *deltas, done = await client.until("done")
            assert done["reason"] == "cancelled"
            assert done["usage"]["output_tokens"] == len(deltas) + 1
            usage = done["usage"]
            assert (
                done["token_index"]
                == opened["token_index"] + usage["input_tokens"] + usage["output_tokens"]
            )
            await client.send("say", text="And now?", params={"max_tokens": 3, **GREEDY})
            assert (await client.until("done"))[-1]["reason"] == "length"

    with Engine(str(tiny_model_dir), engine_config(None)) as engine:
        with_server(engine, test)


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ({"kind": "generate"}, "session_state", None),
        ({"kind": "feed", "text": ""}, "bad_input", "items"),
        ({"kind": "feed", "ids": [10**6]}, "bad_input", None),
        ({"kind": "say", "text": ""}, "bad_input", "text"),
        ({"kind": "say", "text": "x", "params": {"top_p": 2}}, "bad_option", "top_p"),
    ],
)
def test_what_the_engine_refuses_is_told(
    tiny_model_dir: Path, message: dict[str, Any], code: str, field: str | None
) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            error = await client.ask(**message)
            assert (error["type"], error["code"]) == ("error", code)
            assert field is None or error["field"] == field
            assert error["remedy"]

    with Engine(str(tiny_model_dir), engine_config(None)) as engine:
        with_server(engine, test)


def test_a_session_open_in_python_is_refused(tiny_model_dir: Path) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            assert (await client.open("mine"))["code"] == "session_state"
            assert (await client.open("yours"))["type"] == "opened"

    with (
        Engine(str(tiny_model_dir), engine_config(None)) as engine,
        engine.session("mine"),
    ):
        with_server(engine, test)


def test_an_engine_that_closes_under_a_turn_is_told(tiny_model_dir: Path) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="Go on", params=GREEDY)
            await client.receive()
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            assert (await client.until("error"))[-1]["code"] in ("going_away", "session_state")
            await closing

    with Engine(str(tiny_model_dir), engine_config(None)) as engine:
        with_server(engine, test)


def test_a_feeder_goes_on_where_a_lost_connection_left_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def begin(server: Server) -> None:
        async with wire(server) as client:
            await client.open("log")
            await client.send("feed", text=TEXT[:1500])
            await client.receive()
            client.websocket.transport.abort()

    answers = []

    async def go_on(server: Server) -> None:
        async with await aconnect(server.url) as client:
            opened = await client.open("log")
            assert opened.resumed
            assert 0 < opened.text_chars <= 1500
            async for _ in client.feed(TEXT[opened.text_chars :]):
                pass
            assert (await client.stats())["text_chars"] == len(TEXT)
            deltas = client.generate(token_ids=True, max_tokens=20, **GREEDY)
            answers.append([delta.token_id async for delta in deltas])

    for test in (begin, go_on):
        with Engine(str(tiny_model_dir), engine_config(tmp_path)) as engine:
            with_server(engine, test)
    with (
        Engine(str(tiny_model_dir), engine_config(None)) as engine,
        engine.session("undisturbed") as session,
    ):
        session.feed(TEXT).run()
        params = SamplingParams(max_tokens=20, **GREEDY)
        assert answers == [[delta.token_id for delta in session.generate(params)]]


def test_a_terminated_server_keeps_all_that_its_client_saw(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    program = [sys.executable, "-c", SERVE, tiny_model_dir, tmp_path]
    ids = []
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with connect(process.stdout.readline().strip()) as client:
                client.open("diary")
                for delta in client.say("Go on", token_ids=True, **GREEDY):
                    ids.append(delta.token_id)
                    if len(ids) == 5:
                        process.send_signal(signal.SIGTERM)
                done = client.last_done
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert done is not None and done.reason is DoneReason.GOING_AWAY
    with (
        Engine(str(tiny_model_dir), engine_config(tmp_path)) as engine,
        engine.session("diary") as session,
    ):
        assert session.resumed
        assert session.num_tokens == done.token_index
    assert ids == alone(tiny_model_dir, "Go on", len(ids))

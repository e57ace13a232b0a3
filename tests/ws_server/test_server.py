"""The server over real sockets, with an engine that follows a script."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from websockets.exceptions import ConnectionClosed, InvalidStatus
from wire import Wire, deaf_wire, wire

from streamkv.errors import ConfigError, ServerError
from streamkv.ws_server.server import Server, ServerConfig, aserve


def with_server(
    test: Callable[[Server], Coroutine[Any, Any, None]],
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> None:
    """Run `test` beside a server on a free port."""

    async def main() -> None:
        async with Server(engine or ScriptedEngine(), ServerConfig(port=0, **options)) as server:
            await test(server)

    asyncio.run(main())


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["text"] for message in messages if message["type"] == "delta")


async def until_true(condition: Callable[[], bool]) -> None:
    """Let the server's tasks run until something has happened (pytest's timeout is the limit)."""
    while not condition():
        await asyncio.sleep(0.001)


def test_a_turn_is_opened_deltas_done() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            assert await client.open("diary", id=1, system="Be brief.") == {
                "type": "opened",
                "id": 1,
                "session": "diary",
                "token_index": 0,
                "text_chars": 0,
                "resumed": False,
                "model": "script",
                "version": 1,
            }
            await client.send("say", id=2, text="hello", params={"max_tokens": 3})
            *deltas, done = await client.until("done")
            assert deltas == [
                {"type": "delta", "id": 2, "seq": 10, "text": "0 ", "token_index": 5},
                {"type": "delta", "id": 2, "seq": 12, "text": "1 ", "token_index": 6},
                {"type": "delta", "id": 2, "seq": 14, "text": "2 ", "token_index": 7},
            ]
            timings = done.pop("timings")
            assert done == {
                "type": "done",
                "id": 2,
                "reason": "length",
                "token_index": 8,
                "text_chars": 0,
                "usage": {"input_tokens": 5, "output_tokens": 3},
            }
            assert 0 <= timings["first_delta_s"] <= timings["total_s"]

    engine = ScriptedEngine()
    with_server(test, engine)
    assert engine.sessions["diary"].system == "Be brief."
    assert not engine.sessions["diary"].is_open


def test_token_ids_come_on_request() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="x", params={"max_tokens": 2}, token_ids=True)
            messages = await client.until("done")
            assert [message.get("token_id") for message in messages] == [1001, 1002, None]

    with_server(test)


def test_characters_arrive_whole_and_empty_deltas_not_at_all() -> None:
    pieces = ["日", "", "本 ", "🙂", "", "👩‍👩‍👧 ", "naïve\u2028\x00"]

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="x")
            *deltas, done = await client.until("done")
            assert [delta["text"] for delta in deltas] == [piece for piece in pieces if piece]
            assert (done["reason"], done["usage"]["output_tokens"]) == ("stop", 7)

    with_server(test, ScriptedEngine(lambda text: pieces))


def test_an_answer_of_no_tokens_is_done_and_the_session_goes_on() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            for _ in range(2):
                done = await client.ask("say", text="x")
                assert (done["type"], done["reason"]) == ("done", "stop")
                assert done["usage"] == {"input_tokens": 1, "output_tokens": 0}
                assert "first_delta_s" not in done["timings"]

    with_server(test, ScriptedEngine(lambda text: []))


def test_a_feed_is_acknowledged_by_tokens_and_characters() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("feed", id=1, text="123456")
            *progress, done = await client.until("done")
            assert [message["num_tokens"] for message in progress] == [4, 6]
            assert [message["text_chars"] for message in progress] == [4, 6]
            assert (done["reason"], done["token_index"], done["text_chars"]) == ("fed", 6, 6)
            await client.send("feed", id=2, ids=[7, 8])
            *_, done = await client.until("done")
            assert (done["token_index"], done["text_chars"]) == (8, 6)

    engine = ScriptedEngine()
    with_server(test, engine)
    assert engine.sessions["a"].ids == [7, 8]


def test_a_session_resumes_by_name_and_seq_goes_on_growing() -> None:
    async def test(server: Server) -> None:
        seqs = []
        for opened in [(0, 0, False), (7, 0, True)]:
            async with wire(server) as client:
                answer = await client.open("diary")
                assert (
                    answer["token_index"],
                    answer["text_chars"],
                    answer["resumed"],
                ) == opened
                await client.send("say", text="hello", params={"max_tokens": 2})
                seqs += [message["seq"] for message in (await client.until("done"))[:-1]]
                assert (await client.ask("close", id=9)) == {
                    "type": "done",
                    "id": 9,
                    "reason": "closed",
                }
        assert seqs == sorted(set(seqs)) and len(seqs) == 4

    with_server(test)


def test_cancel_ends_the_turn_and_leaves_the_session_usable() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", id=1, text="go on")
            await client.receive()
            await client.send("cancel")
            *deltas, done = await client.until("done")
            assert (done["id"], done["reason"]) == (1, "cancelled")
            # What the client saw is what the session remembers.
            assert done["usage"]["output_tokens"] == len(deltas) + 1
            await client.send("say", id=2, text="again", params={"max_tokens": 1})
            assert (await client.until("done"))[-1]["reason"] == "length"

    with_server(test)


def test_cancel_of_nothing_is_harmless() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.send("cancel")
            await client.open("a")
            await client.send("cancel")
            await client.send("say", text="x", params={"max_tokens": 1})
            assert (await client.until("done"))[-1]["reason"] == "length"

    with_server(test)


def test_cancel_ends_a_feed_between_steps() -> None:
    gate = asyncio.Semaphore(1)

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("feed", text="0123456789")
            assert (await client.receive())["text_chars"] == 4
            await client.send("cancel")
            await client.ask("stats")
            gate.release()
            *_, done = await client.until("done")
            assert (done["reason"], done["text_chars"]) == ("cancelled", 8)

    with_server(test, ScriptedEngine(gate=gate))


def test_one_request_at_a_time_but_stats_at_any_time() -> None:
    gate = asyncio.Semaphore(1)

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", id=1, text="x", params={"max_tokens": 2})
            await client.receive()
            for kind in ("generate", "delete", "close"):
                refused = await client.ask(kind, id=2)
                assert (refused["code"], refused["id"]) == ("busy", 2)
            stats = await client.ask("stats", id=3)
            assert (stats["stats"]["name"], stats["stats"]["num_tokens"]) == ("a", 2)
            gate.release()
            assert (await client.until("done"))[-1]["id"] == 1

    with_server(test, ScriptedEngine(gate=gate))


def test_delete_forgets_the_session() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("feed", text="abc")
            await client.until("done")
            assert (await client.ask("delete"))["reason"] == "deleted"
            opened = await client.open("a")
            assert (opened["resumed"], opened["text_chars"]) == (False, 0)

    with_server(test)


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ({"type": "say", "text": "x"}, "not_open", None),
        ({"type": "stats"}, "not_open", None),
        ({"type": "open", "version": 1, "session": "../etc"}, "bad_input", "name"),
        ({"type": "open", "version": 9, "session": "a"}, "unsupported_version", "version"),
        ({"type": "shout"}, "unknown_type", "type"),
        ({"type": "say", "text": "x", "loud": 1}, "bad_message", "loud"),
    ],
)
def test_what_is_wrong_before_open_is_told(
    message: dict[str, Any], code: str, field: str | None
) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.websocket.send(json.dumps(message))
            error = await client.receive()
            assert (error["type"], error["code"], error.get("field")) == ("error", code, field)
            assert error["message"] and error["remedy"]
            assert (await client.open("a"))["type"] == "opened"

    with_server(test)


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ({"type": "open", "version": 1, "session": "b"}, "already_open", None),
        ({"type": "feed", "text": ""}, "bad_input", "items"),
        ({"type": "say", "text": "fail"}, "session_state", None),
        ({"type": "generate", "params": {"temprature": 1}}, "bad_option", "temprature"),
        ({"type": "generate", "params": {"max_tokens": 0}}, "bad_option", "max_tokens"),
        ({"type": "generate", "params": {"temperature": "hot"}}, "bad_option", "temperature"),
        ({"type": "generate", "params": {"temperature": None}}, "bad_option", "temperature"),
    ],
)
def test_what_is_wrong_after_open_is_told_and_the_session_goes_on(
    message: dict[str, Any], code: str, field: str | None
) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.websocket.send(json.dumps({**message, "id": 5}))
            error = await client.receive()
            assert (error["id"], error["code"], error.get("field")) == (5, code, field)
            await client.send("say", text="x", params={"max_tokens": 1})
            assert (await client.until("done"))[-1]["reason"] == "length"

    with_server(test)


@pytest.mark.parametrize("frame", ["", "{", "[" * 50_000, b"\x00\xff", '{"type":3}', "null"])
def test_garbage_is_answered_and_the_connection_stays(frame: str | bytes) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.websocket.send(frame)
            assert (await client.receive())["type"] == "error"
            assert (await client.open("a"))["type"] == "opened"

    with_server(test)


def test_a_failure_of_ours_shows_nothing_of_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            error = await client.ask("say", id=1, text="bug")
            assert error["code"] == "internal"
            assert "secret" not in json.dumps(error)
            await client.send("say", text="x", params={"max_tokens": 1})
            assert (await client.until("done"))[-1]["reason"] == "length"

    with_server(test)
    assert "ZeroDivisionError" in caplog.text


def test_logs_hold_no_conversation(caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="my secret", params={"max_tokens": 1})
            await client.until("done")

    with caplog.at_level(logging.DEBUG, logger="streamkv"):
        with_server(test)
    assert not [
        record
        for record in caplog.records
        if record.name.startswith("streamkv") and "my secret" in record.getMessage()
    ]


def test_an_oversize_message_closes_with_1009_and_others_go_on() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as other, wire(server, max_size=None) as client:
            await other.open("b")
            await client.open("a")
            await client.websocket.send("x" * ((1 << 20) + 1))
            with pytest.raises(ConnectionClosed) as caught:
                await client.receive()
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
            await other.send("say", text="x", params={"max_tokens": 1})
            assert (await other.until("done"))[-1]["reason"] == "length"
            async with wire(server) as again:
                assert (await again.open("a"))["resumed"] is True

    with_server(test)


def test_a_second_opener_is_refused_until_the_first_leaves() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as second, wire(server) as first:
            await first.open("a")
            refused = await second.open("a")
            assert refused["code"] == "session_in_use"
            assert (await second.open("b"))["type"] == "opened"
            await second.ask("close")
            await first.ask("close")
            assert (await second.open("a"))["type"] == "opened"

    with_server(test)


def test_a_client_that_vanishes_stops_its_turn_and_frees_its_session() -> None:
    engine = ScriptedEngine()

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="go on")
            await client.receive()
            client.websocket.transport.abort()
        session = engine.sessions["a"]
        await until_true(lambda: not session.is_open)
        num_generated = session.num_generated
        async with wire(server) as again:
            opened = await again.open("a")
            assert (opened["resumed"], opened["text_chars"]) == (True, 0)
            assert session.num_generated == num_generated

    with_server(test, engine)


def test_a_client_that_vanishes_in_the_middle_of_a_step_keeps_its_session_until_the_step_ends() -> (
    None
):
    gate = asyncio.Semaphore(0)
    engine = ScriptedEngine(gate=gate)

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="go on")
            await until_true(lambda: engine.num_waiting == 1)
        async with wire(server) as second:
            assert (await second.open("a"))["code"] == "session_in_use"
            gate.release()
            await until_true(lambda: not engine.sessions["a"].is_open)
            assert (await second.open("a"))["type"] == "opened"
        assert engine.sessions["a"].num_generated == 1

    with_server(test, engine)


def test_a_client_that_never_reads_stands_still_and_slows_nobody() -> None:
    engine = ScriptedEngine(lambda text: iter(lambda: "x" * 4096, None))

    async def test(server: Server) -> None:
        async with deaf_wire(server) as deaf, wire(server) as client:
            await deaf.open("deaf")
            await deaf.send("say", text="go on")
            await client.open("a")
            await client.send("say", text="x", params={"max_tokens": 2000})
            messages = await client.until("done")
            assert len(messages) == 2001
            # 4 KiB each: what the sockets hold, and no more, was computed ahead.
            assert 0 < engine.sessions["deaf"].num_generated < 200
            # When it reads at last, nothing is missing.
            await deaf.send("cancel")
            *deltas, done = await deaf.until("done")
            assert done["reason"] == "cancelled"
            assert len(deltas) == engine.sessions["deaf"].num_generated

    with_server(test, engine, drain_timeout_s=0.5)


def test_pings_without_reading_the_answers_are_not_hoarded() -> None:
    async def test(server: Server) -> None:
        async with wire(server) as other:
            async with deaf_wire(server) as deaf:
                await deaf.open("deaf")
                deaf.websocket.transport.pause_reading()
                with pytest.raises(ConnectionClosed):
                    for _ in range(200_000):
                        await deaf.websocket.ping(b"%d" % _ + b"x" * 100)
            assert (await other.open("a"))["type"] == "opened"

    with_server(test, drain_timeout_s=0.5)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_refused(origin: str) -> None:
    async def test(server: Server) -> None:
        with pytest.raises(InvalidStatus) as caught:
            async with wire(server, origin=origin):
                pass
        assert caught.value.response.status_code == 403
        async with wire(server) as client:
            assert (await client.open("a"))["type"] == "opened"

    with_server(test)


def test_own_and_allowed_origins_may_connect() -> None:
    async def test(server: Server) -> None:
        own = [f"http://127.0.0.1:{server.port}", f"http://localhost:{server.port}"]
        for number, origin in enumerate([*own, "https://chat.example"]):
            async with wire(server, origin=origin) as client:
                assert (await client.open(f"s{number}"))["type"] == "opened"

    with_server(test, origins=("https://chat.example",))


def test_pings_are_answered_while_a_step_takes_long() -> None:
    gate = asyncio.Semaphore(0)

    async def test(server: Server) -> None:
        async with wire(server) as client:
            await client.open("a")
            await client.send("say", text="x", params={"max_tokens": 1})
            await (await client.websocket.ping())
            gate.release()
            assert (await client.until("done"))[-1]["reason"] == "length"

    with_server(test, ScriptedEngine(gate=gate))


def test_a_closing_server_stops_turns_at_a_token_and_says_where_they_stand() -> None:
    engine = ScriptedEngine()

    async def test(server: Server) -> None:
        async with wire(server) as busy, wire(server) as idle, wire(server) as unopened:
            await busy.open("busy")
            await idle.open("idle")
            await busy.send("say", id=1, text="go on")
            await busy.receive()
            closing = asyncio.create_task(server.close())
            *deltas, done, goodbye = await busy.until("going_away")
            assert (done["id"], done["reason"]) == (1, "going_away")
            assert goodbye == {
                "type": "going_away",
                "session": "busy",
                "token_index": 5 + 1 + len(deltas),
                "text_chars": 0,
            }
            assert (await idle.receive())["session"] == "idle"
            assert await unopened.receive() == {"type": "going_away"}
            for client in (busy, idle, unopened):
                assert await closing_code(client) == 1001
            await closing

    with_server(test, engine)
    assert not any(session.is_open for session in engine.sessions.values())


async def closing_code(client: Wire) -> int | None:
    with pytest.raises(ConnectionClosed) as caught:
        await client.receive()
    return caught.value.rcvd.code if caught.value.rcvd else None


def test_a_client_that_never_reads_does_not_hold_up_the_end() -> None:
    engine = ScriptedEngine(lambda text: iter(lambda: "x" * 4096, None))

    async def test(server: Server) -> None:
        async with deaf_wire(server) as deaf:
            await deaf.open("deaf")
            await deaf.send("say", text="go on")
            await until_true(lambda: engine.sessions["deaf"].num_generated > 1)
            await server.close()
            assert not engine.sessions["deaf"].is_open

    with_server(test, engine, drain_timeout_s=0.2)


def test_a_port_in_use_is_an_error_with_a_remedy() -> None:
    async def test(server: Server) -> None:
        with pytest.raises(ServerError, match=f"port={server.port}.*another port"):
            await aserve(ScriptedEngine(), port=server.port)

    with_server(test)


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"port": "8765"}, {"host": ""}, {"ping_timeout_s": 0}]
)
def test_a_bad_option_names_itself(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert caught.value.field == next(iter(options))


def test_aserve_tells_its_url_and_ends_when_told() -> None:
    async def main() -> str:
        stop, urls = asyncio.Event(), []
        task = asyncio.create_task(
            aserve(ScriptedEngine(), port=0, ready=lambda url: urls.append(url), stop=stop)
        )
        await until_true(lambda: bool(urls))
        stop.set()
        await task
        return urls[0]

    assert asyncio.run(main()).startswith("ws://127.0.0.1:")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_process_ends_well(signal_number: signal.Signals) -> None:
    program = Path(__file__).with_name("scripted_engine.py")
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()

    async def chat() -> list[dict[str, Any]]:
        from websockets.asyncio.client import connect

        async with connect(url, proxy=None) as websocket:
            client = Wire(websocket)
            await client.open("diary")
            await client.send("say", text="go on")
            await client.receive()
            process.send_signal(signal_number)
            messages = await client.until("going_away")
            assert await closing_code(client) == 1001
            return messages

    *_, done, goodbye = asyncio.run(chat())
    assert (done["reason"], goodbye["session"]) == ("going_away", "diary")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "open sessions: []\n")

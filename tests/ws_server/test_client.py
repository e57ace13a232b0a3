"""Both clients against a real server."""

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from websockets.sync.server import serve as serve_anything

from streamkv.errors import InputError, ServerError
from streamkv.ws_server.async_client import AsyncClient, aconnect
from streamkv.ws_server.client import connect
from streamkv.ws_server.dialogue import RemoteError
from streamkv.ws_server.messages import DoneReason, ErrorCode, Usage
from streamkv.ws_server.server import Server, ServerConfig, aserve


@contextmanager
def running(engine: ScriptedEngine) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server on a thread of its own: its URL, and what ends it."""
    ready, urls = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def announce(url: str) -> None:
            urls.extend([url, lambda: loop.call_soon_threadsafe(stop.set)])
            ready.set()

        await aserve(engine, port=0, ready=announce, stop=stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    url, end = urls
    try:
        yield url, end
    finally:
        if thread.is_alive():
            end()
        thread.join()


def test_a_dialogue_of_the_synchronous_client() -> None:
    engine = ScriptedEngine()
    with running(engine) as (url, _), connect(url) as client:
        opened = client.open("diary", system="Be brief.")
        assert (opened.session, opened.resumed, opened.model) == ("diary", False, "script")
        deltas = list(client.say("hello", max_tokens=3, token_ids=True))
        assert "".join(delta.text for delta in deltas) == "0 1 2 "
        assert [delta.token_id for delta in deltas] == [1001, 1002, 1003]
        assert client.last_done is not None
        assert client.last_done.reason is DoneReason.LENGTH
        assert client.last_done.usage == Usage(5, 3)
        assert [progress.text_chars for progress in client.feed("123456")] == [4, 6]
        assert len(list(client.generate(max_tokens=1))) == 1
        assert client.stats()["num_tokens"] == 15
        client.leave()
        assert client.open("diary").token_index == 15
        client.delete()
        assert client.open("diary").resumed is False


def test_a_loop_that_is_left_cancels_its_turn() -> None:
    engine = ScriptedEngine()
    with running(engine) as (url, _), connect(url) as client:
        client.open("a")
        for delta in client.say("go on"):
            if delta.text == "5 ":
                break
        num_generated = client.stats()["num_tokens"] - 5
        assert num_generated == engine.sessions["a"].num_generated >= 6
        assert [delta.text for delta in client.say("x", max_tokens=2)] == ["0 ", "1 "]


def test_an_iterator_that_is_kept_is_cancelled_by_the_next_request() -> None:
    with running(ScriptedEngine()) as (url, _), connect(url) as client:
        client.open("a")
        kept = client.say("go on")
        assert next(kept).text == "0 "
        assert [delta.text for delta in client.say("x", max_tokens=2)] == ["0 ", "1 "]
        assert list(kept) == []


def test_an_iterator_that_is_never_begun_sends_nothing() -> None:
    engine = ScriptedEngine()
    with running(engine) as (url, _), connect(url) as client:
        client.open("a")
        client.say("never heard")
        assert client.stats()["num_tokens"] == 0


def test_stats_between_two_deltas_lose_no_delta() -> None:
    with running(ScriptedEngine()) as (url, _), connect(url) as client:
        client.open("a")
        texts = []
        for delta in client.say("x", max_tokens=200):
            texts.append(delta.text)
            if len(texts) % 50 == 1:
                assert client.stats()["name"] == "a"
        assert texts == [f"{number} " for number in range(200)]


def test_cancel_from_another_thread_ends_the_iterator() -> None:
    with running(ScriptedEngine()) as (url, _), connect(url) as client:
        client.open("a")
        for count, _ in enumerate(client.say("go on")):
            if count == 3:
                canceller = threading.Thread(target=client.cancel)
                canceller.start()
        canceller.join()
        assert client.last_done is not None
        assert client.last_done.reason is DoneReason.CANCELLED


def test_an_interrupt_cancels_the_turn_and_the_client_stays_usable() -> None:
    engine = ScriptedEngine(gate=asyncio.Semaphore(1))
    main_thread = threading.get_ident()

    def interrupt() -> None:
        signal.pthread_kill(main_thread, signal.SIGINT)
        engine.open_gate()

    with running(engine) as (url, _), connect(url) as client:
        client.open("a")
        turn = client.say("go on")
        next(turn)
        interrupter = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupter.start()
            list(turn)
        interrupter.join()
        assert [delta.text for delta in client.say("x", max_tokens=2)] == ["0 ", "1 "]


def test_a_long_text_is_cut_into_messages_and_arrives_whole() -> None:
    text = "日本語🙂 " * 40_000
    engine = ScriptedEngine(prefill_chunk=1000)
    with running(engine) as (url, _), connect(url) as client:
        client.open("a")
        *_, progress = client.feed([text, "end", [1, 2, 3]])
        assert progress.text_chars == len(text) + 3
    assert engine.sessions["a"].text == text + "end"
    assert engine.sessions["a"].ids == [1, 2, 3]


def test_a_feed_that_is_left_takes_no_further_item() -> None:
    taken = []

    def items() -> Iterator[str]:
        for number in range(10**9):
            taken.append(number)
            yield "12345678"

    engine = ScriptedEngine()
    with running(engine) as (url, _), connect(url) as client:
        client.open("a")
        for progress in client.feed(items()):
            if progress.text_chars >= 20:
                break
        assert taken == [0, 1, 2]


def test_an_error_in_the_users_iterable_leaves_the_client_usable() -> None:
    def items() -> Iterator[str]:
        yield "1234"
        raise LookupError("mine")

    with running(ScriptedEngine()) as (url, _), connect(url) as client:
        client.open("a")
        with pytest.raises(LookupError, match="mine"):
            list(client.feed(items()))
        assert len(list(client.say("x", max_tokens=1))) == 1


def test_a_refusal_carries_code_remedy_and_field() -> None:
    with running(ScriptedEngine()) as (url, _), connect(url) as client:
        with pytest.raises(RemoteError) as caught:
            list(client.say("too early"))
        assert caught.value.code is ErrorCode.NOT_OPEN
        client.open("a")
        with pytest.raises(RemoteError) as caught:
            list(client.say("x", temprature=1))
        assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_OPTION, "temprature")
        assert "temperature" in caught.value.remedy
        with pytest.raises(InputError, match="items"):
            list(client.feed([3.5]))  # type: ignore[list-item]
        assert len(list(client.say("x", max_tokens=1))) == 1


@pytest.mark.parametrize(
    ("text", "params", "problem"),
    [
        ("\ud800", {}, "invalid Unicode"),
        ("x" * (1 << 20), {}, "too long"),
        ("x", {"temperature": float("nan")}, "not JSON"),
        ("x", {"stop": {"a"}}, "not JSON"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_is_sent(
    text: str, params: dict[str, Any], problem: str
) -> None:
    with running(ScriptedEngine()) as (url, _), connect(url) as client:
        client.open("a")
        with pytest.raises(InputError, match=problem):
            list(client.say(text, **params))
        assert len(list(client.say("x", max_tokens=1))) == 1


def test_the_end_of_the_server_is_told_as_such() -> None:
    with running(ScriptedEngine()) as (url, end), connect(url) as client:
        client.open("a")
        turn = client.say("go on")
        next(turn)
        end()
        for _ in turn:
            pass
        assert client.last_done is not None
        assert client.last_done.reason is DoneReason.GOING_AWAY
        with pytest.raises(ServerError, match=r"shutting down.*resumes"):
            client.stats()


def test_nobody_there_names_the_url() -> None:
    with pytest.raises(ServerError, match=r"url='ws://127\.0\.0\.1:1'.*streamkv serve"):
        connect("ws://127.0.0.1:1")
    with pytest.raises(ServerError, match="url='not a url'"):
        connect("not a url")


def test_a_server_of_something_else_is_an_error() -> None:
    def echo(websocket: object) -> None:
        for frame in websocket:  # type: ignore[attr-defined]
            websocket.send(frame.upper())  # type: ignore[attr-defined]

    with serve_anything(echo, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        with (
            connect(f"ws://127.0.0.1:{port}") as client,
            pytest.raises(ServerError, match="does not speak"),
        ):
            client.open("a")
        server.shutdown()
        thread.join()


@asynccontextmanager
async def served() -> AsyncIterator[AsyncClient]:
    """A client of a server on the same event loop."""
    async with (
        Server(ScriptedEngine(), ServerConfig(port=0)) as server,
        await aconnect(server.url) as client,
    ):
        yield client


async def texts(client: AsyncClient, text: str, max_tokens: int) -> list[str]:
    return [delta.text async for delta in client.say(text, max_tokens=max_tokens)]


def test_a_dialogue_of_the_asynchronous_client() -> None:
    async def lines() -> AsyncIterator[str]:
        yield "12"
        yield "3456"

    async def main() -> None:
        async with served() as client:
            assert (await client.open("a")).resumed is False
            assert await texts(client, "x", 3) == ["0 ", "1 ", "2 "]
            assert [p.text_chars async for p in client.feed(lines())] == [2, 6]
            assert [p.text_chars async for p in client.feed(["89"])] == [8]
            assert (await client.stats())["num_tokens"] == 12
            assert len([delta async for delta in client.generate(max_tokens=2)]) == 2
            await client.leave()
            assert (await client.open("a")).token_index == 14
            await client.delete()
            with pytest.raises(RemoteError) as caught:
                await texts(client, "x", 1)
            assert caught.value.code is ErrorCode.NOT_OPEN

    asyncio.run(main())


@pytest.mark.parametrize("collect", [False, True])
def test_an_asynchronous_loop_that_is_left_is_cancelled_by_the_next_request(collect: bool) -> None:
    async def main() -> None:
        async with served() as client:
            await client.open("a")
            for _ in range(5):
                async for delta in client.say("go on"):
                    if delta.text == "3 ":
                        break
                if collect:
                    gc.collect()
                    await asyncio.sleep(0)
                assert await texts(client, "x", 2) == ["0 ", "1 "]

    asyncio.run(main())


def test_a_cancelled_task_leaves_the_asynchronous_client_usable() -> None:
    async def main() -> None:
        async with served() as client:
            await client.open("a")
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in client.say("go on"):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await texts(client, "x", 2) == ["0 ", "1 "]

    asyncio.run(main())


def test_sixteen_sessions_at_once_keep_their_texts_apart() -> None:
    def answer(text: str) -> Iterator[str]:
        return iter([f"{text}:{number} " for number in range(50)])

    async def talk(url: str, name: str) -> str:
        async with await aconnect(url) as client:
            await client.open(name)
            return "".join([delta.text async for delta in client.say(name)])

    async def main() -> list[str]:
        async with Server(ScriptedEngine(answer), ServerConfig(port=0)) as server:
            return await asyncio.gather(*(talk(server.url, f"s{n}") for n in range(16)))

    for number, text in enumerate(asyncio.run(main())):
        assert text == "".join(answer(f"s{number}"))

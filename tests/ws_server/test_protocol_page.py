"""`docs/protocol.md` says what is so."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from wire import wire

from streamkv.ws_server.messages import DoneReason, ErrorCode
from streamkv.ws_server.protocol import encode, parse_client, parse_server
from streamkv.ws_server.server import Server, ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
CLIENT_PART, SERVER_PART = PAGE.split("## What a client sends")[1].split("## What the server sends")
DIALOGUE = re.findall(r"^([CS]) (\{.*\})$", PAGE, re.MULTILINE)


def examples(part: str) -> list[str]:
    return re.findall(r"```json\n(.*?)```", part, re.DOTALL)


@pytest.mark.parametrize("example", examples(CLIENT_PART))
def test_an_example_of_a_client_message_is_one(example: str) -> None:
    assert json.loads(encode(parse_client(example))).items() >= {
        (name, value) for name, value in json.loads(example).items() if isinstance(value, str | int)
    }


@pytest.mark.parametrize("example", examples(SERVER_PART))
def test_an_example_of_a_server_message_is_one(example: str) -> None:
    message = parse_server(example)
    assert message is not None
    assert json.loads(encode(message)) == json.loads(example)


def test_every_type_code_and_reason_is_on_the_page() -> None:
    client_types = {json.loads(example)["type"] for example in examples(CLIENT_PART)}
    server_types = {json.loads(example)["type"] for example in examples(SERVER_PART)}
    assert client_types == {
        "open", "say", "generate", "feed", "cancel", "stats", "delete", "close",
    }  # fmt: skip
    assert server_types == {
        "opened", "delta", "progress", "done", "stats", "error", "going_away",
    }  # fmt: skip
    for value in [*ErrorCode, *DoneReason]:
        assert f"`{value.value}`" in SERVER_PART


def shape(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what depends on the clock or the model."""
    kept = {k: v for k, v in message.items() if k not in ("timings", "tokens_per_s", "model")}
    return {**kept, "timings": sorted(message.get("timings", ()))}


def test_the_example_dialogue_happens_as_written() -> None:
    async def main() -> list[tuple[str, dict[str, Any]]]:
        engine = ScriptedEngine(lambda text: ["It ", "rained. ", "☔"], prefill_chunk=64)
        async with Server(engine, ServerConfig(port=0)) as server, wire(server) as client:
            happened = []
            for speaker, frame in DIALOGUE:
                if speaker == "C":
                    await client.websocket.send(frame)
                    happened.append((speaker, json.loads(frame)))
                else:
                    happened.append((speaker, await client.receive()))
            return happened

    happened = asyncio.run(main())
    assert len(happened) == 14
    for (speaker, message), (_, frame) in zip(happened, DIALOGUE, strict=True):
        assert speaker == "C" or shape(message) == shape(json.loads(frame))

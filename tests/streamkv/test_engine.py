"""The engine: what it refuses at the door, and that a refusal leaves nothing behind."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamkv import Engine, EngineConfig
from streamkv.errors import (
    ConfigError,
    EngineClosedError,
    InputError,
    ModelError,
    PoolFullError,
)

SMALL = EngineConfig(
    window_size=128, prefill_chunk=64, cpu_bytes="1MiB", ssd_bytes="16MiB", compile="off"
)
NOTE = "You keep a diary."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, store: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), dataclasses.replace(SMALL, store=str(store))) as engine:
        yield engine


def fail_on_disk() -> None:
    raise OSError(28, "No space left on device")


def test_names_are_those_of_open_and_sleeping_sessions(engine: Engine) -> None:
    asleep, awake = engine.session("names b"), engine.session("names a")
    asleep.close()
    assert [name for name in engine.session_names() if "names" in name] == ["names a", "names b"]
    awake.delete()
    assert "names a" not in engine.session_names()


def test_counters_of_the_store_are_there_from_the_start(engine: Engine) -> None:
    counters = engine.counters()
    assert {"promotions", "misses", "writes"} <= set(counters)
    assert any(name.startswith("ssd_") for name in counters)


def test_texts_are_counted_as_they_would_be_fed(engine: Engine) -> None:
    assert engine.count_tokens("") == 0
    assert engine.count_tokens("The lazy dog") == len(engine.tokenizer.encode("The lazy dog"))
    with pytest.raises(InputError, match="surrogate"):
        engine.count_tokens("\ud800")


def test_an_engine_that_cannot_open_gives_its_store_back(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(SMALL, store=str(tmp_path))
    with pytest.raises(ConfigError, match="cpu_bytes"):
        Engine(str(tiny_model_dir), dataclasses.replace(config, cpu_bytes="4000000TiB"))
    with Engine(str(tiny_model_dir), config) as engine:
        assert not engine.wait_until_fast()
        assert engine.session_names() == []
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.session("late")


def test_a_window_beyond_what_a_layer_sees_is_refused(
    random_model_dir: Callable[..., Path],
) -> None:
    model = str(random_model_dir("mistral", sliding_window=100))
    with pytest.raises(ConfigError, match=r"window_size=128: layer 0 .* only 100 tokens.*most 96"):
        Engine(model, SMALL)
    with pytest.raises(ModelError, match="tokenizer"):
        Engine(model, dataclasses.replace(SMALL, window_size=96))


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device='cuda'"):
        Engine(str(tmp_path / "nothing"), dataclasses.replace(SMALL, device="cuda"))


def test_a_session_refused_for_want_of_room_leaves_nothing_behind(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        window_size=128,
        prefill_chunk=64,
        cpu_bytes=0,
        store=str(tmp_path),
        retain="none",
        compile="off",
    )
    with Engine(str(tiny_model_dir), config) as engine:
        opened = []
        with pytest.raises(PoolFullError):
            for number in range(100):
                opened.append(engine.session(f"room {number}"))
        refused = f"room {len(opened)}"
        assert refused not in engine.session_names()
        opened[0].delete()
        assert engine.session(refused, system="You keep a diary.").num_tokens > 0


@pytest.mark.parametrize("model", [None, "", 5])
def test_what_is_no_name_of_a_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="not the name of a model"):
        Engine(model)


def test_options_that_are_no_config_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="not an EngineConfig"):
        Engine(str(tiny_model_dir), {"window_size": 64})  # type: ignore[arg-type]  # that is the point


def test_an_unknown_model_is_a_bad_value() -> None:
    with pytest.raises(ValueError, match="no-such-model") as caught:
        Engine("./no-such-model")
    assert isinstance(caught.value, ModelError)


def test_a_runner_that_cannot_be_made_leaves_neither_lock_nor_thread(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(SMALL, store=str(tmp_path / "store"))
    before = {thread.name for thread in threading.enumerate()}

    def refuse(*_: Any) -> None:
        raise MemoryError("no room for a graph")

    with monkeypatch.context() as patch:
        patch.setattr("streamkv.engine.make_runner", refuse)
        with pytest.raises(MemoryError, match="no room for a graph"):
            Engine(str(tiny_model_dir), config)
    assert {thread.name for thread in threading.enumerate()} <= before
    with Engine(str(tiny_model_dir), config) as engine:
        assert engine.session_names() == []

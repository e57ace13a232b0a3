"""Options made from two dataclasses: what was not given is theirs to decide."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from streamkv.cli.options import (
    EngineOptions,
    flag_of,
    with_bare_engine,
    with_engine,
    with_many_sessions,
    with_sampling,
)
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.sampling_params import SamplingParams


class Taken(Exception):
    """Carries what a command was given to the test that called it."""


def note(name: str, options: EngineOptions, loud: bool = False) -> None:
    raise Taken(name, options, loud)


def call(command: Any, **given: Any) -> Any:
    """Call a command as its parser does: every parameter by name, `None` where nothing is given."""
    parameters = inspect.signature(command).parameters
    unknown = set(given) - set(parameters)
    assert not unknown, unknown
    with pytest.raises(Taken) as taken:
        command(**{name: given.get(name, p.default) for name, p in parameters.items()})
    return taken.value.args


def test_what_is_not_given_keeps_its_default(tmp_path: Path) -> None:
    name, options, loud = call(with_engine(note), name="diary", store=str(tmp_path))
    assert (name, loud, options.model) == ("diary", False, "smollm2-135m")
    assert options.config == EngineConfig(store=str(tmp_path))
    assert options.store == tmp_path


def test_what_is_given_is_checked_by_the_class(tmp_path: Path) -> None:
    given = {"name": "diary", "store": str(tmp_path)}
    _, options, _ = call(with_engine(note), window_size=128, cpu_bytes="0", loud=True, **given)
    expected = EngineConfig(store=str(tmp_path), window_size=128, cpu_bytes="0")
    assert options.config == expected
    with pytest.raises(ConfigError, match="codec='zip'"):
        call(with_engine(note), codec="zip", **given)


def test_a_store_that_is_not_given_is_that_of_model_and_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    _, options, _ = call(with_engine(note), name="diary", model="m", dtype="bfloat16")
    assert options.config == EngineConfig(store="/data/streamkv/m-bfloat16", dtype="bfloat16")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"device": "cuda"}, "m-bfloat16"),
        ({"device": "cuda", "dtype": "auto"}, "m-bfloat16"),
        ({"device": "cuda", "dtype": "float32"}, "m"),
        ({"device": "cpu"}, "m"),
    ],
)
def test_the_store_is_that_of_the_type_which_the_device_takes(
    given: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    _, options, _ = call(with_engine(note), name="diary", model="m", **given)
    assert options.config.store == f"/data/streamkv/{name}"
    assert options.config.device == given["device"]


def test_a_bare_engine_has_no_store() -> None:
    command = with_bare_engine(note)
    assert "store" not in inspect.signature(command).parameters
    _, options, _ = call(command, name="diary", prefill_chunk=64)
    assert options.config == EngineConfig(prefill_chunk=64)


def test_a_zero_is_given_and_not_left_out() -> None:
    def take(params: SamplingParams) -> None:
        raise Taken(params)

    [params] = call(with_sampling(take), temperature=0.0, top_k=0)
    assert params == SamplingParams(temperature=0.0, top_k=0)
    assert call(with_sampling(take)) == (SamplingParams(),)


def test_decorated_twice_a_command_has_the_options_of_both_and_its_own_help() -> None:
    def both(name: str, options: EngineOptions, params: SamplingParams) -> None:
        """Do it."""
        raise Taken(name, options, params)

    command = with_sampling(with_bare_engine(both))
    assert (command.__name__, command.__doc__) == ("both", "Do it.")
    parameters = list(inspect.signature(command).parameters)
    assert parameters[0] == "name" and {"window_size", "seed"} <= set(parameters)
    assert not {"options", "params"} & set(parameters)
    name, options, params = call(command, name="x", window_size=128, seed=3)
    assert (name, options.config.window_size, params.seed) == ("x", 128, 3)


def test_what_matters_to_many_sessions_is_an_option_of_those_who_have_them(tmp_path: Path) -> None:
    given = {"name": "diary", "store": str(tmp_path), "max_sessions": 3, "turn_tokens": 40}
    _, options, _ = call(
        with_many_sessions(note), sleep_after=2.5, mixed_chunk=64, batch_invariant=True, **given
    )
    assert options.config == EngineConfig(
        store=str(tmp_path),
        max_sessions=3,
        turn_tokens=40,
        sleep_after=2.5,
        mixed_chunk=64,
        batch_invariant=True,
    )


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("window_size", "--window"),
        ("max_sessions", "--max-sessions"),
        ("temperature", "--temperature"),
        ("num_awake", "--awake"),
        ("no_such", None),
    ],
)
def test_errors_name_a_field_as_it_was_given(field: str, flag: str | None) -> None:
    assert flag_of(field) == flag

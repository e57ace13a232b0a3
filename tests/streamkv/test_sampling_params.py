import dataclasses
from typing import Any

import pytest

from streamkv.errors import ConfigError, StreamKVError, UnknownOptionError
from streamkv.sampling import SamplingParams, resolve_seed


def test_the_defaults_are_those_of_a_chat() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "stop_ids": (),
        "max_tokens": None,
        "ignore_eos": False,
        "logprobs": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [b"a"]),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", "\ud800"),
        ("stop_ids", 2),
        ("stop_ids", [-1]),
        ("stop_ids", [True]),
        ("stop_ids", ["</s>"]),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", 1001),
        ("logprobs", True),
    ],
)
def test_a_bad_value_is_refused_naming_field_value_and_remedy(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, StreamKVError) and isinstance(caught.value, ValueError)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", 0),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", 2**64 - 1),
        ("stop", "END"),
        ("stop", ["a", "b"]),
        ("stop_ids", (0, 2)),
        ("max_tokens", 1),
        ("logprobs", 0),
    ],
)
def test_the_edge_of_each_range_is_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean top_p"):
        SamplingParams(top_pp=0.5)  # type: ignore[call-arg]  # the mistake under test


@pytest.mark.parametrize(
    ("stop", "expected"),
    [((), ()), ("END", ("END",)), (["a", "b"], ("a", "b")), (("x",), ("x",))],
)
def test_stop_strings_are_a_tuple_whichever_way_they_were_given(
    stop: Any, expected: tuple[str, ...]
) -> None:
    assert SamplingParams(stop=stop).stop_strings == expected


def test_a_given_seed_is_kept() -> None:
    params = SamplingParams(seed=0)
    assert resolve_seed(params) is params


def test_a_missing_seed_is_drawn_once_and_nothing_else_changes() -> None:
    params = SamplingParams(top_k=3)
    first, second = resolve_seed(params), resolve_seed(params)
    assert first.seed is not None and 0 <= first.seed < 2**53
    assert first.seed != second.seed
    assert dataclasses.replace(first, seed=None) == params


def test_params_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 5  # type: ignore[misc]  # the mistake under test

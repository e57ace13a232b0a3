"""Fields of a client's message, one by one: what is taken, and where the limits are."""

import json
from typing import Any

import pytest

from streamkv.ws_server.fields import Fields, MessageError
from streamkv.ws_server.messages import ErrorCode, Feed


def refused(fields: dict[str, Any], take: str, *arguments: Any) -> MessageError:
    """The error of a method of `Fields`; the message has the id 7."""
    with pytest.raises(MessageError) as caught:
        getattr(Fields({"id": 7, **fields}), take)(*arguments)
    assert caught.value.request_id == 7
    return caught.value


@pytest.mark.parametrize("request_id", [0, -(2**53) + 1, "a" * 64, "", None])
def test_an_id_is_a_short_text_or_an_exact_number(request_id: Any) -> None:
    assert Fields({"id": request_id}).id == request_id


@pytest.mark.parametrize("request_id", [2**53, -(2**53), "a" * 65, True, 1.0, [1], "\ud800"])
def test_any_other_id_is_refused_and_not_sent_back(request_id: Any) -> None:
    with pytest.raises(MessageError) as caught:
        Fields({"id": request_id})
    assert (caught.value.field, caught.value.request_id) == ("id", None)


@pytest.mark.parametrize(
    ("kind", "value"), [(str, 5), (int, "5"), (int, True), (int, 5.0), (bool, 1), (list, {})]
)
def test_json_types_are_not_taken_for_one_another(kind: type, value: Any) -> None:
    error = refused({"x": value}, "take", "x", kind)
    assert (error.field, error.code) == ("x", ErrorCode.BAD_MESSAGE)
    assert "of the wrong type" in str(error)


def test_null_is_the_same_as_absent() -> None:
    for given in ({}, {"x": None}):
        assert Fields(dict(given)).take("x", str, "default") == "default"
        assert "missing" in str(refused(given, "take", "x", str))


def test_another_version_has_a_code_of_its_own() -> None:
    assert Fields({"version": 1}).version() == 1
    error = refused({"version": 2}, "version")
    assert error.code is ErrorCode.UNSUPPORTED_VERSION
    assert error.remedy == "This server speaks version 1."


def test_a_name_has_1_to_100_characters() -> None:
    assert Fields({"session": "日" * 100}).name("session") == "日" * 100
    for name in ("", "a" * 101):
        assert refused({"session": name}, "name", "session").remedy == "Use 1 to 100 characters."


def test_a_feed_has_either_text_or_ids() -> None:
    assert Fields({"text": ""}).feed() == Feed(None, text="")
    assert Fields({"id": "a", "ids": [0, 2**31 - 1]}).feed() == Feed("a", ids=[0, 2**31 - 1])
    for both_or_none in ({}, {"text": "a", "ids": [1]}):
        assert "exactly one" in refused(both_or_none, "feed").remedy
    for bad in (-1, 2**31, True, 1.0, "1", None):
        assert refused({"ids": [1, bad]}, "feed").field == "ids"


def test_options_are_flat_and_few_and_their_lists_become_tuples() -> None:
    params = {"stop": ["a", "b"], "seed": 2**64 - 1, "top_p": 0.5, "ignore_eos": True}
    assert Fields({"params": params}).params() == {**params, "stop": ("a", "b")}
    assert Fields({}).params() == {}
    assert Fields({"params": {"stop": ["x" * 1024] * 64}}).params() == {"stop": ("x" * 1024,) * 64}
    full = {str(number): number for number in range(32)}
    assert Fields({"params": full}).params() == full


@pytest.mark.parametrize(
    ("params", "field", "problem"),
    [
        ({str(number): 1 for number in range(33)}, "params", "too many options"),
        ({"stop": ["x"] * 65}, "params.stop", "too many items"),
        ({"stop": ["a", ["x"]]}, "params.stop", "nested"),
        ({"bias": {"5": 1.0}}, "params.bias", "nested"),
        ({"stop": "x" * 1025}, "params.stop", "too long"),
        ({"seed": 2**64}, "params.seed", "too large"),
        ({"seed": -(2**64)}, "params.seed", "too large"),
        ({"stop": ["a", "\udc00"]}, "params.stop", "invalid Unicode"),
        ({"n" * 500: [[]]}, "params." + "n" * 64, "nested"),
    ],
)
def test_an_option_beyond_the_limits_is_refused_by_name(
    params: dict[str, Any], field: str, problem: str
) -> None:
    error = refused({"params": params}, "params")
    assert (error.field, error.problem) == (field, problem)


def test_a_field_that_nobody_took_is_refused() -> None:
    fields = Fields({"id": 7, "text": "hi", "txet": "hi"})
    fields.text("text")
    with pytest.raises(MessageError, match="txet='hi': say has no such field"):
        fields.end("say")
    Fields({"id": 7}).end("say")


def test_a_refusal_does_not_repeat_a_megabyte() -> None:
    for value in ("x" * 10**6, [1] * 10**6):
        error = refused({"x": value}, "take", "x", int)
        assert len(str(error)) < 300 and len(json.dumps(error.value)) < 1000

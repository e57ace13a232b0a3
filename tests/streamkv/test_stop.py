"""A stop string ends a text, and no part of it is ever shown."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamkv.errors import ConfigError
from streamkv.stop import StopMatcher

letters = st.text("abc", max_size=20)


def shown(stops, parts):
    """The emitted texts, the flush last, and the stop that was found."""
    matcher = StopMatcher(stops)
    emitted = [matcher.push(part).text for part in parts]
    return [*emitted, matcher.flush()], matcher.stop


def brute_force(stops, text):
    """The text before the stop string that is complete first; the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def test_a_stop_string_over_several_tokens_is_withheld():
    texts, stop = shown(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "KL"])
    assert texts == ["ABC", "", "", "", "", "", ""]
    assert stop == "DEFGHIJ"


def test_only_what_could_become_a_stop_string_is_held_back():
    texts, stop = shown(["\nUser:"], ["Hello", " there\n", "Us", "ual", " text"])
    assert texts == ["Hello", " there", "", "\nUsual", " text", ""]
    assert stop is None


def test_text_held_back_at_the_end_is_flushed():
    assert shown(["abc"], ["xab"]) == (["x", "ab"], None)


def test_text_after_a_stop_is_discarded():
    matcher = StopMatcher(["."])
    assert matcher.push("one. two.") == ("one", True)
    assert matcher.push("three") == ("", True)
    assert matcher.flush() == ""


def test_the_stop_that_is_complete_first_wins():
    assert shown(["abcd", "bc"], ["abcd"]) == (["a", ""], "bc")
    assert shown(["bc", "abc"], ["xabcd"]) == (["x", ""], "abc")


def test_no_stop_strings_hold_nothing_back():
    assert shown([], ["a", "b"]) == (["a", "b", ""], None)


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    parts=st.lists(letters, max_size=6),
)
@example(stops=["aab"], parts=["aaab"])
@example(stops=["abab"], parts=["ab", "aabab"])
def test_the_shown_text_is_that_before_the_first_stop(stops, parts):
    texts, _ = shown(stops, parts)
    assert "".join(texts) == brute_force(stops, "".join(parts))


@given(stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3), text=letters)
def test_what_is_held_back_is_the_longest_possible_beginning_of_a_stop(stops, text):
    matcher = StopMatcher(stops)
    if not matcher.push(text).stopped:
        longest = max(
            (stop[:k] for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])),
            key=len,
        )
        assert matcher.pending == longest


@given(stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3), a=letters, b=letters)
def test_a_matcher_goes_on_from_what_was_held_back(stops, a, b):
    first = StopMatcher(stops)
    before = first.push(a)
    if not before.stopped:
        second = StopMatcher(stops, pending=first.pending)
        assert second.push(b) == first.push(b)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], "abc"])
def test_a_bad_stop_string_is_refused(stops):
    with pytest.raises(ConfigError, match="stop="):
        StopMatcher(stops)

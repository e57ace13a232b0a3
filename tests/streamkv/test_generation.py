"""From tokens to deltas, with a vocabulary that can be read off."""

import pytest

from streamkv.detokenizer import IncrementalDecoder, LeadingSpace, TokenText
from streamkv.generation import Generation
from streamkv.outputs import Delta, FinishReason, TokenLogprob
from streamkv.sampling import SampledToken, SamplingParams

EOS = 0
PIECES = {
    EOS: b"<eos>",
    1: b"The ",
    2: b"dog",
    3: b".\n",
    4: b"User",
    5: b":",
    6: "é".encode()[:1],
    7: "é".encode()[1:],
    8: b"X",
}
TOKENS = TokenText(lambda token_id: PIECES[token_id], frozenset(), LeadingSpace.KEEP)


def generation(turn_stops: tuple[str, ...] = (), **options: object) -> Generation:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return Generation(params, IncrementalDecoder(TOKENS), frozenset({EOS}), turn_stops)


def push_all(made: Generation, *token_ids: int) -> list[tuple[str, FinishReason | None]]:
    """(text, finish reason) of the delta of each token."""
    deltas = [
        made.push(SampledToken(token_id, 1.0, None), index)
        for index, token_id in enumerate(token_ids)
    ]
    return [(delta.text, delta.finish_reason) for delta in deltas]


def test_a_delta_carries_its_token_and_what_was_said_of_it() -> None:
    logprob = TokenLogprob(2, -0.5, ((2, -0.5),))
    delta = generation().push(SampledToken(2, 3.5, logprob), 77)
    assert delta == Delta("dog", 2, 77, None, logprob, 3.5)


def test_a_stop_token_ends_it_without_its_text() -> None:
    assert push_all(generation(), 1, 2, EOS) == [
        ("The ", None),
        ("dog", None),
        ("", FinishReason.STOP),
    ]


def test_a_first_token_may_be_the_last() -> None:
    assert push_all(generation(max_tokens=1), EOS) == [("", FinishReason.STOP)]


def test_the_stop_token_gives_out_what_was_held_back() -> None:
    """Half a stop string and half a character are text after all when nothing follows."""
    assert push_all(generation(stop=["\nUser:"]), 2, 3, 4, EOS) == [
        ("dog", None),
        (".", None),
        ("", None),
        ("\nUser", FinishReason.STOP),
    ]
    assert push_all(generation(), 6, EOS) == [("", None), ("�", FinishReason.STOP)]


def test_so_does_the_last_of_the_tokens_asked_for() -> None:
    assert push_all(generation(stop=["\nUser:"], max_tokens=3), 2, 3, 4) == [
        ("dog", None),
        (".", None),
        ("\nUser", FinishReason.LENGTH),
    ]
    assert push_all(generation(max_tokens=2), 2, 6) == [
        ("dog", None),
        ("�", FinishReason.LENGTH),
    ]


def test_a_stop_string_over_several_tokens_is_withheld_whole() -> None:
    assert push_all(generation(stop=["\nUser:"]), 3, 4, 5) == [
        (".", None),
        ("", None),
        ("", FinishReason.STOP),
    ]


@pytest.mark.parametrize("max_tokens", [3, 4])
def test_a_stop_at_the_last_token_is_a_stop(max_tokens: int) -> None:
    ended = push_all(generation(stop=["\nUser:"], max_tokens=max_tokens), 3, 4, 5)
    assert ended[-1] == ("", FinishReason.STOP)
    ended = push_all(generation(max_tokens=max_tokens), 1, 2, EOS)
    assert ended[-1] == ("", FinishReason.STOP)


def test_a_stop_string_that_the_last_bytes_complete_is_withheld_too() -> None:
    assert push_all(generation(stop=["dog�"]), 2, 6, EOS)[-1] == ("", FinishReason.STOP)


def test_a_character_over_two_tokens_comes_with_the_second() -> None:
    assert push_all(generation(), 6, 7) == [("", None), ("é", None)]


def test_texts_that_end_a_turn_stop_like_the_callers_own() -> None:
    made = generation(turn_stops=("\nUser:",), stop=["X"])
    assert push_all(made, 2, 3, 4, 5)[-1] == ("", FinishReason.STOP)
    made = generation(turn_stops=("\nUser:",), stop=["X"])
    assert push_all(made, 2, 8) == [("dog", None), ("", FinishReason.STOP)]


def test_ignore_eos_ignores_the_models_own_ends_but_not_the_callers() -> None:
    made = generation(turn_stops=("\nUser:",), ignore_eos=True, stop_ids=[8])
    assert push_all(made, EOS, 3, 4, 5, 8) == [
        ("<eos>", None),
        (".\n", None),
        ("User", None),
        (":", None),
        ("", FinishReason.STOP),
    ]
    assert push_all(generation(ignore_eos=True, stop_ids=[EOS]), EOS) == [("", FinishReason.STOP)]

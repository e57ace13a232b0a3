"""However text arrives, its tokens are those of the whole."""

import itertools
import pydoc_data.topics

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamkv.cuts import MAX_RUN, RULES, Cuts
from streamkv.errors import InputError
from streamkv.incremental import IncrementalEncoder, require_text

FAMILIES = [
    "gpt2",
    "llama3",
    "o200k",
    "digits",
    "digits from the right",
    "nfc",
    "metaspace",
    "legacy",
    "superword",
    "dropping",
]

FRAGMENTS = [
    *["word", " word", "don't", "we're", "'s", "'", "he'd've", "naïve", "Grüße", " a", "e.g."],
    *[
        "今天",
        "，",
        "。",
        "東京の朝",
        "カ\u3099",
        "か",
        "\u3099",
        "한국",
        "\u1112",
        "\u1161",
        "\u11ab",
    ],
    *["שלום", " עולם", "\u05b8", "e", "\u0301", "\u0323", "o\u0308", "नमस्ते", "مرحبا", "Å", "ﬁ"],
    *["🙂", "👩‍👩‍👧", "\u200d", "🏽", "🇩🇪", "\ufe0f", "\ufffd", "\u00a0", "\u2003", "\x00", "\x1c"],
    *[" ", "  ", "     ", "\n", "\n\n", "\r\n", "\r", "\t", " \n", "\n ", " \r\n \n", "\x85"],
    *["1", "12", "1234567", " 3.14", "1,000", "x=1;", "f(x)", "a[i]+=b;", "//", '"', ");\n", "_"],
    *["<|im_start|>", "</s>", "<s>", "<unk>", "<0x0A>", "▁", "▁▁x", "\\n", "|>", "Ġ"],
]

texts = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(codec="utf-8"), max_size=4)),
    max_size=25,
).map("".join)

property_test = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def pieces(text, places):
    """The text cut at some places."""
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def push_all(encoder, parts):
    """All ids of a stream that arrives in parts."""
    ids = [token_id for part in parts for token_id in encoder.push(part)]
    return ids + encoder.flush()


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts, places=st.lists(st.integers(0, 10_000), max_size=12))
@example(text="a  \n\n  b", places=[2, 3, 4])
@example(text="we're we'", places=[2, 3])
@example(text="e\u0301\u0323 e", places=[1, 2])
@example(text="\u1112\u1161\u11ab", places=[1, 2])
@property_test
def test_the_ids_do_not_depend_on_how_the_text_is_cut(built, family, text, places):
    tokenizer = built(family).tokenizer
    whole = built(family).ids(text)
    assert push_all(tokenizer.encoder(), pieces(text, places)) == whole
    assert push_all(tokenizer.encoder(), list(text)) == whole
    assert tokenizer.encode(text) == whole


@pytest.mark.parametrize("family", ["llama3", "legacy"])
@given(text=texts, place=st.integers(0, 10_000))
@property_test
def test_a_stream_goes_on_from_its_tail(built, family, text, place):
    tokenizer = built(family).tokenizer
    first = tokenizer.encoder()
    place %= len(text) + 1
    ids = first.push(text[:place])
    assert first.num_held == len(first.tail)
    second = tokenizer.encoder(tail=first.tail, at_start=first.at_start)
    ids += second.push(text[place:]) + second.flush()
    assert ids == built(family).ids(text)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "dropping"])
def test_a_long_text_in_odd_pieces_has_the_ids_of_the_whole(built, family):
    text = "".join(pydoc_data.topics.topics[key] for key in ("assignment", "strings", "numbers"))
    whole = built(family).ids(text)
    for size in (1, 7, 1000, len(text)):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert push_all(built(family).tokenizer.encoder(), parts) == whole


def test_a_word_waits_for_its_end(built):
    encoder = built("gpt2").tokenizer.encoder()
    assert encoder.push("hel") == []
    assert encoder.push("lo") == []
    assert encoder.tail == "hello"
    assert encoder.push(" wor") == built("gpt2").ids("hello")
    assert encoder.tail == " wor"
    assert encoder.flush() == built("gpt2").ids(" wor")
    assert (encoder.tail, encoder.num_held, encoder.flush()) == ("", 0, [])


@pytest.mark.parametrize("family", ["metaspace", "legacy"])
def test_the_dummy_space_stands_only_where_the_stream_begins(built, family):
    encoder = built(family).tokenizer.encoder()
    encoder.push("word")
    begin = encoder.flush()
    encoder.push("word")
    assert built(family).tokenizer.decode(begin + encoder.flush()) == "wordword"


@pytest.mark.parametrize("family", ["gpt2", "legacy", "superword"])
def test_a_run_without_a_cut_is_cut_at_absolute_multiples(built, family):
    tokenizer = built(family).tokenizer
    run = "ab1_" * (MAX_RUN // 4) + "xyz" * 20
    text = "word\n" + run + "\n"
    whole = push_all(tokenizer.encoder(), [text])
    for size in (1, 997, MAX_RUN, MAX_RUN + 1):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert push_all(tokenizer.encoder(), parts) == whole
    assert tokenizer.decode(whole) == text


def test_what_is_held_back_is_bounded(built):
    encoder = built("gpt2").tokenizer.encoder()
    for _ in range(3 * MAX_RUN):
        encoder.push("_")
        assert encoder.num_held <= MAX_RUN


def test_single_characters_cost_no_more_than_the_whole():
    encoded: list[int] = []
    searched: list[int] = []

    class CountingCuts(Cuts):
        def contains_cut(self, text):
            searched.append(len(text))
            return super().contains_cut(text)

    def encode(text, at_start):
        encoded.append(len(text))
        return [0] * len(text)

    text = ("x" * 3000 + " word of a sentence, and more.\n") * 100
    encoder = IncrementalEncoder(encode, CountingCuts(RULES))
    ids = push_all(encoder, list(text))
    assert len(ids) == sum(encoded) == len(text)
    assert sum(searched) <= 2 * len(text)


def test_invalid_unicode_is_refused_by_position_and_changes_nothing(built):
    encoder = built("gpt2").tokenizer.encoder()
    encoder.push("abc")
    with pytest.raises(InputError, match=r"text=.*lone surrogate U\+D83D at character 3"):
        encoder.push("def\ud83d\ude00"[:4])
    assert encoder.tail == "abc"


def test_what_is_no_text_is_refused():
    with pytest.raises(InputError, match="items=b'x': not text but bytes"):
        require_text("items", b"x")

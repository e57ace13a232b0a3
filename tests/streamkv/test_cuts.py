"""Which cuts are safe for which tokenizer."""

import pytest

from streamkv.cuts import RULES, Cuts, safe_rules, vocabulary_text

ALL = {rule.name for rule in RULES}


def names(tokenizer):
    """Names of the rules in force."""
    return {rule.name for rule in tokenizer.cuts.rules}


@pytest.mark.parametrize(
    ("family", "unsafe"),
    [
        ("gpt2", set()),
        ("digits", set()),
        ("nfc", set()),
        ("llama3", {"line after a sign"}),
        ("o200k", {"line after a sign"}),
        ("dropping", ALL),
    ],
)
def test_a_family_keeps_the_rules_that_are_safe_for_it(built, family, unsafe):
    assert names(built(family).tokenizer) == ALL - unsafe


@pytest.mark.parametrize("family", ["metaspace", "legacy", "unigram"])
def test_sentencepiece_may_be_cut_between_words(built, family):
    assert "space" in names(built(family).tokenizer)


def test_tokens_that_span_words_forbid_cuts_between_words(built):
    assert "space" not in names(built("superword").tokenizer)


def test_a_token_of_the_vocabulary_that_spans_a_pair_drops_the_rule():
    def encode(text, at_start):
        return [ord(char) for char in text]

    assert {rule.name for rule in safe_rules(encode, vocabulary_text(["of", " the"]))} == ALL
    assert {rule.name for rule in safe_rules(encode, vocabulary_text(["of the"]))} == ALL - {
        "space"
    }
    # Bytes that are no whole character may be the end of a letter.
    dropped = ALL - {rule.name for rule in safe_rules(encode, vocabulary_text(["\ufffd."]))}
    assert dropped == {"punctuation"}


def test_cuts_lie_before_spaces_lines_and_signs():
    cuts = Cuts(RULES)
    text = "two words,\nand  more"
    places = [i for i in range(1, len(text)) if cuts.contains_cut(text[i - 1 : i + 1])]
    assert [text[a:b] for a, b in zip([0, *places], [*places, None], strict=True)] == [
        "two",
        " words",
        ",",
        "\nand",
        "  more",
    ]


@pytest.mark.parametrize(
    "text", ["don't", "12 ".strip(), "  ", "\n\n", "\n ", "e\u0301", "12.5", "か\u3099"]
)
def test_no_cut_inside_what_belongs_together(text):
    assert not Cuts(RULES).contains_cut(text)


def test_the_last_cut_within_bounds():
    cuts = Cuts(RULES)
    assert cuts.last_cut("a b c d", 0, 7) == 5
    assert cuts.last_cut("a b c d", 0, 4) == 3
    assert cuts.last_cut("a b c d", 3, 4) is None
    assert cuts.last_cut("abcd", 0, 4) is None
    assert Cuts(()).last_cut("a b", 0, 3) is None

"""Edits of a tokenizer's description."""

from streamkv.tokenizer_spec import (
    adds_space,
    adds_space_after_special,
    with_hidden_pieces,
    without_added_space,
)

PREPEND = {"type": "Prepend", "prepend": "▁"}
NFC = {"type": "NFC"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True}


def metaspace(scheme):
    """A SentencePiece pre-tokeniser."""
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}


def spec(normalizer=None, pre_tokenizer=None):
    """A description with these parts."""
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}


def test_what_adds_a_space_is_found_and_taken_away():
    normalizers = {"type": "Sequence", "normalizers": [PREPEND, NFC]}
    pre_tokenizers = {"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}
    for given in (spec(PREPEND), spec(normalizers), spec(NFC, pre_tokenizers)):
        assert adds_space(given)
        assert adds_space_after_special(given)
        assert not adds_space(without_added_space(given))
        assert adds_space(given), "the given description must not change"


def test_a_space_at_the_first_place_only_does_not_return_after_special_tokens():
    assert adds_space(spec(None, metaspace("first")))
    assert not adds_space_after_special(spec(None, metaspace("first")))
    assert adds_space_after_special(spec(None, metaspace("always")))
    assert without_added_space(spec(None, metaspace("first"))) == spec(None, metaspace("never"))


def test_other_parts_stay():
    assert not adds_space(spec(NFC, metaspace("never")))
    assert without_added_space(spec(NFC)) == spec(NFC)
    normalizers = {"type": "Sequence", "normalizers": [PREPEND, NFC]}
    left = {"type": "Sequence", "normalizers": [NFC]}
    assert without_added_space(spec(normalizers)) == spec(left)


def test_hidden_pieces_keep_their_ids_and_scores_but_match_no_text():
    model = {"type": "Unigram", "vocab": [["<s>", 0.0], ["a", -1.0]]}
    hidden = with_hidden_pieces({"model": model}, {"<s>"})["model"]["vocab"]
    assert hidden == [["\U0010fffd<s>", 0.0], ["a", -1.0]]

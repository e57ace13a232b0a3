"""Token ids become text without a broken character, in any pieces, at a flat cost."""

import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkv.detokenizer import IncrementalDecoder, LeadingSpace, TokenText, decode

FAMILIES = ["gpt2", "llama3", "nfc", "metaspace", "legacy"]

TEXT = "Grüße 东京 👩‍👩‍👧 e\u0301 שלום \ufffd one\n\n  two\ttabs."

property_test = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def tokens_of(table, leading_space=LeadingSpace.KEEP, special=()):
    """Tokens whose bytes are given literally."""
    return TokenText(
        lambda token_id: table[token_id] if token_id < len(table) else b"",
        frozenset(special),
        leading_space,
    )


def deltas(decoder, ids):
    """Text of each push, and of the flush."""
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


BYTES = tokens_of([bytes([byte]) for byte in range(256)])


@pytest.mark.parametrize("family", FAMILIES)
def test_deltas_join_to_the_text_and_to_the_librarys_own(built, family):
    ids = built(family).ids(TEXT)
    joined = "".join(deltas(built(family).tokenizer.decoder(), ids))
    assert joined == (unicodedata.normalize("NFC", TEXT) if family == "nfc" else TEXT)
    assert joined == built(family).library.decode(ids)
    assert joined == built(family).tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
@given(ids=st.lists(st.integers(0, 1499), max_size=30))
@property_test
def test_any_byte_level_ids_join_to_the_librarys_text(built, family, ids):
    for skip in (True, False):
        decoder = built(family).tokenizer.decoder(skip_special=skip)
        whole = built(family).library.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas(decoder, ids)) == whole


@given(data=st.binary(max_size=40))
def test_any_bytes_join_to_their_text_with_replacements(data):
    assert "".join(deltas(IncrementalDecoder(BYTES), data)) == data.decode(errors="replace")


@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_a_character_appears_whole_with_its_last_byte(text):
    decoder = IncrementalDecoder(BYTES)
    for char in text:
        data = char.encode()
        assert [decoder.push(byte) for byte in data] == [""] * (len(data) - 1) + [char]
    assert decoder.flush() == ""


def test_a_cut_off_character_is_flushed_once():
    decoder = IncrementalDecoder(BYTES)
    assert [decoder.push(byte) for byte in "🌶".encode()[:3]] == ["", "", ""]
    assert decoder.pending == b"\xf0\x9f\x8c"
    assert (decoder.flush(), decoder.flush()) == ("\ufffd", "")


def test_previous_ids_are_not_repeated_but_their_character_is_completed():
    pepper = "prompt 🌶".encode()
    decoder = IncrementalDecoder(BYTES, previous=pepper[:-1])
    assert decoder.pending == b"\xf0\x9f\x8c"
    assert deltas(decoder, [pepper[-1], ord("!")]) == ["🌶", "!", ""]


@given(data=st.binary(max_size=12), later=st.binary(max_size=6))
def test_going_on_after_previous_ids_gives_what_the_whole_would(data, later):
    whole = IncrementalDecoder(BYTES)
    for byte in data:
        whole.push(byte)
    assert deltas(IncrementalDecoder(BYTES, previous=data), later) == deltas(whole, later)


def test_a_token_that_reads_like_the_replacement_character_is_text():
    tokens = tokens_of([" \ufffd".encode(), b"x"])
    assert deltas(IncrementalDecoder(tokens), [0, 1]) == [" \ufffd", "x", ""]


def test_endless_invalid_bytes_are_neither_held_back_nor_dropped():
    decoder = IncrementalDecoder(BYTES)
    texts = [decoder.push(0x80) for _ in range(1000)]
    assert texts == ["\ufffd"] * 1000


def test_special_tokens_give_no_text_unless_asked_for():
    tokens = tokens_of([b"a", b"<end>", b"b"], special=[1])
    assert decode(tokens, [0, 1, 2]) == "ab"
    assert decode(tokens, [0, 1, 2], skip_special=False) == "a<end>b"


def test_an_unknown_id_gives_no_text():
    assert decode(tokens_of([b"a"]), [0, 7, 0]) == "aa"


def test_the_leading_space_goes_only_where_the_stream_begins():
    tokens = tokens_of([b" a", b"  ", b"<s>"], LeadingSpace.STRIP_ONE, special=[2])
    assert deltas(IncrementalDecoder(tokens), [2, 0, 0]) == ["", "a", " a", ""]
    assert deltas(IncrementalDecoder(tokens), [1, 0]) == [" ", " a", ""]
    assert deltas(IncrementalDecoder(tokens, previous=[2]), [0]) == ["a", ""]
    assert deltas(IncrementalDecoder(tokens, previous=[0]), [0]) == [" a", ""]
    whole = tokens_of([b" a", b"  "], LeadingSpace.STRIP_FIRST_TOKEN)
    assert deltas(IncrementalDecoder(whole), [1, 0]) == ["", " a", ""]


def test_a_push_asks_for_one_token_only_however_old_the_stream():
    asked = []

    def token_bytes(token_id):
        asked.append(token_id)
        return b"ab"

    tokens = TokenText(token_bytes, frozenset(), LeadingSpace.KEEP)
    decoder = IncrementalDecoder(tokens, previous=[0] * 100_000)
    assert len(asked) == 2
    for _ in range(100_000):
        decoder.push(1)
    assert len(asked) == 100_002

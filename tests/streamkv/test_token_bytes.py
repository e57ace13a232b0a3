"""The bytes of vocabulary strings, by the tokenizer's own decoder."""

import pytest

from streamkv.detokenizer import LeadingSpace
from streamkv.errors import ModelError
from streamkv.token_bytes import decoder_kind

BYTE_LEVEL = {"type": "ByteLevel"}
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*parts):
    """Decoders in a row."""
    return {"type": "Sequence", "decoders": list(parts)}


@pytest.mark.parametrize(
    ("token", "data"),
    [
        ("Ġhello", b" hello"),
        ("Ċ", b"\n"),
        ("Ã¤", "ä".encode()),
        ("Ģ", b"\x80"),
        ("Ń", b"\xad"),
        ("<|im_end|>", b"<|im_end|>"),
        ("<end of text>", b"<end of text>"),
        ("▁", "▁".encode()),
    ],
)
def test_a_byte_level_token_spells_its_bytes(token, data):
    assert decoder_kind(BYTE_LEVEL).bytes_of(token) == data


def test_every_byte_has_a_character():
    kind = decoder_kind(BYTE_LEVEL)
    spelled = [chr(code) for code in range(0x21, 0x144) if len(kind.bytes_of(chr(code))) == 1]
    assert {kind.bytes_of(char)[0] for char in spelled} == set(range(256))


@pytest.mark.parametrize(
    ("token", "data"),
    [
        ("▁hello", b" hello"),
        ("<0x0A>", b"\n"),
        ("<0xE4>", b"\xe4"),
        ("<0x>", b"<0x>"),
        ("ä", b"\xc3\xa4"),
    ],
)
def test_a_sentencepiece_token_spells_spaces_and_bytes(token, data):
    kind = decoder_kind(sequence(REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}))
    assert kind.bytes_of(token) == data


def test_what_the_decoder_does_not_do_is_not_done():
    assert decoder_kind({"type": "Fuse"}).bytes_of("▁a") == "▁a".encode()
    assert decoder_kind(REPLACE).bytes_of("<0x0A>") == b"<0x0A>"


@pytest.mark.parametrize(
    ("decoder", "leading_space"),
    [
        (BYTE_LEVEL, LeadingSpace.KEEP),
        (sequence(REPLACE, {"type": "Fuse"}), LeadingSpace.KEEP),
        (sequence(REPLACE, {"type": "Fuse"}, STRIP), LeadingSpace.STRIP_ONE),
        ({"type": "Metaspace", "replacement": "▁"}, LeadingSpace.STRIP_FIRST_TOKEN),
        (
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"},
            LeadingSpace.KEEP,
        ),
    ],
)
def test_the_decoder_says_what_goes_at_the_beginning(decoder, leading_space):
    assert decoder_kind(decoder).leading_space is leading_space


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        sequence({"type": "Replace", "pattern": {"String": "_"}, "content": " "}),
        sequence(BYTE_LEVEL, {"type": "CTC"}),
    ],
)
def test_another_decoder_is_refused(decoder):
    with pytest.raises(ModelError, match=r"its decoder .* is not supported\. Use a model"):
        decoder_kind(decoder)


def test_a_byte_level_decoder_after_sentencepiece_steps_is_byte_level() -> None:
    """What transformers 5.17 makes of a GPT-2 tokenizer in a GGUF file."""
    steps = [
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ]
    kind = decoder_kind({"type": "Sequence", "decoders": steps})
    assert kind == decoder_kind(steps[-1])
    assert kind.bytes_of("Ġdog") == b" dog"

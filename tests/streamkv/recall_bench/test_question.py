"""Questions: the needle is whole, where it was asked for, and the same for everyone."""

import re
from pathlib import Path

import pytest

from streamkv.errors import ConfigError, InputError
from streamkv.recall_bench.haystack import Haystack, read_directory
from streamkv.recall_bench.question import NEEDLE, Question, QuestionMaker
from streamkv.tokenizer import Tokenizer, load_tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
WORDS = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun. "


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def haystack(tmp_path: Path, tokenizer: Tokenizer) -> Haystack:
    for name in ("one.md", "two.txt"):
        text = "".join(f"{name} line {n}: {WORDS}\n" for n in range(60))
        (tmp_path / name).write_text(text)
    return read_directory(tmp_path, lambda text: tokenizer.encode(text, at_start=False))


def maker(
    haystack: Haystack, tokenizer: Tokenizer, seed: int = 0, prefix: int = 0
) -> QuestionMaker:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, at_start=False)

    return QuestionMaker(haystack, encode, prefix, seed, DEPTHS)


def needle_text(question: Question, tokenizer: Tokenizer, prefix: int = 0) -> str:
    ids = question.token_ids[question.needle_start - prefix : question.needle_end - prefix]
    return tokenizer.decode(ids)


@pytest.mark.parametrize("length", [63, 64, 65, 128, 200])
@pytest.mark.parametrize("prefix", [0, 1])
def test_a_stream_has_its_length_and_one_whole_needle(
    haystack: Haystack, tokenizer: Tokenizer, length: int, prefix: int
) -> None:
    made = maker(haystack, tokenizer, prefix=prefix)
    for index in range(5):
        question = made.make(length, index)
        assert prefix + len(question.token_ids) == length
        needle = NEEDLE.format(question.number)
        assert needle_text(question, tokenizer, prefix) == needle
        assert tokenizer.decode(question.token_ids).count(needle) == 1
        assert re.fullmatch(r"[1-9]\d{4}", question.number)


def test_the_needle_lies_at_its_depth_of_the_text(haystack: Haystack, tokenizer: Tokenizer) -> None:
    made = maker(haystack, tokenizer)
    for index, depth in enumerate([*DEPTHS, 0.0]):
        question = made.make(300, index)
        num_hay = 300 - (question.needle_end - question.needle_start)
        assert question.depth == made.depth_of(index) == depth
        assert question.needle_start == round(depth * num_hay)


def test_what_surrounds_the_needle_is_a_piece_of_one_file(
    haystack: Haystack, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    question = maker(haystack, tokenizer).make(300, 2)
    ids = question.token_ids
    hay = [*ids[: question.needle_start], *ids[question.needle_end :]]
    whole = tokenizer.encode((tmp_path / question.source).read_text(), at_start=False)
    assert hay == whole[question.source_token : question.source_token + len(hay)]


def test_a_question_does_not_depend_on_those_before_it(
    haystack: Haystack, tokenizer: Tokenizer
) -> None:
    one, other = maker(haystack, tokenizer), maker(haystack, tokenizer)
    asked = [(length, index) for length in (100, 200) for index in range(4)]
    forward = [one.make(*name) for name in asked]
    assert [other.make(*name) for name in reversed(asked)] == forward[::-1]
    assert len({question.number for question in forward}) > 1
    assert maker(haystack, tokenizer, seed=1).make(100, 0) != forward[0]


@pytest.mark.parametrize(
    ("start", "end", "blocks"),
    [(0, 1, [0]), (50, 64, [0]), (50, 65, [0, 1]), (64, 78, [1]), (63, 129, [0, 1, 2])],
)
def test_the_needle_s_blocks_are_those_of_its_tokens(
    start: int, end: int, blocks: list[int]
) -> None:
    question = Question(999, 0, 0.1, "12345", "a", 0, [], start, end)
    assert list(question.needle_blocks) == blocks


def test_no_number_is_drawn_that_the_text_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "plain.md").write_text(WORDS * 20)

    def number() -> str:
        hay = read_directory(tmp_path, lambda text: tokenizer.encode(text, at_start=False))
        return maker(hay, tokenizer).make(100, 0).number

    first = number()
    (tmp_path / "plain.md").write_text(f"In the year 9{first}. " + WORDS * 20)
    second = number()
    assert second != first


def test_a_number_of_another_text_does_no_harm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Else a question would depend on which texts were read before it."""
    (tmp_path / "long.md").write_text(WORDS * 20)

    def hay() -> Haystack:
        return read_directory(tmp_path, lambda text: tokenizer.encode(text, at_start=False))

    number = maker(hay(), tokenizer).make(200, 0).number
    (tmp_path / "small.md").write_text(f"{number}.")
    again = hay()
    for source in again.sources:
        source.ids(lambda text: tokenizer.encode(text, at_start=False))
    assert maker(again, tokenizer).make(200, 0).number == number


def test_a_length_without_room_for_the_needle_is_refused(
    haystack: Haystack, tokenizer: Tokenizer
) -> None:
    made = maker(haystack, tokenizer)
    with pytest.raises(ConfigError, match=r"no room for the needle and a text. Use at least ") as e:
        made.make(5, 0)
    least = int(str(e.value).rsplit(" ", 1)[1].rstrip("."))
    assert len(made.make(least, 0).token_ids) == least


def test_a_text_that_is_too_short_is_named(haystack: Haystack, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"no text in it has .* the longest, .*, has .*--join"):
        maker(haystack, tokenizer).make(50_000, 0)

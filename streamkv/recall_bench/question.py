"""Questions: a stream of real text with one number hidden in it.

Invariant: a question is a function of (seed, length, index), of the depths and of the haystack: the
same for every mode, and the same when a run is continued. Streams have exactly the length that was
asked for; the needle is whole and a paragraph of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamkv.errors import ConfigError, InputError
from streamkv.recall_bench.draws import draw
from streamkv.recall_bench.haystack import Haystack
from streamkv.tiers.spec import BLOCK_SIZE

NEEDLE = "\n\nThe secret number is {}.\n\n"
ASKED = "What is the secret number?"
ANSWER_START = "The secret number is"
LEAST_NUMBER, NUM_NUMBERS = 10_000, 90_000
TRIES = 100

EncodeLater = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Question:
    """A stream, and the number that is hidden in it.

    Attributes:
        length: tokens of the stream, those that the tokenizer begins every stream with included.
        index: of the question among those of this length.
        depth: how far down the needle lies, 0 to 1.
        number: five digits.
        source, source_token: the text and the token index there at which the haystack begins.
        token_ids: what is fed.
        needle_start, needle_end: token indices in the stream of the needle's first token and of
            the token after its last one.
    """

    length: int
    index: int
    depth: float
    number: str
    source: str
    source_token: int
    token_ids: list[int]
    needle_start: int
    needle_end: int

    @property
    def needle_blocks(self) -> range:
        """Blocks of the stream that hold a token of the needle."""
        return range(self.needle_start // BLOCK_SIZE, (self.needle_end - 1) // BLOCK_SIZE + 1)


class QuestionMaker:
    """Makes questions.

    Args:
        haystack: text to hide numbers in.
        encode: text to token ids, not at the start of a stream.
        num_prefix_tokens: tokens that the tokenizer begins every stream with.
        seed: of all draws.
        depths: the depths, taken in turn.
    """

    def __init__(
        self,
        haystack: Haystack,
        encode: EncodeLater,
        num_prefix_tokens: int,
        seed: int,
        depths: Sequence[float],
    ) -> None:
        self._haystack = haystack
        self._encode = encode
        self._num_prefix_tokens = num_prefix_tokens
        self._seed = seed
        self._depths = tuple(depths)

    def depth_of(self, index: int) -> float:
        """Depth of the question of this index, whatever its length."""
        return self._depths[index % len(self._depths)]

    def make(self, length: int, index: int) -> Question:
        """The question of this length and index.

        Raises:
            ConfigError: the length has no room for the needle.
            InputError: no text is long enough.
        """
        purpose = (self._seed, length, index)
        number, needle = self._needle(purpose, 0)
        num_hay = length - self._num_prefix_tokens - len(needle)
        if num_hay < 1:
            least = length - num_hay + 1
            remedy = f"Use at least {least}."
            raise ConfigError("lengths", length, "no room for the needle and a text", remedy)
        passage = self._haystack.passage(num_hay, *purpose)
        for attempt in range(1, TRIES):
            if not passage.may_contain(number):
                break
            other, same_room = self._needle(purpose, attempt)
            if len(same_room) == len(needle):
                number, needle = other, same_room
        else:
            problem = f"it contains each of {TRIES} drawn numbers"
            raise InputError("data", self._haystack.name, problem, "Use texts of words.")
        depth = self.depth_of(index)
        place = round(depth * num_hay)
        start = self._num_prefix_tokens + place
        hay = passage.token_ids
        return Question(
            length=length,
            index=index,
            depth=depth,
            number=number,
            source=passage.source,
            source_token=passage.first_token,
            token_ids=[*hay[:place], *needle, *hay[place:]],
            needle_start=start,
            needle_end=start + len(needle),
        )

    def _needle(self, purpose: tuple[object, ...], attempt: int) -> tuple[str, Sequence[int]]:
        number = str(LEAST_NUMBER + draw(NUM_NUMBERS, *purpose, "number", attempt))
        return number, self._encode(NEEDLE.format(number))

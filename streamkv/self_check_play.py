"""How the self-check plays a stream: its parts, and ways in which blocks leave and come back.

Plain      in one go
Sleeper    put to sleep and resumed between the parts
Follower   a second session takes the blocks that the first has computed; what both generate is
           set right by the reference, so that one near tie does not make two streams of one
Holder     mode `full` is left and taken up again, while a fork holds all blocks in the gpu pool
"""

import random

from streamkv.engine import Engine
from streamkv.sampling_params import SamplingParams
from streamkv.session import Session

NUM_PARTS = 6
WORDS_A_PART = 120
GENERATED_A_PART = 12
SEED = 7
NAME = "self-check"

Said = dict[int, tuple[int, float]]
"""By token index: the token and its log-probability."""


class Plain:
    """Plays a stream in one go.

    Args:
        engine: that computes it.
        reference: what was said of it before, if it was.
    """

    def __init__(self, engine: Engine, reference: Said | None = None) -> None:
        self._engine = engine
        self._reference = reference or {}
        self._session = engine.session(NAME, tenant=NAME)

    def read(self, text: str) -> Said:
        """Take in a text; what is said of its tokens."""
        return _scored(self._session, text)

    def go_on(self) -> Said:
        """Generate."""
        return _generated(self._session)

    def rest(self) -> None:
        """Between two parts."""


class Sleeper(Plain):
    """Sleeps and resumes between the parts."""

    def rest(self) -> None:
        """Give every block back, and take the window again from where it lies."""
        self._session.close()
        self._session = self._engine.session(NAME)


class Follower(Plain):
    """A second session reads what the first has just computed, and goes on by itself."""

    def __init__(self, engine: Engine, reference: Said | None = None) -> None:
        super().__init__(engine, reference)
        self._second = engine.session(f"{NAME} 2", tenant=NAME)

    def read(self, text: str) -> Said:
        """Feed both; reading says nothing of tokens."""
        self._session.feed(text).run()
        self._second.feed(text).run()
        return {}

    def go_on(self) -> Said:
        """Both generate, token by token; what the second one says counts."""
        said: Said = {}
        for _ in range(GENERATED_A_PART):
            self._set_right(self._session, _generated(self._session, 1))
            found = _generated(self._second, 1)
            self._set_right(self._second, found)
            said |= found
        return said

    def _set_right(self, session: Session, found: Said) -> None:
        """Have the stream go on with the token of the reference."""
        for index, (token_id, _) in found.items():
            wanted = self._reference.get(index, (token_id, 0.0))[0]
            if wanted != token_id:
                session.rewind(index)
                session.feed([[wanted]]).run()


class Holder(Plain):
    """Attends to everything but for a moment between the parts, in which it computes nothing."""

    def rest(self) -> None:
        """Leave what left the window to a fork, and attend to it again."""
        fork = self._session.fork(f"{NAME} fork")
        self._session.set_mode("window")
        self._session.set_mode("full")
        fork.delete()


def play(player: Plain) -> Said:
    """What is said of all parts."""
    said: Said = {}
    for text in texts():
        said |= player.read(text)
        player.rest()
        said |= player.go_on()
        player.rest()
    return said


def texts() -> list[str]:
    """The parts of the stream: words of random letters, the same in every process."""
    source = random.Random(SEED)
    letters = "etaoinshrdlu"

    def word() -> str:
        return "".join(source.choices(letters, k=source.randint(2, 7)))

    return [" ".join(word() for _ in range(WORDS_A_PART)) + ". " for _ in range(NUM_PARTS)]


def _scored(session: Session, text: str) -> Said:
    scores = session.score(text)
    return {s.token_index: (s.token_id, s.logprob) for s in scores if s.logprob is not None}


def _generated(session: Session, num_tokens: int = GENERATED_A_PART) -> Said:
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, seed=SEED
    )
    return {
        delta.token_index: (delta.logprob.token_id, delta.logprob.logprob)
        for delta in session.generate(params)
        if delta.logprob is not None
    }

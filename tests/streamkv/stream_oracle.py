"""What a session is compared with: one that was given the same tokens and nothing else."""

from dataclasses import dataclass, field

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.journal_records import GivenKind, Kept

SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
TEXT = "".join(
    f"Entry {number}: the fox sleeps in the sun, and the café forgets nothing.\n"
    for number in range(200)
)


def config(store: object = None, **options: object) -> EngineConfig:
    """Options under which a few hundred tokens leave the window."""
    small: dict[str, object] = {
        "window_size": 128,
        "prefill_chunk": 64,
        "cpu_bytes": "4MiB",
        "ssd_bytes": "64MiB",
        "compile": "off",
        "checkpoint_tokens": 192,
        "store": None if store is None else str(store),
    }
    return EngineConfig(**(small | options))  # type: ignore[arg-type]  # given by the tests


def ids_of(session: Session) -> list[int]:
    """The whole stream."""
    past = session._live.past
    ids: list[int] = past.ids(0, past.state.num_tokens).tolist()
    return ids


def generated(session: Session, params: SamplingParams = SEEDED) -> list[int]:
    """The tokens of a generation."""
    return [delta.token_id for delta in session.generate(params) if delta.token_id is not None]


@dataclass
class Stream:
    """What a session should hold.

    Attributes:
        ids: of all tokens.
        kept: (token_index, num_tokens) of each text that was kept.
    """

    ids: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)

    def copy(self) -> "Stream":
        """The same, going its own way."""
        return Stream(list(self.ids), list(self.kept))

    def rewind(self, token_index: int) -> None:
        """Forget the later tokens; a text that was kept before stays so, whatever is left of it."""
        del self.ids[token_index:]
        self.kept = [span for span in self.kept if span[0] < token_index]


def plain(engine: Engine, stream: Stream, name: str = "plain") -> Session:
    """A new session that is given these tokens."""
    session = engine.session(name)
    sequence, done = session._live.sequence, 0
    ends = [*(start for start, _ in stream.kept[1:]), len(stream.ids)]
    for (start, num_tokens), latest in zip(stream.kept, ends, strict=False):
        if start > done:
            session.feed([stream.ids[done:start]]).run()
        done = start
        # What `keep` does, also for a text of which only a part is left.
        end = min(start + num_tokens, latest)
        window = sequence.final_window.with_sinks(start, start + num_tokens)
        kept = Kept(start, num_tokens)
        session._live.intake._give(GivenKind.CALLER, stream.ids[start:end], kept)
        sequence.change_window(start, window)
        done = end
    if done < len(stream.ids):
        session.feed([stream.ids[done:]]).run()
    return session


def assert_goes_on_like(
    session: Session, engine: Engine, stream: Stream | list[int], tolerance: float = 1e-4
) -> None:
    """The session holds these tokens, and what follows is what follows them in a plain session.

    Scores ten tokens, which have to be as expected as there, and generates.
    """
    if isinstance(stream, list):
        stream = Stream(stream)
    assert ids_of(session) == stream.ids
    following = [5 + 11 * index % 200 for index in range(10)]
    expected = plain(engine, stream)
    try:
        scores = zip(session.score([following]), expected.score([following]), strict=True)
        for one, other in scores:
            assert (one.token_id, one.token_index) == (other.token_id, other.token_index)
            if one.logprob is not None and other.logprob is not None:
                assert abs(one.logprob - other.logprob) < tolerance
        assert generated(session) == generated(expected)
    finally:
        expected.delete()


def check_integrity(engine: Engine) -> None:
    """Every block of the pool is accounted for, and the sessions' live blocks are all of them."""
    engine._tiers.flush()
    engine._tiers.check_integrity()
    engine._sharing.under_way.check_integrity()
    live = {
        block.block_id
        for session in engine._sessions.values()
        for block in session._live.sequence.table
    }
    assert engine.usage()["gpu"].num_blocks == len(live)

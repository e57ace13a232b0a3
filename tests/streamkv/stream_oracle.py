"""What a session is compared with: one that was given the same tokens and nothing else."""

from streamkv import Engine, EngineConfig, SamplingParams, Session

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


def plain(engine: Engine, ids: list[int], name: str = "plain") -> Session:
    """A new session that is fed these ids."""
    session = engine.session(name)
    session.feed([ids]).run()
    return session


def assert_goes_on_like(session: Session, engine: Engine, ids: list[int]) -> None:
    """The session holds `ids`, and what follows is what follows them in a session fed with them.

    Scores ten tokens, which have to be as expected as there, and generates.
    """
    assert ids_of(session) == ids
    following = [5 + 11 * index % 200 for index in range(10)]
    expected = plain(engine, ids)
    try:
        for one, other in zip(session.score([following]), expected.score([following]), strict=True):
            assert (one.token_id, one.token_index) == (other.token_id, other.token_index)
            if one.logprob is not None and other.logprob is not None:
                assert abs(one.logprob - other.logprob) < 1e-4
        assert generated(session) == generated(expected)
    finally:
        expected.delete()


def check_integrity(engine: Engine) -> None:
    """Every block of the pool is accounted for, and the sessions' live blocks are all of them."""
    engine._tiers.flush()
    engine._tiers.check_integrity()
    live = {
        block.block_id
        for session in engine._sessions.values()
        for block in session._live.sequence.table
    }
    assert engine.usage()["gpu"].num_blocks == len(live)

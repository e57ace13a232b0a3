"""Sessions that are fed, generate, keep, fork, are rewound, sleep and wake in any order."""

import random
from pathlib import Path

import pytest
from stream_oracle import (
    Stream,
    assert_goes_on_like,
    check_integrity,
    config,
    generated,
    ids_of,
)

from streamkv import Engine, SamplingParams, Session


class Play:
    """A few sessions and what each of them should hold."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.streams: dict[str, Stream] = {}
        self.sessions: dict[str, Session] = {}
        self.num_made = 0

    def step(self) -> None:
        """One operation on one session, chosen at random."""
        name = self.random.choice(
            [*self.streams, "new"] if len(self.streams) < 4 else [*self.streams]
        )
        if name == "new":
            self.num_made += 1
            name = f"session {self.num_made}"
            self.streams[name] = Stream()
        session = self.sessions.get(name)
        if session is None:
            session = self.sessions[name] = self.engine.session(name)
        stream = self.streams[name]
        operations = [self.feed, self.feed, self.keep, self.fork, self.delete, self.close]
        if stream.ids:
            operations += [self.rewind, self.rewind, self.rewind, self.generate, self.abandon]
        self.random.choice(operations)(name, session, stream)
        if name in self.sessions:
            assert ids_of(session) == stream.ids
            assert session.num_tokens == len(stream.ids)

    def feed(self, name: str, session: Session, stream: Stream) -> None:
        ids = [self.random.randrange(5, 300) for _ in range(self.random.choice([1, 5, 64, 200]))]
        session.feed([ids]).run()
        stream.ids += ids

    def generate(self, name: str, session: Session, stream: Stream) -> None:
        params = SamplingParams(seed=self.random.randrange(99), max_tokens=7, ignore_eos=True)
        stream.ids += generated(session, params)

    def abandon(self, name: str, session: Session, stream: Stream) -> None:
        answer = session.generate(SamplingParams(seed=1, ignore_eos=True))
        for _ in range(self.random.randrange(1, 5)):
            token_id = next(answer).token_id
            assert token_id is not None
            stream.ids.append(token_id)

    def keep(self, name: str, session: Session, stream: Stream) -> None:
        before = session.num_tokens
        session.keep(self.random.choice(["The number is seven. ", "Nothing is forgotten. " * 5]))
        stream.ids += ids_of(session)[before:]
        stream.kept.append((before, len(stream.ids) - before))

    def rewind(self, name: str, session: Session, stream: Stream) -> None:
        token_index = self.random.choice(
            [
                self.random.randrange(1, len(stream.ids) + 1),
                max(1, len(stream.ids) - self.random.randrange(100)),
                max(1, len(stream.ids) // 64 * 64),
            ]
        )
        session.rewind(token_index)
        stream.rewind(token_index)

    def fork(self, name: str, session: Session, stream: Stream) -> None:
        if len(self.streams) < 4:
            self.num_made += 1
            other = f"fork {self.num_made}"
            self.sessions[other] = session.fork(other)
            self.streams[other] = stream.copy()

    def delete(self, name: str, session: Session, stream: Stream) -> None:
        if len(self.streams) > 2:
            session.delete()
            del self.sessions[name], self.streams[name]

    def close(self, name: str, session: Session, stream: Stream) -> None:
        if self.engine.config.store is not None:
            session.close()
            del self.sessions[name]

    def check(self) -> None:
        """All sessions go on as plain ones would."""
        check_integrity(self.engine)
        for name, stream in self.streams.items():
            session = self.sessions.get(name) or self.engine.session(name)
            if stream.ids:
                assert_goes_on_like(session, self.engine, stream)
            session.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("retain", ["all", "window", "none", "no store"])
def test_any_order_gives_what_plain_sessions_give(
    tiny_model_dir: Path, tmp_path: Path, retain: str, seed: int
) -> None:
    store, retain = (None, "all") if retain == "no store" else (tmp_path, retain)
    options = config(store, retain=retain, cpu_bytes="512KiB", window_size=80)
    with Engine(str(tiny_model_dir), options) as engine:
        play = Play(engine, seed)
        for _ in range(5):
            play.step()
        if store is None:
            play.check()
    if store is not None:
        with Engine(str(tiny_model_dir), options) as play.engine:
            play.sessions.clear()
            for _ in range(10):
                play.step()
            play.check()

"""What a session computes equals the brute force, however its input is cut."""

import random
from pathlib import Path

import pytest
from dense_oracle import dense_logits, target_logprobs

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.model import ModelAdapter

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def adapter(tiny_model_dir: Path) -> ModelAdapter:
    return ModelAdapter.load(str(tiny_model_dir))


@pytest.fixture(scope="module")
def ids(adapter: ModelAdapter) -> list[int]:
    return random.Random(7).choices(range(3, adapter.vocab_size), k=NUM_TOKENS)


def config(window_size: int, num_sinks: int, prefill_chunk: int = 128) -> EngineConfig:
    return EngineConfig(
        window_size=window_size,
        num_sink_tokens=num_sinks,
        prefill_chunk=prefill_chunk,
        cpu_bytes="8MiB",
    )


def score_in_pieces(engine: Engine, ids: list[int], piece: int) -> list[float]:
    with engine.session(f"cut-{piece}") as session:
        items = [ids[start : start + piece] for start in range(0, len(ids), piece)]
        scores = list(session.score(items))
    assert [score.token_id for score in scores] == ids
    assert [score.token_index for score in scores] == list(range(len(ids)))
    assert scores[0].logprob is None
    return [score.logprob for score in scores[1:] if score.logprob is not None]


@pytest.mark.parametrize(
    ("window_size", "num_sinks"),
    [(64, 4), (65, 0), (100, 1), (96, 70), (127, 64), (2048, 4)],
    ids=["one-block", "no-sinks", "one-sink", "sinks-over-a-block", "block-of-sinks", "dense"],
)
def test_scores_equal_brute_force(
    tiny_model_dir: Path,
    adapter: ModelAdapter,
    ids: list[int],
    window_size: int,
    num_sinks: int,
) -> None:
    expected = target_logprobs(dense_logits(adapter, ids, num_sinks, window_size), ids)
    with Engine(str(tiny_model_dir), config(window_size, num_sinks)) as engine:
        engine.wait_until_fast()
        for piece in (1, 7, 64, 1000):
            found = score_in_pieces(engine, ids, piece)
            worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
            assert worst < 2e-4, f"fed {piece} at a time"


def test_greedy_tokens_equal_brute_force(
    tiny_model_dir: Path, adapter: ModelAdapter, ids: list[int]
) -> None:
    stream = ids[:150]
    with Engine(str(tiny_model_dir), config(64, 4)) as engine:
        session = engine.session("greedy")
        session.feed([stream]).run()
        deltas = session.generate(
            SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        ).run()
    for delta in deltas:
        logits = dense_logits(adapter, stream, 4, 64)[-1]
        if delta.margin > 1e-3:
            assert delta.token_id == int(logits.argmax())
        assert delta.token_id is not None
        stream = [*stream, delta.token_id]


def test_the_result_does_not_depend_on_who_shares_the_engine(
    tiny_model_dir: Path, ids: list[int]
) -> None:
    with Engine(str(tiny_model_dir), config(64, 4)) as engine:
        engine.wait_until_fast()  # other kernels round differently
        alone = score_in_pieces(engine, ids, 50)
        first, second = engine.session("first"), engine.session("second")
        items = [ids[start : start + 50] for start in range(0, len(ids), 50)]
        mixed: list[float] = []
        for item in items:
            scores = first.score([item]).run()
            second.feed([item[::-1]]).run()
            mixed.extend(score.logprob for score in scores if score.logprob is not None)
    assert mixed == pytest.approx(alone, abs=1e-6)


def test_kept_text_stays_attended(tiny_model_dir: Path, adapter: ModelAdapter) -> None:
    """A kept text is seen for ever: what follows differs from a stream in which it was only fed."""
    texts = ["The dog sleeps. " * 8, "A secret: seven. ", "The fox jumps over it all. " * 30]
    with Engine(str(tiny_model_dir), config(64, 4)) as engine:
        logprobs = []
        for name, keep in (("fed", False), ("kept", True), ("kept again", True)):
            session = engine.session(name)
            session.feed(texts[0]).run()
            if keep:
                session.keep(texts[1])
            else:
                session.feed(texts[1]).run()
            logprobs.append([score.logprob for score in session.score(texts[2])][-20:])
            expected_sinks = 4 + (len(engine.tokenizer.encode(texts[1])) if keep else 0)
            assert session.stats().num_sink_tokens == expected_sinks
    assert logprobs[1] == logprobs[2]
    assert logprobs[0] != logprobs[1]

"""What was asked is computed again with the blocks that it chose, before the answer begins."""

from pathlib import Path

import pytest

from streamkv import Engine, EngineConfig, SamplingParams, Session, recaller
from streamkv.recall_schedule import QUESTION_TOKENS, question_start

WINDOW_SIZE, STRIDE = 320, 64


def options(blocks: int = 30) -> EngineConfig:
    return EngineConfig(
        window_size=WINDOW_SIZE,
        recall_blocks=blocks,
        recall_stride=STRIDE,
        attention="window",
        prefill_chunk=128,
        cpu_bytes="64MiB",
        max_sessions=3,
        compile="off",
    )


def some_ids(count: int, seed: int = 3) -> list[int]:
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def answer(session: Session, num_tokens: int = 8) -> list[tuple[int | None, float]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    found = []
    for delta in session.generate(params):
        assert delta.logprob is not None
        found.append((delta.token_id, delta.logprob.logprob))
    return found


@pytest.mark.parametrize("num_computed", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 1000])
def test_the_question_is_a_block_or_more_and_begins_at_a_block(num_computed: int) -> None:
    start = question_start(num_computed, 64)
    assert start % 64 == 0
    assert min(num_computed, QUESTION_TOKENS) <= num_computed - start < QUESTION_TOKENS + 64


@pytest.mark.parametrize("num_tokens", [704, 705, 750, 767, 768, 769])
def test_the_question_attends_to_what_it_chose(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """As if the choice had been known when the question was read."""
    ids = some_ids(num_tokens)
    # The last token waits for the answer.
    start = question_start(num_tokens - 1, 64)
    with Engine(str(tiny_model_dir), options()) as engine:
        asked = engine.session("asked")
        asked.feed([ids]).run()
        asked.set_mode("recall")
        found = answer(asked)

        told = engine.session("told")
        told.feed([[*ids[: start + 1]]]).run()
        told.set_mode("recall")
        monkeypatch.setattr(recaller, "question_start", lambda num_computed, size: num_computed)
        # All old blocks are recalled, so that which queries choose makes no difference.
        engine._executor.choose_blocks(told._live.sequence)
        told.feed([ids[start + 1 :]]).run()
        told._live.memory.state.in_answer = True
        expected = answer(told)

        plain = engine.session("plain")
        plain.feed([ids]).run()
        plain.set_mode("recall")
        only_the_last = answer(plain)
        engine._tiers.check_integrity()
    assert [token for token, _ in found] == [token for token, _ in expected]
    logprobs = [logprob for _, logprob in found]
    assert logprobs == pytest.approx([logprob for _, logprob in expected], abs=1e-4)
    assert logprobs != pytest.approx([logprob for _, logprob in only_the_last], abs=1e-4)


def test_an_answer_in_parts_is_the_answer_in_one(tiny_model_dir: Path) -> None:
    """Going on is not asking: nothing is chosen or computed again."""
    found = []
    for parts in ([12], [5, 7], [1] * 12):
        with Engine(str(tiny_model_dir), options(blocks=2)) as engine:
            session = engine.session("one")
            session.feed([some_ids(900)]).run()
            session.set_mode("recall")
            found.append([each for part in parts for each in answer(session, part)])
            assert len(session.attended()) >= 2
    for others in found[1:]:
        assert [token for token, _ in others] == [token for token, _ in found[0]]
        expected = [logprob for _, logprob in found[0]]
        assert [logprob for _, logprob in others] == pytest.approx(expected, abs=1e-4)


def test_without_old_blocks_nothing_is_computed_again(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("short")
        session.feed([some_ids(WINDOW_SIZE // 2)]).run()
        before = session._live.sequence.num_computed
        session.set_mode("recall")
        engine._executor.choose_blocks(session._live.sequence)
        assert session._live.sequence.num_computed == before


def test_question_and_answer_again_and_again(tiny_model_dir: Path) -> None:
    """Every turn goes back over tokens of the turn before; no block is lost or kept."""
    with Engine(str(tiny_model_dir), options(blocks=3)) as engine:
        session = engine.session("chat")
        session.feed([some_ids(900)]).run()
        session.set_mode("recall")
        for turn in range(8):
            session.feed([some_ids(5 + 9 * turn, seed=turn + 1)]).run()
            assert len(answer(session)) == 8
            engine._tiers.check_integrity()
        num_tokens = session.num_tokens
        session.close()
        assert num_tokens == 900 + sum(5 + 9 * turn for turn in range(8)) + 64
        engine._tiers.flush()
        assert engine._tiers.usage()["gpu"].num_blocks == 0

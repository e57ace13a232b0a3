"""Which queries choose: those of the heads that look facts up, each by its layer and its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.digest_index import DigestIndex
from streamkv.kernels.digests import block_weights
from streamkv.recall_schedule import Choosing


def test_what_weighs_blocks_can_be_compiled_ahead(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call of the sizes and types of a choice; on a GPU an engine makes it as it opens."""
    config = EngineConfig(
        window_size=192, recall_blocks=3, attention="recall", cpu_bytes="64MiB", compile="off"
    )
    calls: list[Any] = []

    def noted(queries: Tensor, pages: list[Tensor], *rest: Any) -> Tensor:
        calls.append((queries, pages[0], rest))
        return block_weights(queries, pages, *rest)

    monkeypatch.setattr("streamkv.recall_chooser.block_weights", noted)
    monkeypatch.setattr("streamkv.digest_index.block_weights", noted)
    with Engine(str(tiny_model_dir), config) as engine:
        recaller = engine._executor.recaller
        assert recaller is not None
        recaller.chooser.warm_up(engine.model.spec)
        session = engine.session("one")
        session.feed([[5 + (3 * i * i + 7 * i) % 290 for i in range(500)]]).run()
        session.generate(SamplingParams(temperature=0.0, max_tokens=1)).run()
    (queries, page, rest), *chosen = calls
    assert chosen
    for its_queries, its_page, its_rest in chosen:
        assert queries.shape[0] == its_queries.shape[0] and queries.dtype == its_queries.dtype
        assert page.shape[0] == its_page.shape[0] and page.shape[2:] == its_page.shape[2:]
        assert page.dtype == its_page.dtype
        assert rest[0] == its_rest[0] and rest[3] == its_rest[3]


def test_the_queries_that_choose_are_those_of_its_heads_in_their_order(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        window_size=192, recall_blocks=3, attention="recall", cpu_bytes="64MiB", compile="off"
    )
    asked: list[tuple[Tensor, Tensor]] = []
    choose = DigestIndex.choose
    with Engine(str(tiny_model_dir), config) as engine:
        session = engine.session("one")
        sequence, recaller = session._live.sequence, session._live.executor.recaller
        assert recaller is not None

        def noted(index: DigestIndex, queries: Tensor, *rest: Any) -> Choosing:
            observed = recaller._streams[sequence].queries.before(sequence.num_computed)
            assert observed is not None
            asked.append((queries.clone(), observed))
            return choose(index, queries, *rest)

        monkeypatch.setattr(DigestIndex, "choose", noted)
        session.feed([[5 + (3 * i * i + 7 * i) % 290 for i in range(500)]]).run()
        session.generate(SamplingParams(temperature=0.0, max_tokens=1)).run()
        heads = recaller.chooser._heads.heads
    # Not the same layer or place for all, so that the one is not taken for the other.
    assert len({head.layer for head in heads}) > 1 and len({head.q_head for head in heads}) > 2
    assert asked
    for queries, observed in asked:
        assert queries.shape == (len(heads), observed.shape[1], observed.shape[3])
        for found, head in zip(queries, heads, strict=True):
            assert torch.equal(found, observed[head.layer, :, head.q_head])

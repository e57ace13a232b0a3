"""Models that engines are opened with, and engines that are ready to be timed.

The only place that knows where a model comes from: random weights of a shape, held once for all
engines, or a model on disk.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import every, pieces, require, say, topics_ids
from parts import synchronize
from random_model import ids, random_adapter, random_engine

from streamkv import Engine, EngineConfig, Session
from streamkv.model import ModelAdapter
from streamkv.recall_bench.run import ModelFacts
from streamkv.retrieval_heads import NUM_HEADS, Head, RetrievalHeads
from streamkv.tiers.spec import KVSpec

MOST_PINNING_S = 180.0
"""Longest wait; 64 MiB take about 45 ms."""


def some_heads(adapter: ModelAdapter, *_: object) -> RetrievalHeads:
    """Heads of as many layers and KV heads as there are: random weights have no better ones."""
    group = adapter.num_q_heads // adapter.spec.num_kv_heads
    layers = [place * adapter.spec.num_layers // NUM_HEADS for place in range(NUM_HEADS)]
    q_heads = [place * group % adapter.num_q_heads for place in range(NUM_HEADS)]
    heads = sorted({Head(*pair) for pair in zip(layers, q_heads, strict=True)})
    return RetrievalHeads(tuple(heads), group)


@dataclass(frozen=True)
class Model:
    """A model that engines can be opened with.

    Attributes:
        open_engine: opens one.
        spec: layout of its blocks.
        token_ids: so many tokens to read.
    """

    open_engine: Callable[[EngineConfig], AbstractContextManager[Engine]]
    spec: KVSpec
    token_ids: Callable[[int], list[int]]

    @property
    def block_bytes(self) -> int:
        """Of a block."""
        return self.spec.block_bytes


def random_model(shape: dict[str, Any], tokenizer: Path | None, device: str) -> Model:
    """Random weights, held once for all engines."""
    adapter = random_adapter(shape, tokenizer, device)

    @contextmanager
    def open_engine(config: EngineConfig) -> Iterator[Engine]:
        heads = mock.patch("streamkv.device.find_retrieval_heads", some_heads)
        with heads, random_engine(adapter, config) as engine:
            yield engine

    return Model(open_engine, adapter.spec, lambda number: ids(1, number))


def real_model(name: str) -> Model:
    """One on disk, with the heads that were found in it, and text."""
    facts = ModelFacts.read(name, "bfloat16", say)
    return Model(
        lambda config: Engine(name, config, on_progress=say),
        facts.spec,
        lambda number: topics_ids(facts.tokenizer, number),
    )


def opened(stack: ExitStack, model: Model, config: EngineConfig) -> Engine:
    """An engine that is ready, its cpu pool pinned; it is closed with `stack`."""
    began = time.monotonic()
    engine = stack.enter_context(model.open_engine(config))
    is_captured = engine.wait_until_fast() or not torch.cuda.is_available()
    say(f"  engine ready after {time.monotonic() - began:.1f} s")
    require(is_captured, "decode steps are not captured as graphs")
    seconds = wait_until_pinned(engine)
    say(f"  {engine._cpu_pool.num_pinned_bytes >> 20} MiB pinned after {seconds:.1f} s more")
    return engine


def wait_until_pinned(engine: Engine) -> float:
    """Seconds until the cpu pool is page-locked: each piece would stall the device."""
    began, pool = time.monotonic(), engine._cpu_pool
    while pool._may_grow() and time.monotonic() - began < MOST_PINNING_S:
        time.sleep(0.02)
    return time.monotonic() - began


def read(engine: Engine, name: str, token_ids: list[int]) -> Session:
    """A session that has read so much, in mode `window`, with all of its blocks below."""
    session, show = engine.session(name), every(len(token_ids) // 8 + 1)
    for progress in session.feed(pieces(token_ids, engine.config.prefill_chunk)):
        show(progress.num_tokens, progress.tokens_per_s)
    synchronize()
    engine._tiers.flush()
    return session

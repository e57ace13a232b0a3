"""Recall on a device that runs ahead: what a token attends to does not depend on how far it ran.

Model and device are `fake_model`'s and `fake_device`'s: every token is a hash of all that it sees,
of recalled blocks, too. Engine, recall, scheduling and the engine's thread are real.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_device import Device, DeviceTransfer, FakeFlight
from torch import Tensor

import streamkv.engine
import streamkv.recall_digester
from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.batch import Batch
from streamkv.tiers.gpu_pool import GpuPool

STRIDE = 64
GREEDY = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
CONFIG = EngineConfig(
    window_size=3 * STRIDE,
    recall_blocks=2,
    recall_stride=STRIDE,
    attention="recall",
    prefill_chunk=256,
    cpu_bytes="8MiB",
    dtype="float32",
    max_sessions=2,
)


class Prompt(Device):
    """Every step is carried out where it is launched, so that none is launched ahead."""

    def launch(self, batch: Batch) -> FakeFlight:
        flight = super().launch(batch)
        while self.run_next():
            pass
        return flight


@contextmanager
def engine_over(kind: type[Device], model: Path) -> Iterator[tuple[Engine, Device]]:
    made: list[Device] = []

    def make_transfer(pool: GpuPool) -> DeviceTransfer:
        made.append(kind(pool, 4))
        return DeviceTransfer(pool, made[0])

    count = itertools.count()

    def digests(pool: Tensor, block_ids: Tensor, kv_heads: Tensor) -> Tensor:
        """The device is late: what it has written when a block is digested is left to chance."""
        generators = [torch.Generator().manual_seed(next(count)) for _ in block_ids]
        shape = (len(kv_heads), *pool.shape[-2:])
        return torch.stack([torch.randn(shape, generator=each) for each in generators], 1)

    with (
        mock.patch.object(streamkv.engine, "make_transfer", make_transfer),
        mock.patch.object(streamkv.engine, "make_runner", lambda *_: made[0]),
        mock.patch.object(streamkv.recall_digester, "block_digests", digests),
    ):
        engine = Engine(str(model), CONFIG)
        if kind is Prompt:
            with engine:
                yield engine, made[0]
            return
        with made[0].running(lambda: None), engine:
            yield engine, made[0]


def story(session: Session, seed: int) -> list[Any]:
    """Answers that are left in the middle and begun again, with something read in between."""
    rng, found = random.Random(seed), list[Any]()
    session.feed([[3 + index * index % 290 for index in range(700)]]).run()
    for _ in range(12):
        answer = session.generate(GREEDY)
        found += [next(answer).token_id for _ in range(rng.randint(1, 40))]
        answer.close()
        found.append([each.start for each in session.attended()])
        if rng.random() < 0.3:
            session.feed([[rng.randrange(3, 290) for _ in range(rng.randint(1, 90))]]).run()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_same_however_far_its_device_runs_ahead(
    tiny_model_dir: Path, seed: int
) -> None:
    with engine_over(Prompt, tiny_model_dir) as (engine, _):
        expected = story(engine.session("one"), seed)
    chosen = {tuple(each) for each in expected if isinstance(each, list)}
    assert len(chosen) > 3, "choices have to differ for this to show anything"
    with engine_over(Device, tiny_model_dir) as (engine, device):
        launched = list[int]()
        device.before_launch = lambda batch: launched.extend(
            step.start for step in batch.steps if step.source is not None
        )
        assert story(engine.session("one"), seed) == expected
        assert len(launched) > 50, "nothing ran ahead"
        assert not any(start % STRIDE == 0 for start in launched)
        engine._tiers.check_integrity()

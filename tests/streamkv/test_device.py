"""Which device is chosen, and what is made for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.config import choose_dtype
from streamkv.device import (
    choose_device,
    gpu_problem,
    make_cpu_pool,
    make_runner,
    make_transfer,
)
from streamkv.errors import ConfigError
from streamkv.model import ModelAdapter
from streamkv.runner import Runner
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.transfer import Transfer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_cpu_is_taken_unless_a_gpu_is_asked_for() -> None:
    assert [choose_device("auto"), choose_device("cpu")] == ["cpu", "cpu"]
    assert choose_dtype("auto", "cpu") == "float32"
    assert choose_dtype("auto", "cuda") == "bfloat16"
    assert choose_dtype("float16", "cuda") == "float16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    problem = gpu_problem()
    assert problem is not None
    with pytest.raises(ConfigError, match="device='cuda'") as caught:
        choose_device("cuda")
    assert problem in str(caught.value)


def test_a_pool_in_ordinary_memory_gets_plain_copies_and_the_cpus_runner(
    tiny_model_dir: Path,
) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    pool = GpuPool(adapter.spec, 2)
    assert type(make_transfer(pool)) is Transfer
    assert not make_cpu_pool(adapter.spec, 1 << 20, pool.data.device).pin_next()
    runner = make_runner(adapter, pool, EngineConfig(compile="off"))
    assert isinstance(runner, Runner)
    assert runner.wait_until_fast() is False
    runner.close()


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_says_what_the_cpu_says_with_tiers_and_after_a_resume(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    ids = [5 + 7 * index % 200 for index in range(900)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(
            window_size=128,
            device=device,  # type: ignore[arg-type]  # one of the two
            dtype="float32",
            cpu_bytes="1MiB",
            store=str(tmp_path / device),
        )
        with Engine(str(tiny_model_dir), config) as engine:
            session = engine.session("same")
            session.feed([ids]).run()
            session.close()
            session = engine.session("same")
            found.append([delta.token_id for delta in session.generate(greedy)])
            assert engine.counters()["promotions"] > 0
    assert found[0] == found[1]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"gpu_bytes": "900GiB"}, {"max_sessions": 1_000_000}])
def test_what_a_gpu_has_no_room_for_is_refused_before_it_is_allocated(
    tiny_model_dir: Path, options: dict[str, Any]
) -> None:
    used = torch.cuda.memory_allocated()
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* free; weights") as caught:
        Engine(str(tiny_model_dir), EngineConfig(window_size=128, device="cuda", **options))
    assert "max_sessions=" in caught.value.remedy
    assert torch.cuda.max_memory_allocated() - used < 1 << 30


@needs_gpu
@pytest.mark.gpu
def test_the_cpu_pool_below_a_gpu_is_page_locked_and_given_back(tiny_model_dir: Path) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    pool = make_cpu_pool(adapter.spec, 1 << 20, torch.device("cuda"))
    assert pool.pin_next() and pool.num_pinned_bytes > 0
    pool.close()
    assert pool.num_pinned_bytes == 0

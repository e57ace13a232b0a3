"""With `batch_invariant` a session's bits do not depend on who shares its steps, nor on sleep."""

import asyncio
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_many_sessions import put_to_sleep

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.kernels.native_build import find_compiler

NUM_SESSIONS = 8
TURNS = 3
DEVICES = [
    "cpu",
    "cpu without a native step",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]

Bits = list[tuple[int | None, float]]


def config(device: str, **more: Any) -> EngineConfig:
    if device.startswith("cpu "):
        device, more = "cpu", {"compile": "off", **more}
    given = {
        "window_size": 192,
        "prefill_chunk": 128,
        "max_sessions": NUM_SESSIONS,
        "cpu_bytes": "64MiB",
        "device": device,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "batch_invariant": True,
    }
    return EngineConfig(**{**given, **more})


def prompt(number: int, turn: int) -> list[int]:
    rng = random.Random(100 * number + turn)
    return [rng.randrange(5, 200) for _ in range(20 + 37 * number + 50 * turn)]


async def turn_of(session: Session, number: int, turn: int) -> Bits:
    """Every token of an answer, and its log-probability, not rounded."""
    params = SamplingParams(
        temperature=0.7 if number % 2 else 0.0,
        seed=number,
        max_tokens=25 + 3 * number,
        ignore_eos=True,
        logprobs=0,
    )
    async for _ in session.afeed([prompt(number, turn)]):
        pass
    found: Bits = []
    async for delta in session.agenerate(params):
        assert delta.logprob is not None
        found.append((delta.token_id, delta.logprob.logprob))
    return found


async def play(engine: Engine, numbers: list[int], sleeps: bool) -> dict[int, list[Bits]]:
    """All turns of some sessions at the same time."""
    sessions = {number: engine.session(f"session {number}") for number in numbers}
    found: dict[int, list[Bits]] = {number: [] for number in numbers}
    for turn in range(TURNS):
        answers = await asyncio.gather(
            *(turn_of(session, number, turn) for number, session in sessions.items())
        )
        for number, answer in zip(numbers, answers, strict=True):
            found[number].append(answer)
        if sleeps:
            await asyncio.to_thread(put_to_sleep, engine, *sessions.values())
    return found


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path, device: str) -> dict[int, list[Bits]]:
    found: dict[int, list[Bits]] = {}
    with Engine(str(tiny_model_dir), config(device)) as engine:
        for number in range(NUM_SESSIONS):
            found |= asyncio.run(play(engine, [number], sleeps=False))
    return found


@pytest.mark.parametrize(
    ("more", "sleeps"),
    [
        ({}, False),
        ({}, True),
        # Room for few of them: they take turns in the middle of their answers.
        ({"gpu_bytes": "room for three", "turn_tokens": 9}, False),
    ],
    ids=["together", "asleep in between", "forced to take turns"],
)
def test_bits_are_those_of_a_session_alone(
    tiny_model_dir: Path,
    device: str,
    alone: dict[int, list[Bits]],
    more: dict[str, Any],
    sleeps: bool,
) -> None:
    if "gpu_bytes" in more:
        block_bytes = 16384 if device == "cuda" else 32768
        more = more | {"gpu_bytes": 3 * 9 * block_bytes}
    with Engine(str(tiny_model_dir), config(device, **more)) as engine:
        found = asyncio.run(play(engine, list(range(NUM_SESSIONS)), sleeps))
        if sleeps or more:
            assert engine.counters()["sessions_slept"] >= NUM_SESSIONS
    assert found == alone


def test_bits_do_not_depend_on_what_a_compiler_fuses(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC 13 multiplies and adds in one rounding in some loops and in two in others.

    So does any GCC that is told to avoid long chains of such instructions.
    """
    splits_chains = "--param=avoid-fma-max-bits=512"
    known = find_compiler()
    if known is None:
        pytest.skip("no C compiler")
    probe = [known, splits_chains, "-fsyntax-only", "-x", "c", "/dev/null"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("the C compiler has no such parameter")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {known} "$@" {splits_chains}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("STREAMKV_CACHE", str(tmp_path / "cache"))
    numbers, alone = list(range(4)), {}
    with Engine(str(tiny_model_dir), config("cpu")) as engine:
        for number in numbers:
            alone |= asyncio.run(play(engine, [number], sleeps=False))
    assert list((tmp_path / "cache").rglob("*.so"))
    with Engine(str(tiny_model_dir), config("cpu")) as engine:
        assert asyncio.run(play(engine, numbers, sleeps=False)) == alone

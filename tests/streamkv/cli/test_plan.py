"""`streamkv plan`: what it says, what it exits with, and that its advice works."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import Ran, Run

from streamkv.cli.doctor_model import read_size
from streamkv.cli.plan import CONTEXT_BYTES
from streamkv.config import EngineConfig
from streamkv.gpu_plan import DeviceMemory, plan_gpu
from streamkv.session_plan import Speeds, Workload, plan_sessions

GIB = 1 << 30
LARGE = ("--gpu-memory", "80GiB", "--ssd-bytes", "500GiB")
SMOL = ("plan", "llama-3.1-8b", "--sessions", "150", "--window", "4096", "--awake", "8")

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_json_is_the_plan_of_these_options(run: Run, tiny_model_dir: Path) -> None:
    ran = run(
        *("plan", tiny_model_dir, "--json", "--sessions", 50, "--awake", 5, "--window", 256),
        *("--sinks", 70, "--recall-blocks", 2, "--cpu-bytes", "8MiB", "--ssd-bytes", "900MiB"),
        *("--digest-bytes", "8MiB", "--gpu-memory", "8GiB", "--tokens", 3000, "--chunk", 256),
        *("--tokens-per-day", 5000, "--sleeps-per-day", 7, "--pcie-gbps", 20, "--ssd-gbps", 2),
        *("--checkpoint-tokens", 512, "--ssd-endurance-tbw", 100),
    )
    size, spec = read_size(tiny_model_dir, "bfloat16")
    config = EngineConfig(
        window_size=256,
        num_sink_tokens=70,
        recall_blocks=2,
        cpu_bytes="8MiB",
        ssd_bytes="900MiB",
        digest_bytes="8MiB",
        prefill_chunk=256,
        checkpoint_tokens=512,
    )
    memory = DeviceMemory(8 * GIB, 8 * GIB - CONTEXT_BYTES)
    work = Workload(50, 5, 3000, 5000, 7)
    plan = plan_sessions(size, spec, config, work, memory, Speeds(20e9, 2e9))
    said = ran.json
    assert ran.code == 0 and said["fits"] is True and said["shortfalls"] == []
    for name in ("token_bytes", "pool_blocks", "asleep_blocks", "cpu_sessions", "ssd_sessions"):
        assert said[name] == getattr(plan, name)
    for name in ("ssd_histories", "digest_host_bytes", "digest_file_bytes", "journal_bytes"):
        assert said[name] == getattr(plan, name)
    assert plan.gpu is not None and plan.writes is not None
    assert said["gpu"]["spare_bytes"] == plan.gpu.spare_bytes
    assert said["writes"]["total"] == plan.writes.total
    assert said["writes"]["ssd_years"] == pytest.approx(1e14 / plan.writes.total / 365.25)
    assert said["wake"]["ssd_s"] == plan.wake.ssd_s
    assert (said["dtype"], said["num_awake"], said["no_gpu"]) == ("bfloat16", 5, None)


def test_people_get_a_table_and_sentences(run: Run) -> None:
    """150 sessions of the 8B shape: 8 MiB a block, 65 blocks to wake, on an 80 GiB GPU."""
    ran = run(*SMOL, *LARGE, "--tokens-per-day", 10_000, "--ssd-endurance-tbw", 600)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    first = "llama-3.1-8b in bfloat16: 150 sessions of 4,100 tokens, 8 of them awake"
    assert lines[0] == first
    gpu, cpu, ssd = ([cell for cell in line.split("  ") if cell] for line in lines[3:6])
    assert [cell.strip() for cell in gpu[:3]] == ["gpu", "128.0 KiB", "8.0 MiB"]
    assert gpu[4].strip().endswith("awake sessions")
    assert cpu[3].strip() == "520.0 MiB (65 blocks)"
    assert ssd[0] == "ssd, at most" and "history" not in ran.out
    assert "weights 15.0 GiB" in ran.out and " to spare." in ran.out
    assert "written to the ssd in a day: at most " in ran.out and "years of it." in ran.out
    assert "(50 GB/s)" in ran.out and "a bound and no measurement" in ran.out
    assert lines[-1] == "ok    all of it fits"


def test_what_does_not_fit_is_1_and_each_advice_works(run: Run) -> None:
    asked = {"--gpu-memory": "20GiB", "--ssd-bytes": "10GiB", "--cpu-bytes": "1MiB"}
    asked |= {"--sessions": "150", "--awake": "8", "--window": "4096", "--recall-blocks": "4"}
    asked |= {"--tokens": "20000", "--digest-bytes": "2GiB"}

    def plan(options: dict[str, str], *more: str) -> Ran:
        flat = [text for pair in options.items() for text in pair]
        return run("plan", "llama-3.1-8b", *flat, *more)

    shown = plan(asked)
    assert shown.code == 1 and shown.err == "" and shown.out.count("FAIL  ") == 4
    said = plan(asked, "--json")
    assert said.code == 1 and said.json["fits"] is False
    kinds = [kind(short) for short in said.json["shortfalls"]]
    assert [tier for tier, _ in kinds] == ["gpu", "cpu", "ssd", "ssd"]
    num_tried = 0
    for short in said.json["shortfalls"]:
        for remedy in short["remedies"]:
            assert remedy["flag"] in shown.out
            flag, value = remedy["flag"].split()
            left = plan(asked | {flag: value}, "--json").json["shortfalls"]
            assert kind(short) not in [kind(each) for each in left], remedy
            num_tried += 1
    assert num_tried >= 9


def kind(short: dict[str, Any]) -> tuple[str, str]:
    return short["tier"], short["problem"].split(" are ")[0] if short["tier"] == "ssd" else ""


def test_a_model_that_no_gpu_is_small_enough_for_has_one_advice(run: Run) -> None:
    ran = run("plan", "llama-3.1-8b", "--gpu-memory", "8GiB")
    assert ran.code == 1
    [line] = [line for line in ran.out.splitlines() if line.startswith("FAIL")]
    assert line.count("--") == 1 and "Use --gpu-memory " in line


def test_without_numbers_there_are_defaults(run: Run, tiny_model_dir: Path) -> None:
    config = EngineConfig()
    said = run("plan", "--model", tiny_model_dir, "--gpu-memory", 0, "--json").json
    assert (said["num_sessions"], said["num_awake"]) == (1, 1)
    assert said["num_tokens"] == config.window_size + config.num_sink_tokens
    assert said["writes"] is None and said["wake"]["mean_s"] is None
    assert said["speeds_bytes_per_s"] == {"pinned": 5e9, "ssd": 1e9}
    many = run("plan", tiny_model_dir, "--gpu-memory", 0, "--sessions", 30, "--json").json
    assert many["num_awake"] == config.max_sessions
    assert many["wake"]["pinned_s"] <= many["wake"]["mean_s"] <= many["wake"]["ssd_s"]


def test_for_a_cpu_it_says_how_much_memory_the_pool_takes(run: Run, tiny_model_dir: Path) -> None:
    ran = run("plan", tiny_model_dir, "--gpu-memory", 0)
    assert ran.code == 0 and " in float32: " in ran.out
    assert "1 awake, if " in ran.out and "of memory are free" in ran.out
    assert "gpu: not planned, because --gpu-memory is 0. --gpu-memory 80GiB plans" in ran.out
    assert "give --tokens-per-day to know" in ran.out and "on average" not in ran.out


@no_gpu
def test_without_a_gpu_it_plans_for_a_cpu_and_says_why(run: Run, tiny_model_dir: Path) -> None:
    said = run("plan", tiny_model_dir, "--json").json
    assert said["gpu"] is None and "CUDA" in said["no_gpu"] and said["dtype"] == "float32"


def test_the_parts_of_a_described_gpu_are_those_of_its_plan(run: Run, tiny_model_dir: Path) -> None:
    said = run("plan", tiny_model_dir, "--gpu-memory", "4GiB", "--dtype", "float32", "--json").json
    size, spec = read_size(tiny_model_dir, "float32")
    memory = DeviceMemory(4 * GIB, 4 * GIB - CONTEXT_BYTES)
    plan = plan_gpu(memory, size, spec, EngineConfig(max_sessions=1))
    assert said["gpu"]["max_sessions"] == plan.max_sessions
    assert said["gpu"]["pool_bytes"] == plan.pool_bytes


@pytest.mark.parametrize(
    ("args", "code", "error"),
    [
        (["--sessions", 0], 2, "--sessions=0: out of range"),
        (
            ["--sessions", 3, "--awake", 4],
            2,
            "--awake=4: out of range. Use a whole number from 1",
        ),
        (["--tokens", 0], 2, "--tokens=0:"),
        (["--window", 5], 2, "--window=5: smaller than one block"),
        (["--window", 9000], 2, "--window=9000: with 4 sink tokens beyond the trained length"),
        (["--window", 10**30], 2, f"--window={10**30}: out of range"),
        (["--gpu-memory", "much"], 2, "--gpu-memory='much': not a size"),
        (["--ssd-bytes", "2PiB"], 2, "--ssd-bytes='2PiB': not a size"),
        (["--dtype", "int3"], 2, "--dtype='int3': not a choice"),
        (["--ssd-gbps", 0], 2, "--ssd-gbps=0.0: out of range"),
        (["--pcie-gbps", "nan"], 2, "--pcie-gbps=nan: out of range"),
        (["--pcie-gbps", "inf"], 2, "--pcie-gbps=inf: out of range"),
        (["--ssd-endurance-tbw", -1], 2, "--ssd-endurance-tbw=-1.0: out of range"),
        (
            ["--recall-blocks", 3, "--digest-bytes", 5, "--gpu-memory", "8GiB"],
            2,
            "--digest-bytes='5'",
        ),
        (["--shape", "8b"], 2, "shape='8b': '8b' is no size"),
        (["--model", "/no/such"], 3, "model='/no/such': not on this machine"),
    ],
)
def test_bad_input_names_field_value_and_remedy(
    run: Run, args: list[object], code: int, error: str
) -> None:
    ran = run("plan", "--gpu-memory", 0, *args)
    assert ran.code == code and ran.out == ""
    assert ran.err.startswith(f"error: {error}") and ran.err.count("\n") == 1

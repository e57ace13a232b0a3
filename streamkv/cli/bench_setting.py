"""What a run of `bench recall` was made with: settings, machine, versions, commit."""

import datetime
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from streamkv.cli.doctor_facts import examine_machine
from streamkv.cli.options import EngineOptions

if TYPE_CHECKING:
    from streamkv.recall_bench.haystack import Haystack
    from streamkv.recall_bench.run import RecallPlan

RESULTS = Path("benchmarks") / "results"
"""Where results go if the current directory is the repository."""


def recall_setting(
    options: EngineOptions, plan: "RecallPlan", haystack: "Haystack", seed: int, dtype: str
) -> dict[str, object]:
    """What decides the answers, and what they are made with, as JSON values."""
    config = options.config
    machine = examine_machine(Path.cwd())
    gpu = f", {machine.gpus[0]}" if machine.gpus else ""
    memory_gib = machine.memory_bytes / 2**30
    versions = {name: found for name, found in machine.versions.items() if found}
    return {
        "model": options.model,
        "dtype": dtype,
        "device": config.device,
        "window_size": config.window_size,
        "num_sink_tokens": config.num_sink_tokens,
        "prefill_chunk": config.prefill_chunk,
        "recall_blocks": plan.recall_blocks,
        "feed_in": plan.feed_in,
        "depths": list(plan.depths),
        "seed": seed,
        "data": haystack.name,
        "data_fingerprint": haystack.fingerprint(),
        "lengths": list(plan.lengths),
        "questions": plan.questions,
        "modes": list(plan.modes),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{machine.cpu}, {machine.num_cores} cores, {memory_gib:.0f} GiB{gpu}",
        "versions": {"python": machine.python, **versions},
        "commit": _commit(),
    }


def results_directory() -> Path:
    """`benchmarks/results` of the repository if it is the current directory, else that itself."""
    return RESULTS if RESULTS.is_dir() else Path()


def _commit() -> str:
    """`COMMIT` where it is set, else that of the repository if it is the current directory."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    if not RESULTS.is_dir():
        return "unknown"
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

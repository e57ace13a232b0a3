"""`streamkv plan`: what many sessions need of each tier, what fits, and what would make it fit.

A calculator: no weights are read and no tier is opened.
"""

from typing import Annotated

import typer

from streamkv.cli.console import Output
from streamkv.cli.doctor_plan import this_gpu
from streamkv.cli.exit_codes import ExitCode
from streamkv.cli.options import EngineOptions, JsonOption, with_sizes
from streamkv.cli.plan_model import planned_model
from streamkv.cli.plan_view import PlanView
from streamkv.config import choose_dtype, parse_size
from streamkv.errors import ConfigError
from streamkv.gpu_plan import DeviceMemory
from streamkv.session_needs import Workload
from streamkv.session_plan import (
    COPY_BYTES_PER_S,
    PINNED_BYTES_PER_S,
    SSD_BYTES_PER_S,
    Speeds,
    plan_sessions,
)
from streamkv.sizing import check_window

CONTEXT_BYTES = 1 << 30
"""Allowance for the CUDA context on a GPU that is described; of a GPU that is here, what is free
is measured."""

MOST_WINDOW = 1 << 31


@with_sizes
def plan(
    options: EngineOptions,
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Of a model that is not here: layers=32,hidden=4096,heads=32,kv_heads=8,"
            "mlp=14336,vocab=128256[,head_dim=128][,tied=1][,trained=131072].",
        ),
    ] = None,
    sessions: Annotated[int, typer.Option("--sessions", help="Awake and sleeping ones.")] = 1,
    awake: Annotated[
        int | None,
        typer.Option("--awake", help="Of them, open at once.", show_default="8, or all"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Of each history.", show_default="sink tokens and window"),
    ] = None,
    tokens_per_day: Annotated[
        int, typer.Option("--tokens-per-day", help="That each session reads and writes.")
    ] = 0,
    sleeps_per_day: Annotated[
        int, typer.Option("--sleeps-per-day", help="How often each session goes to sleep.")
    ] = 1,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            help="All of a GPU's, such as 80GiB; 0: plan for a CPU.",
            show_default="this machine's GPU",
        ),
    ] = None,
    pcie_gbps: Annotated[
        float | None,
        typer.Option(
            "--pcie-gbps",
            help="GB/s from the cpu pool to where a session runs.",
            show_default="50, measured on an H200; 5 for a CPU",
        ),
    ] = None,
    ssd_gbps: Annotated[
        float, typer.Option("--ssd-gbps", help="GB/s read from the ssd: assumed; see doctor.")
    ] = SSD_BYTES_PER_S / 1e9,
    ssd_endurance_tbw: Annotated[
        float | None,
        typer.Option("--ssd-endurance-tbw", help="Terabytes that the ssd may be written with."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what many sessions need of GPU, memory and disk, and whether it fits.

    Bytes over bandwidth, nothing is measured or loaded. Exits with 1 if something does not fit.
    """
    output = Output(as_json)
    config = options.config
    if config.window_size > MOST_WINDOW:
        raise ConfigError(
            "window_size", config.window_size, "out of range", f"Use at most {MOST_WINDOW}."
        )
    endurance = None
    if ssd_endurance_tbw is not None:
        endurance = _positive("ssd_endurance_tbw", ssd_endurance_tbw) * 1e12
    work = Workload(
        sessions,
        awake if awake is not None else max(1, min(sessions, config.max_sessions)),
        tokens if tokens is not None else config.num_sink_tokens + config.window_size,
        tokens_per_day,
        sleeps_per_day,
    )
    memory, no_gpu = _gpu(gpu_memory)
    if pcie_gbps is None:
        pcie_gbps = (PINNED_BYTES_PER_S if memory is not None else COPY_BYTES_PER_S) / 1e9
    speeds = Speeds(_positive("pcie_gbps", pcie_gbps) * 1e9, _positive("ssd_gbps", ssd_gbps) * 1e9)
    dtype = choose_dtype(config.dtype, "cuda" if memory is not None else "cpu")
    model = planned_model(named if named is not None else options.model, shape, dtype)
    check_window(config, model)
    planned = plan_sessions(model.size, model.spec, config, work, memory, speeds)
    view = PlanView(model.name, model.spec, config, work, speeds, planned, no_gpu, endurance)
    view.show(output)
    output.json(view.as_json())
    if not planned.fits:
        raise typer.Exit(ExitCode.FOUND_PROBLEM)


def _gpu(given: str | None) -> tuple[DeviceMemory | None, str]:
    """A GPU's memory; or none, and why."""
    if given is None:
        found = this_gpu()
        return (None, found) if isinstance(found, str) else (found, "")
    total_bytes = parse_size("gpu_memory", given)
    if total_bytes == 0:
        return None, "--gpu-memory is 0"
    return DeviceMemory(total_bytes, max(0, total_bytes - CONTEXT_BYTES)), ""


def _positive(field: str, value: float) -> float:
    if not 0 < value <= 1e6:
        raise ConfigError(field, value, "out of range", "Use a number above 0, at most 1000000.")
    return value

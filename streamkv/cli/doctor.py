"""`streamkv doctor`: what this machine has, what will run where, what is missing and what helps.

It measures memory and disk, because the figures of a data sheet decide nothing; sizes are stated,
and what it writes is removed.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkv.cli.console import Output
from streamkv.cli.doctor_checks import Check, Level, check_machine
from streamkv.cli.doctor_facts import Machine, cached_models, examine_machine
from streamkv.cli.doctor_plan import gpu_report
from streamkv.cli.doctor_self_check import check_tiers
from streamkv.cli.doctor_speed import DiskSpeed, disk_speed, memory_bytes_per_s, writable_parent
from streamkv.cli.exit_codes import ExitCode
from streamkv.cli.options import DtypeOption, JsonOption, ModelOption, StoreOption
from streamkv.cli.places import chosen_store
from streamkv.config import EngineConfig, format_size
from streamkv.model_files import DEFAULT_MODEL

MEMORY_BYTES = 256 << 20
DISK_BYTES = 256 << 20

_MARKS = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "FAIL"}
_STYLES = {Level.OK: None, Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    store: StoreOption = None,
    dtype: DtypeOption = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure memory and disk.")
    ] = True,
    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check",
            help="Instead, compare a stream with itself, its blocks brought back from each tier.",
        ),
    ] = False,
    recall_blocks: Annotated[
        int, typer.Option("--recall-blocks", help="Plan a GPU's memory with so many recalled.")
    ] = 0,
    digest_bytes: Annotated[
        str | None,
        typer.Option(
            "--digest-bytes",
            help="Of the GPU, for digests; 0: all in host memory.",
            show_default="131,072 tokens of each session",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where --self-check computes: auto, cpu or cuda.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say what this machine has, what will run where, and what is missing.

    Exits with 1 if something is missing without which nothing runs. With --self-check: if a token
    or its log-probability differs, or if no block came back from a tier.
    """
    output = Output(as_json)
    model = named if named is not None else model
    if self_check:
        check_tiers(model, dtype, device, output)
        return
    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    config = EngineConfig(**given, recall_blocks=recall_blocks, digest_bytes=digest_bytes)
    path = chosen_store(model, store, dtype)
    with output.busy("Looking at this machine ..."):
        machine = examine_machine(path)
        planned = gpu_report(model, config)
    checks = check_machine(machine, model, path)
    if (check := planned.check()) is not None:
        checks.append(check)
    _show_machine(machine, output)
    _show_checks(checks, output)
    planned.show(output)
    memory = _memory(output) if measure else None
    disk = _disk(path, machine, output) if measure else None
    models = cached_models()
    output.line()
    output.columns([(m.name, format_size(m.num_bytes), m.place) for m in models], _MODEL_HEADER)
    failed = any(check.level is Level.FAIL for check in checks)
    output.json(
        {
            "ok": not failed,
            "machine": dataclasses.asdict(machine),
            "checks": [_check_as_json(check) for check in checks],
            "gpu_plan": planned.as_json(),
            "memory_bytes_per_s": memory,
            "disk": dataclasses.asdict(disk) if disk is not None else None,
            "models": [dataclasses.asdict(m) for m in models],
            "store": str(path),
        }
    )
    if failed:
        raise typer.Exit(ExitCode.FOUND_PROBLEM)


_MODEL_HEADER = ("model on this machine", "size", "where")


def _show_machine(machine: Machine, output: Output) -> None:
    versions = ", ".join(f"{name} {found or 'none'}" for name, found in machine.versions.items())
    rows = [
        ("cpu", f"{machine.cpu}, {machine.num_cores} cores for this process"),
        ("isa", ", ".join(machine.isa_flags) or "unknown"),
        (
            "memory",
            f"{format_size(machine.memory_bytes)}, {format_size(machine.free_memory_bytes)} free",
        ),
        ("gpu", ", ".join(machine.gpus) or f"none: {machine.no_gpu_reason}"),
        ("compiler", machine.compiler or "none"),
        ("python", f"{machine.python} on {machine.platform}"),
        ("versions", versions),
        ("disk", f"{format_size(machine.free_disk_bytes)} free at {machine.disk_path}"),
    ]
    output.columns(rows)
    output.line()


def _show_checks(checks: list[Check], output: Output) -> None:
    for check in checks:
        remedy = f" {check.remedy}" if check.remedy else ""
        text = f"{_MARKS[check.level]:4}  {check.name}: {check.finding}.{remedy}"
        output.line(text, _STYLES[check.level])
    output.line()


def _memory(output: Output) -> float:
    size = format_size(MEMORY_BYTES)
    with output.busy(f"Reading {size} of memory ..."):
        speed = memory_bytes_per_s(MEMORY_BYTES)
    output.line(f"memory: read at {speed / 1e9:.1f} GB/s by a matrix-vector product ({size})")
    return speed


def _disk(store: Path, machine: Machine, output: Output) -> DiskSpeed | None:
    directory = writable_parent(store)
    if directory is None or machine.free_disk_bytes < 4 * DISK_BYTES:
        output.line("disk: not measured, because it cannot be written or has too little room")
        return None
    size = format_size(DISK_BYTES)
    with output.busy(f"Writing and reading {size} in {directory} ..."):
        speed = disk_speed(directory, DISK_BYTES)
    dropped = "dropped from" if speed.cold else "maybe still in"
    output.line(
        f"disk: written and synced at {speed.write_bytes_per_s / 1e9:.2f} GB/s, read at "
        f"{speed.read_bytes_per_s / 1e9:.2f} GB/s ({size} in {directory}, {dropped} the page cache)"
    )
    return speed


def _check_as_json(check: Check) -> dict[str, Any]:
    return dataclasses.asdict(check) | {"level": check.level.value}

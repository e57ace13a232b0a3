import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Run

from streamkv.cli import doctor_checks
from streamkv.cli.doctor_checks import Level, check_machine
from streamkv.cli.doctor_facts import Machine, cached_models, existing_parent
from streamkv.cli.doctor_speed import PIECE_BYTES, disk_speed, memory_bytes_per_s
from streamkv.self_check import Outcome
from streamkv.tiers.lower import LowerTiers

MACHINE = Machine(
    cpu="Some CPU",
    num_cores=2,
    isa_flags=("avx2",),
    memory_bytes=16 << 30,
    free_memory_bytes=8 << 30,
    gpus=(),
    no_gpu_reason="no driver",
    compiler="/usr/bin/g++",
    python="3.11.9",
    platform="Linux",
    versions=dict.fromkeys(("torch", "numpy", "lmdb", "zstandard", "isal", "safetensors"), "1.0")
    | {"transformers": "5.24.0", "triton": None},
    disk_path="/data",
    free_disk_bytes=100 << 30,
    disk_writable=True,
)


def levels(machine: Machine, model: str = "smollm2-135m") -> dict[str, Level]:
    return {check.name: check.level for check in check_machine(machine, model, Path("/data"))}


def test_the_report_is_json(run: Run, where: list[str]) -> None:
    ran = run("doctor", *where, "--no-measure", "--json")
    assert ran.code == 0
    assert ran.json["ok"] is True
    assert ran.json["machine"]["num_cores"] >= 1
    assert ran.json["machine"]["versions"]["transformers"].startswith("5.")
    assert {check["level"] for check in ran.json["checks"]} <= {"ok", "warn"}
    assert ran.json["memory_bytes_per_s"] is None
    assert set(ran.json["gpu_plan"]) == {"problem"} or ran.json["gpu_plan"]["fits"] in (True, False)
    assert bool(ran.json["machine"]["gpus"]) != bool(ran.json["machine"]["no_gpu_reason"])


def test_the_report_is_for_people(run: Run, where: list[str]) -> None:
    ran = run("doctor", *where, "--no-measure")
    assert ran.code == 0
    assert "ok    packages: all that are needed are installed.\n" in ran.out
    assert "gpu " in ran.out and "compiler " in ran.out


def test_a_good_machine_has_no_warning(own_cache: Path) -> None:
    (own_cache / "models" / "smollm2-135m-v1").mkdir(parents=True)
    assert set(levels(MACHINE).values()) == {Level.OK}


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"compiler": None}, "decode", Level.WARN),
        ({"free_memory_bytes": 1 << 20}, "memory", Level.WARN),
        ({"free_disk_bytes": 1 << 30}, "store", Level.WARN),
        ({"disk_writable": False}, "store", Level.FAIL),
        ({"gpus": ("H200",)}, "compute", Level.WARN),
        ({"versions": MACHINE.versions | {"lmdb": None}}, "packages", Level.FAIL),
        ({"versions": MACHINE.versions | {"transformers": "5.16.1"}}, "transformers", Level.FAIL),
        ({"versions": MACHINE.versions | {"transformers": "6.0.0"}}, "transformers", Level.FAIL),
        ({"versions": MACHINE.versions | {"transformers": None}}, "transformers", Level.FAIL),
    ],
)
def test_each_lack_is_found_with_its_remedy(
    change: dict[str, Any], name: str, level: Level
) -> None:
    checks = check_machine(dataclasses.replace(MACHINE, **change), "smollm2-135m", Path("/data"))
    [check] = [check for check in checks if check.name == name]
    assert check.level is level
    assert check.remedy or name == "compute"


def test_what_cannot_run_exits_with_1(
    run: Run, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "OLDEST_TRANSFORMERS", (99, 0))
    ran = run("doctor", *where, "--json", "--no-measure")
    assert ran.code == 1
    assert ran.json["ok"] is False


def test_memory_and_disk_are_measured_and_nothing_stays(tmp_path: Path) -> None:
    assert memory_bytes_per_s(1 << 20) > 0
    speed = disk_speed(tmp_path, PIECE_BYTES)
    assert speed.num_bytes == PIECE_BYTES
    assert speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_models_in_the_cache_are_listed(own_cache: Path) -> None:
    model = own_cache / "models" / "some-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (own_cache / "models" / ".some-model.making-1").mkdir()
    found = [m for m in cached_models() if m.place == str(own_cache / "models")]
    assert [(m.name, m.num_bytes) for m in found] == [("some-model", 2)]


def test_the_nearest_directory_above_is_looked_at(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path


def test_the_self_check_is_a_table(run: Run, tiny_model_dir: Path) -> None:
    ran = run("doctor", tiny_model_dir, "--self-check")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].split("  ")[0] == "mode"
    assert [line.split()[:2] for line in lines[1:7]] == [
        [mode, tier] for mode in ("window", "full") for tier in ("gpu", "cpu", "ssd")
    ]
    assert lines[-1].startswith("ok ")


def test_the_self_check_fails_when_a_tier_brings_nothing_back(
    run: Run, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LowerTiers, "lock_many", lambda self, keys: [None] * len(keys))
    monkeypatch.setattr(LowerTiers, "read_into", lambda self, key, out: False)
    ran = run("doctor", "--model", tiny_model_dir, "--self-check", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    problems = {(case["mode"], case["tier"]): case["problem"] for case in ran.json["cases"]}
    assert problems["window", "gpu"] == problems["full", "gpu"] == ""
    for tier in ("cpu", "ssd"):
        assert problems["window", tier].startswith("not exercised")
        # A stream is computed anew from its tokens, then.
        assert problems["full", tier].startswith("not exercised")


def test_a_self_check_that_differs_is_valid_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Outcome("window", "ssd", 3, 100, 2, math.inf)
    monkeypatch.setattr("streamkv.self_check.self_check", lambda *_, **__: iter([other]))
    ran = run("doctor", "--self-check", "--json")
    assert ran.code == 1
    [case] = ran.json["cases"]
    assert case["largest_difference"] is None and case["num_different"] == 2
    ran = run("doctor", "--self-check")
    assert ran.code == 1
    assert "FAIL  window, ssd: 2 of 100 tokens differ." in ran.out

"""What doctor says of a GPU's memory: on a machine without one, and for GPUs that are described."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_runner import Run

from streamkv.cli.console import Output
from streamkv.cli.doctor_checks import Level
from streamkv.cli.doctor_model import local_directory, read_size
from streamkv.cli.doctor_plan import PlanReport, gpu_report, plan_report
from streamkv.config import EngineConfig
from streamkv.device import gpu_problem
from streamkv.errors import ConfigError
from streamkv.gpu_plan import DeviceMemory, ModelSize
from streamkv.model import ModelAdapter
from streamkv.model_cache import file_stamp

GIB = 1 << 30
LARGE = DeviceMemory(80 * GIB, 79 * GIB)
SMALL = DeviceMemory(GIB, GIB // 4)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def report(memory: DeviceMemory, model: Path, **options: int) -> PlanReport:
    return plan_report(memory, str(model), "float32", EngineConfig(**options))  # type: ignore[arg-type]  # whole numbers are what is varied


def save_weights(path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@no_gpu
def test_without_a_gpu_the_reason_is_said(run: Run, where: list[str]) -> None:
    ran = run("doctor", *where, "--no-measure")
    assert ran.code == 0
    assert f"gpu memory: no plan, because {gpu_problem()}\n" in ran.out
    ran = run("doctor", *where, "--no-measure", "--json")
    assert ran.json["gpu_plan"] == {"problem": gpu_problem()}
    assert "gpu memory" not in {check["name"] for check in ran.json["checks"]}


def test_a_type_that_no_kv_has_is_refused(run: Run, where: list[str]) -> None:
    ran = run("doctor", *where, "--no-measure", "--dtype", "int3")
    assert ran.err.startswith("error: --dtype='int3': not a choice.")


def test_the_sizes_on_disk_are_those_of_the_loaded_model(tiny_model_dir: Path) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    weights = adapter.model.parameters()
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    size, spec = read_size(tiny_model_dir, "float32")
    assert spec == adapter.spec
    assert size == ModelSize(weight_bytes, 96, 6 * 16 + 2 * 2 * 16, adapter.vocab_size, 96)
    assert read_size(tiny_model_dir, "bfloat16")[0].weight_bytes == weight_bytes // 2


def test_weights_in_several_files_are_added_up(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 5,
        "intermediate_size": 20,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    names = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_weights(tmp_path / "one.safetensors", {"a": {"shape": [5, 8]}, "__metadata__": {"x": "y"}})
    save_weights(tmp_path / "two.safetensors", {"b": {"shape": [7]}, "c": {"shape": []}})
    save_weights(tmp_path / "consolidated.safetensors", {"all": {"shape": [1000]}})
    size, spec = read_size(tmp_path, "float16")
    assert size == ModelSize(2 * (40 + 7 + 1), 8, (2 + 2 * 2) * 4, 5, 8)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype) == (3, 2, 4, "float16")


def test_a_large_gpu_fits_and_its_parts_are_shown(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(LARGE, tiny_model_dir)
    assert found.plan is not None and found.plan.fits and found.refusal is None
    check = found.check()
    assert check is not None and check.level is Level.OK
    found.show(Output())
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["gpu", "memory", "with", "device=cuda", "size"]
    assert "free                         79.0 GiB\n" in shown
    assert "graphs and workspaces        512.0 MiB\n" in shown
    assert f"max_sessions that fit        {found.plan.max_sessions}\n" in shown
    as_json = json.loads(json.dumps(found.as_json()))
    assert as_json["fits"] is True and as_json["refusal"] is None
    assert as_json["spare_bytes"] == found.plan.spare_bytes


def test_recall_has_its_lines_and_digests_the_size_that_was_asked_for(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(LARGE, tiny_model_dir).show(Output())
    assert "recall" not in capsys.readouterr().out
    report(LARGE, tiny_model_dir, recall_blocks=16, digest_bytes=GIB).show(Output())
    shown = capsys.readouterr().out
    assert "queries and scores for recall" in shown
    assert "digests for recall             1.0 GiB\n" in shown
    found = report(SMALL, tiny_model_dir, recall_blocks=16, digest_bytes=GIB)
    assert found.refusal is not None


@no_gpu
def test_doctor_takes_what_the_plan_is_for(run: Run, where: list[str]) -> None:
    recall = ["--recall-blocks", "16", "--digest-bytes"]
    assert run("doctor", *where, "--no-measure", *recall, "1GiB").code == 0
    ran = run("doctor", *where, "--no-measure", *recall, "much")
    assert ran.err.startswith("error: --digest-bytes='much': not a size.")


def test_a_small_gpu_is_a_warning_with_the_engines_own_words(tiny_model_dir: Path) -> None:
    found = report(SMALL, tiny_model_dir)
    assert isinstance(found.refusal, ConfigError)
    check = found.check()
    assert check is not None and check.level is Level.WARN
    assert f"{check.finding}. {check.remedy}" == str(found.refusal)
    assert found.as_json()["refusal"] == str(found.refusal)
    assert found.as_json()["fits"] is False


def test_a_model_that_is_not_here_has_no_plan_and_nothing_is_fetched(
    tmp_path: Path, own_cache: Path
) -> None:
    for model in ("no-such-owner/no-such-model", str(tmp_path / "no.gguf"), "no id at all/"):
        found = plan_report(LARGE, model, "float32", EngineConfig())
        assert found.problem == f"{model} is not on this machine yet"
        assert found.check() is None and found.plan is None
    assert not own_cache.exists()


def test_a_converted_file_is_found_by_its_stamp(tmp_path: Path, own_cache: Path) -> None:
    source = tmp_path / "some.gguf"
    source.write_bytes(b"GGUF")
    converted = own_cache / "models" / f"some-{file_stamp([source])}-v1"
    assert local_directory(str(source)) is None
    converted.mkdir(parents=True)
    converted.with_name(converted.name + ".lock").touch()
    assert local_directory(str(source)) == converted
    (own_cache / "models" / "smollm2-135m-v1").mkdir()
    assert local_directory("smollm2-135m") == own_cache / "models" / "smollm2-135m-v1"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda place: (place / "model.safetensors").unlink(), "cannot be read"),
        (lambda place: (place / "model.safetensors").write_bytes(b"short"), "is cut short"),
        (lambda place: (place / "model.safetensors").write_bytes(b"\xff" * 64), "no safetensors"),
        (lambda place: (place / "config.json").write_text("{"), "cannot be read"),
        (lambda place: (place / "config.json").write_text("{}"), "states no 'num_attention_heads'"),
    ],
)
def test_files_that_cannot_be_read_are_the_reason(
    tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_weights(tmp_path / "model.safetensors", {"a": {"shape": [2]}})
    assert report(LARGE, tmp_path).plan is not None
    damage(tmp_path)
    assert problem in report(LARGE, tmp_path).problem


def test_an_engine_that_cannot_be_imported_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "streamkv.device", None)
    assert "cannot be imported" in gpu_report("smollm2-135m", EngineConfig()).problem


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_of_this_machine_has_a_plan(tiny_model_dir: Path) -> None:
    found = gpu_report(str(tiny_model_dir), EngineConfig())
    assert found.plan is not None
    assert 0 < found.plan.free_bytes <= found.plan.total_bytes

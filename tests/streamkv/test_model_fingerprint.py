import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamkv.errors import ModelError
from streamkv.model_fingerprint import compute_fingerprint, model_fingerprint, read_settings


@pytest.fixture
def directory(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model in a directory of this test's own."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def set_in_config(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_same_weights_elsewhere_are_the_same(
    directory: Path, tiny_model_dir: Path, own_cache: Path
) -> None:
    here = model_fingerprint(load(directory), directory)
    assert here == model_fingerprint(load(tiny_model_dir), tiny_model_dir)
    assert len(here) == 16


def test_one_changed_weight_is_another_model(directory: Path, own_cache: Path) -> None:
    model = load(directory)
    before = model_fingerprint(model, directory)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    model.save_pretrained(directory)
    assert model_fingerprint(load(directory), directory) != before


@pytest.mark.parametrize("setting", [{"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}])
def test_setting_that_changes_the_computation_is_another_model(
    setting: dict[str, Any], directory: Path, own_cache: Path
) -> None:
    model = load(directory)
    before = model_fingerprint(model, directory)
    set_in_config(directory, **setting)
    assert model_fingerprint(model, directory) != before


def test_setting_that_changes_nothing_is_the_same_model(directory: Path, own_cache: Path) -> None:
    model = load(directory)
    before = model_fingerprint(model, directory)
    set_in_config(directory, transformers_version="9.9.9", eos_token_id=[2, 3], use_cache=False)
    assert model_fingerprint(model, directory) == before


def test_another_type_of_the_same_weights_is_another_model(
    directory: Path, own_cache: Path
) -> None:
    whole = model_fingerprint(load(directory), directory)
    half = model_fingerprint(load(directory, torch.bfloat16), directory)
    assert whole != half
    assert whole == model_fingerprint(load(directory), directory)


def test_files_that_did_not_change_are_not_read_again(directory: Path, own_cache: Path) -> None:
    model = load(directory)
    before = model_fingerprint(model, directory)
    (note,) = (own_cache / "notes").iterdir()
    note.write_text(json.dumps("0f" * 16))
    assert model_fingerprint(model, directory) == b"\x0f" * 16
    note.write_text("damaged")
    assert model_fingerprint(model, directory) == before


def test_names_and_shapes_count_not_bytes_alone() -> None:
    first, second, third = nn.Module(), nn.Module(), nn.Module()
    first.a = nn.Parameter(torch.zeros(2, 3))
    second.b = nn.Parameter(torch.zeros(2, 3))
    third.a = nn.Parameter(torch.zeros(3, 2))
    assert len({compute_fingerprint(module, {}) for module in (first, second, third)}) == 3


def test_config_that_is_no_object_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json: not a JSON object"):
        read_settings(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        read_settings(tmp_path)

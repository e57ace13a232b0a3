from pathlib import Path

import pytest

from streamkv.cli.places import chosen_store, data_root, default_store, model_slug


def test_data_goes_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_root() == Path("/data/streamkv")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert data_root() == Path("/home/me/.local/share/streamkv")


def test_hub_ids_become_one_directory_name() -> None:
    assert model_slug("smollm2-135m") == "smollm2-135m"
    assert model_slug("Qwen/Qwen3-0.6B") == "Qwen--Qwen3-0.6B"
    assert model_slug("../..") != ".."


def test_directories_of_the_same_name_have_different_stores(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
    one, other = model_slug(str(tmp_path / "a/model")), model_slug(str(tmp_path / "b/model"))
    assert one.startswith("model-") and other.startswith("model-") and one != other
    assert model_slug(str(tmp_path / "a/../a/model")) == one


def test_another_element_type_has_another_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_store("m", "auto") == default_store("m", "float32") == Path("/data/streamkv/m")
    assert default_store("m", "bfloat16") == Path("/data/streamkv/m-bfloat16")
    assert chosen_store("m", "/mine", "bfloat16") == Path("/mine")

"""What is planned for: models on this machine, and shapes whose weights are known by number."""

import json
from pathlib import Path

import pytest

from streamkv.cli.doctor_model import read_size
from streamkv.cli.plan_model import SHAPES, Shape, parse_shape, planned_model
from streamkv.errors import InputError, ModelError

LLAMA = "layers=32,hidden=4096,heads=32,kv_heads=8,mlp=14336,vocab=128256"


def test_the_weights_of_known_models_are_as_many_as_they_have() -> None:
    assert SHAPES["llama-3.1-8b"].num_weights == 8_030_261_248
    assert SHAPES["smollm2-135m"].num_weights == 134_515_008


def test_a_shape_in_numbers_is_the_model_of_that_name() -> None:
    by_name = planned_model("llama-3.1-8b", None, "bfloat16")
    by_numbers = planned_model("llama-3.1-8b", LLAMA, "bfloat16")
    assert by_name == by_numbers
    assert by_name.spec.token_bytes == 131_072 and by_name.size.weight_bytes == 2 * 8_030_261_248
    assert (by_name.size.hidden_size, by_name.size.layer_width) == (4096, 14_336)
    assert (by_name.size.vocab_size, by_name.size.query_width) == (128_256, 4096)
    assert by_name.trained_length == 131_072


def test_the_demo_model_is_as_large_here_as_by_its_shape(model_dir: Path) -> None:
    assert SHAPES["smollm2-135m"].planned("", "float32").size == read_size(model_dir, "float32")[0]
    assert SHAPES["smollm2-135m"].planned("", "float32").spec == read_size(model_dir, "float32")[1]
    trained = json.loads((model_dir / "config.json").read_text())["max_position_embeddings"]
    assert planned_model(str(model_dir), None, "float32").trained_length == trained
    assert SHAPES["smollm2-135m"].trained == trained


@pytest.mark.usefixtures("own_cache")
def test_a_known_name_needs_nothing_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("streamkv.cli.doctor_model._hub_directory", lambda hub_id: None)
    assert planned_model("smollm2-135m", None, "float32").spec.num_layers == 30
    with pytest.raises(ModelError, match=r"model='other': not on this machine.*--shape"):
        planned_model("other", None, "float32")


def test_what_may_follow_a_shape_counts() -> None:
    shape = parse_shape(
        "layers=1, hidden=8, heads=2, kv_heads=1, mlp=5, vocab=7, head_dim=3, tied=1"
    )
    assert shape == Shape(1, 8, 2, 1, 5, 7, head_dim=3, tied=1)
    # q and o of 8 x 6, k and v of 8 x 3, three of 8 x 5, three norms of 8, 7 x 8 once
    assert shape.num_weights == 2 * 48 + 2 * 24 + 3 * 40 + 3 * 8 + 56
    assert shape.planned("x", "float32").spec.head_dim == 3


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ("", "'' is no size"),
        ("8b", "'8b' is no size"),
        (LLAMA + ",layers=3", "'layers=3' is no size"),
        (LLAMA + ",width=3", "'width=3' is no size"),
        (LLAMA.replace("4096", "-4096"), "'hidden=-4096' is no size"),
        (LLAMA.replace("4096", "4e3"), "'hidden=4e3' is no size"),
        (LLAMA.replace("4096", "10000001"), "'hidden=10000001' is no size"),
        (LLAMA.replace("4096", "0"), "without hidden"),
        ("layers=3,hidden=8", "without heads, kv_heads, mlp, vocab"),
        (LLAMA.replace("kv_heads=8", "kv_heads=7"), "no multiple of kv_heads"),
        (LLAMA.replace("4096", "4097"), "hidden none of heads"),
        (LLAMA + ",tied=2", "tied is 0 or 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        planned_model("any", shape, "float32")
    assert caught.value.field == "shape" and "layers=32" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "states no 'num_attention_heads'"),
        ('{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}', "cannot be read"),
    ],
)
def test_a_directory_without_a_model_says_what_is_wrong(
    tmp_path: Path, config: str, problem: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=f"{problem}.*--shape"):
        planned_model(str(tmp_path), None, "float32")

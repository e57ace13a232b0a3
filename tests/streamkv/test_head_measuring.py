"""Which heads look facts up: the measure against loops, and what is remembered of it."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamkv import head_measuring
from streamkv.fact_texts import NUM_FIRST, FactText, fact_texts
from streamkv.head_measuring import NUM_QUERIES, find_retrieval_heads, head_weights, measure_heads
from streamkv.model import ModelAdapter
from streamkv.retrieval_heads import Head, RetrievalHeads
from streamkv.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def adapter(tiny_model_dir: Path) -> ModelAdapter:
    return ModelAdapter.load(str(tiny_model_dir))


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_model_dir)


def some_texts() -> list[FactText]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length, begin, end in ((90, 20, 26), (70, 10, 15)):
        ids = torch.randint(5, 290, (length,), generator=generator).tolist()
        found.append(FactText(ids, begin, end, length - NUM_QUERIES - 3))
    return found


def turned(x: Tensor, angle_of: Callable[[int], float]) -> Tensor:
    half = len(x) // 2
    found = x.double().clone()
    for pair in range(half):
        cos, sin = math.cos(angle_of(pair)), math.sin(angle_of(pair))
        a, b = float(x[pair]), float(x[pair + half])
        found[pair], found[pair + half] = a * cos - b * sin, b * cos + a * sin
    return found


def test_a_head_weighs_what_its_last_queries_give_their_fact(adapter: ModelAdapter) -> None:
    texts, distance = some_texts(), 300
    seen = [head_measuring._read(adapter, text) for text in texts]
    freq = adapter.inv_freq.tolist()
    group = adapter.num_q_heads // adapter.spec.num_kv_heads
    expected = torch.zeros(adapter.spec.num_layers, adapter.num_q_heads)
    for layer in range(adapter.spec.num_layers):
        for head in range(adapter.num_q_heads):
            for own in range(len(texts)):
                for query in seen[own].queries[layer][:, head]:
                    q = turned(query, lambda pair: distance * freq[pair])
                    total = on_fact = 0.0
                    place = 0
                    for index, each in enumerate(texts):
                        for token in range(NUM_FIRST, each.asked):
                            offset, is_fact = place % 64, each.begin <= token < each.end
                            place += 1
                            if is_fact and index != own:
                                continue
                            key = seen[index].keys[layer][token, head // group]
                            k = turned(key, lambda pair, offset=offset: offset * freq[pair])
                            weight = math.exp(float(q @ k) * adapter.scales[layer])
                            total += weight
                            on_fact += weight * is_fact
                    expected[layer, head] += on_fact / total / NUM_QUERIES / len(texts)
    found = head_weights(adapter, texts, distance)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_texts_are_read_as_the_model_reads_them(adapter: ModelAdapter) -> None:
    """Attention there is exact, so that later layers see what they always see."""
    [text, _] = some_texts()
    ids = torch.tensor([text.token_ids])
    own = adapter.model.config._attn_implementation
    adapter.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            states = adapter.model(ids, output_hidden_states=True).hidden_states
    finally:
        adapter.model.set_attn_implementation(own)
    layer = adapter.base.layers[-1]
    normed = layer.input_layernorm(states[-2])
    shape = (len(text.token_ids), adapter.spec.num_kv_heads, adapter.head_dim)
    expected = layer.self_attn.k_proj(normed)[0].view(shape)
    found = head_measuring._read(adapter, text).keys[-1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_fact_stands_in_its_text_and_is_asked_for(tokenizer: Tokenizer) -> None:
    texts = list(fact_texts(tokenizer))
    assert texts == list(fact_texts(tokenizer))
    for text in texts:
        assert NUM_FIRST <= text.begin < text.end <= text.asked < len(text.token_ids)
        decoder = tokenizer.decoder()
        told = "".join(decoder.push(token) for token in text.token_ids[text.begin : text.end])
        decoder = tokenizer.decoder()
        asked = "".join(decoder.push(token) for token in text.token_ids[text.asked :])
        start = asked.split("Answer: ")[1]
        assert told.strip().startswith(start) and len(told.strip()) > len(start)


def test_heads_are_measured_once_per_model(
    adapter: ModelAdapter,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STREAMKV_CACHE", str(tmp_path))
    told: list[str] = []
    first = find_retrieval_heads(adapter, tokenizer, told.append)
    assert find_retrieval_heads(adapter, tokenizer, told.append) == first
    assert len(told) == 1
    assert list(first.heads) == measure_heads(adapter, tokenizer)
    [note] = list((tmp_path / "notes").glob("heads-*"))
    for damaged in ("", "[]", "[[99, 0]]", '{"a": 1}', "[[1, 0], [0, 0]]"):
        note.write_text(damaged)
        assert find_retrieval_heads(adapter, tokenizer, told.append) == first
    assert len(told) == 6


def test_heads_share_the_keys_that_they_read() -> None:
    heads = RetrievalHeads((Head(2, 1), Head(7, 0), Head(7, 2), Head(7, 3)), group=2)
    assert heads.layers == (2, 7)
    assert heads.kv_heads == ((2, 0), (7, 0), (7, 1))
    assert heads.rows == (0, 1, 2, 2)
    assert heads.of_layer(7) == ([1, 2, 3], [0, 2, 3]) and heads.of_layer(3) == ([], [])

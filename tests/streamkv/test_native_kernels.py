"""The native decode step against the model's own code over the reference attention."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.block_table import BlockTable
from streamkv.kernels import native, reference
from streamkv.kernels.native import DecodeRow, NativeDecoder
from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP
from streamkv.model import ModelAdapter
from streamkv.model_native import native_weights
from streamkv.native_kernels import check
from streamkv.runner import build_table
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import KVSpec
from streamkv.window import Window

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler"),
]

SHAPES = [
    pytest.param(
        "llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}, id="llama"
    ),
    pytest.param(
        "llama",
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
        id="group-3-of-64",
    ),
    pytest.param(
        "llama",
        {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
        id="no-group-128",
    ),
    pytest.param("llama", {"attention_bias": True, "head_dim": 16}, id="biases"),
    pytest.param("mistral", {"sliding_window": None, "head_dim": 80}, id="mistral-80"),
    pytest.param("qwen2", {"hidden_size": 64}, id="qwen2"),
    pytest.param("qwen3", {"hidden_size": 64, "head_dim": 32}, id="qwen3"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model_type", "settings"), SHAPES)
def test_logits_and_kv_are_those_of_the_model(
    random_model_dir: Callable[..., Path],
    library: Path,
    model_type: str,
    settings: dict[str, object],
    dtype: str,
) -> None:
    sizes = {"intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2}
    directory = random_model_dir(model_type, **(sizes | {"hidden_size": 64} | settings))
    # With weights that bfloat16 holds exactly, the model's float32 arithmetic is both's oracle.
    adapter = ModelAdapter.load(str(directory))
    if dtype == "bfloat16":
        narrow_weights(adapter)
    spec = dataclasses.replace(adapter.spec, dtype=dtype)
    rope = RopeTables(adapter.inv_freq, 512)
    ours, theirs = new_pool(spec), new_pool(spec)
    weights = native_weights(adapter).decoder
    assert weights.embed.dtype == getattr(torch, dtype)
    decoder = NativeDecoder(library, weights, ours, rope, 1, in_pairs=False)
    worst = 0.0
    for row in one_stream(adapter.vocab_size):
        [found] = decoder.decode([row])
        expected = logits_of_model(adapter, row, theirs, rope)
        assert found is not None
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    # A random model amplifies what another order of summation changes in the last bits.
    assert worst < (1e-4 if dtype == "float32" else 5e-3)
    difference = (ours[:3].float() - theirs[:3].float()).norm() / theirs[:3].float().norm()
    assert difference < (1e-5 if dtype == "float32" else 5e-3)


def narrow_weights(adapter: ModelAdapter) -> None:
    for parameter in adapter.model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def new_pool(spec: KVSpec) -> torch.Tensor:
    pool = GpuPool(spec, 4).data
    pool[4] = float("nan")  # the guard block
    return pool


def one_stream(vocab_size: int, num_tokens: int = 150) -> Iterator[DecodeRow]:
    """The tokens of a stream whose first ones leave the window."""
    window, table = Window(70, ((0, 3),)), BlockTable(64)
    for index in range(num_tokens):
        if index % 64 == 0:
            table.add(index // 64, (2, 0, 1)[index // 64])
        entries = build_table(table.entries(window, index, index + 1))
        token_id = 3 + index * 31 % (vocab_size - 3)
        yield DecodeRow(token_id, index, table.slot(index), entries, 70)


def logits_of_model(
    adapter: ModelAdapter, row: DecodeRow, pool: torch.Tensor, rope: RopeTables
) -> torch.Tensor:
    """The model's own, with attention and KV by the reference."""

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        reference.write_kv(pool, k, v, torch.tensor([row.slot]), layer, rope)
        given = (row.table, row.query_index, row.window_size, rope, scale)
        return reference.attend(q, pool, layer, *given)

    return adapter.logits(adapter.hidden(torch.tensor([[row.token_id]]), attend))[0]


@pytest.mark.parametrize(("model_type", "settings"), SHAPES)
def test_in_pairs_it_is_nearer_to_float32_than_the_models_own_bfloat16(
    random_model_dir: Callable[..., Path],
    library: Path,
    model_type: str,
    settings: dict[str, object],
) -> None:
    sizes = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    directory = str(random_model_dir(model_type, **(sizes | {"hidden_size": 64} | settings)))
    exact, narrow = ModelAdapter.load(directory), ModelAdapter.load(directory, dtype="bfloat16")
    narrow_weights(exact)
    spec = dataclasses.replace(exact.spec, dtype="bfloat16")
    rope = RopeTables(exact.inv_freq, 512)
    pools = [new_pool(spec) for _ in range(3)]
    decoder = NativeDecoder(library, native_weights(exact).decoder, pools[0], rope, 1)
    ours = theirs = 0.0
    for row in one_stream(exact.vocab_size):
        [found] = decoder.decode([row])
        expected = logits_of_model(exact, row, pools[1], rope)
        narrowed = logits_of_model(narrow, row, pools[2], rope).float()
        assert found is not None
        ours += float((found - expected).norm())
        theirs += float((narrowed - expected).norm())
    assert ours < theirs


@pytest.mark.parametrize("width", [32, 64, 96, 112, 576])
@pytest.mark.parametrize("num_rows", [*range(1, 10), 16, 19])
def test_a_product_in_pairs_is_that_of_rounded_inputs(
    library: Path, width: int, num_rows: int
) -> None:
    """A decoder whose layer adds nothing, so that logits are a product with what the norm makes.

    Embeddings of plus and minus one, whose norm is exact, show the norm's weights to the head.
    """
    generator, vocab_size = torch.Generator().manual_seed(width), 40
    signs = torch.randint(0, 2, (vocab_size, width), generator=generator) * 2.0 - 1
    norm = torch.rand(width, generator=generator) + 0.5
    head = torch.randn(vocab_size, width, generator=generator).bfloat16()
    some, nothing = torch.ones(width), torch.zeros(width, width).bfloat16()
    heads = torch.zeros(16, width).bfloat16()
    layer = native.LayerWeights(
        some, heads, heads, heads, nothing[:, :16].contiguous(), some, nothing, nothing, nothing
    )
    weights = native.DecoderWeights(
        (layer,), signs.bfloat16(), head, norm, 1, 1, 16, eps=0.0, scale=1.0
    )
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16", block_size=64)
    rope = RopeTables(torch.ones(8, dtype=torch.float64), 128)
    decoder = NativeDecoder(library, weights, GpuPool(spec, 1).data, rope, 2)
    window, table = Window(70), BlockTable(64)
    table.add(0, 0)
    rows = [
        DecodeRow(index, index, index, build_table(table.entries(window, index, index + 1)), 70)
        for index in range(num_rows)
    ]
    in_pairs = decoder.pair_width > 0 and width % decoder.pair_width == 0
    for row, found in zip(rows, decoder.decode(rows), strict=True):
        inputs = signs[row.token_id] * norm
        rounded = inputs.bfloat16() if in_pairs else inputs
        expected = head.double() @ rounded.double()
        assert found is not None
        assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_the_number_of_threads_changes_no_bit(tiny_model_dir: Path, library: Path) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    rope, weights = RopeTables(adapter.inv_freq, 128), native_weights(adapter).decoder
    found = []
    for num_threads in (1, 2, 3):
        decoder = NativeDecoder(library, weights, GpuPool(adapter.spec, 2).data, rope, num_threads)
        for index in range(100):
            rows = [(0, 0, 2**62, 0, min(64, index + 1)), (1, 64, 2**62, 0, max(0, index - 63))]
            block_ids, *rest = torch.tensor(rows).t().contiguous().unbind(0)
            table = native.SequenceTable(block_ids, *rest, num_sink_entries=0)
            [logits] = decoder.decode([DecodeRow(5 + index, index, index, table, 128)])
        assert logits is not None
        found.append(logits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model_type", "settings"), [SHAPES[1], SHAPES[3], SHAPES[6]])
def test_a_row_has_the_bits_that_it_has_by_itself(
    random_model_dir: Callable[..., Path],
    library: Path,
    model_type: str,
    settings: dict[str, object],
    dtype: str,
) -> None:
    """In steps of every size: logits, queries and all that is written."""
    adapter = ModelAdapter.load(str(random_model_dir(model_type, **settings)))
    if dtype == "bfloat16":
        for parameter in adapter.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    weights = native_weights(adapter).decoder
    assert weights.embed.dtype == getattr(torch, dtype)
    spec, rope = dataclasses.replace(adapter.spec, dtype=dtype), RopeTables(adapter.inv_freq, 2048)
    shape, generator = GpuPool(spec, 180).data.shape, torch.Generator().manual_seed(3)
    filled = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    pools = [filled.clone(), filled.clone()]
    single, several = (NativeDecoder(library, weights, pool, rope, 2) for pool in pools)
    rng, heads = random.Random(4), (spec.num_layers, adapter.num_q_heads, adapter.head_dim)
    free = list(range(180))
    rng.shuffle(free)
    for num_rows in (*range(1, 10), 16, 19):
        given = [some_row(rng, index, free, heads) for index in range(num_rows)]
        alone = [copy_of(row) for row in given]
        expected = [single.decode([row])[0] for row in alone]
        for row, found, wanted in zip(given, several.decode(given), expected, strict=True):
            assert (found is None) == (wanted is None) == (not row.want_logits)
            assert found is None or (torch.equal(found, wanted) and bool(found.isfinite().all()))
        for row, other in zip(given, alone, strict=True):
            assert row.queries is None or torch.equal(row.queries, other.queries)
        assert torch.equal(*pools)
    assert not torch.equal(pools[0], filled)


def some_row(rng: random.Random, place: int, free: list[int], heads: tuple[int, ...]) -> DecodeRow:
    """A row somewhere in a stream of its own; the first may be all that there is of it."""
    index, window_size = rng.choice([0, 3, 63, 64, 200, 500]), rng.choice([70, 300])
    blocks = free[9 * place :]
    sinks = [(blocks[0], 0, window_size + 2, 0, 3)] if index > 300 else []
    recalled = [(blocks[1], 64, 128, 2, 64)] if index == 500 else []
    oldest = max(0, index + 1 - window_size) // 64
    recent = [
        (blocks[number % 9], 64 * number, NO_CAP, 0, min(64, index + 1 - 64 * number))
        for number in range(oldest, index // 64 + 1)
    ]
    columns = torch.tensor([*sinks, *recalled, *recent]).t().contiguous().unbind(0)
    table = native.SequenceTable(*columns, len(sinks), len(recalled))
    slot = 64 * recent[-1][0] + index % 64
    queries = torch.zeros(heads) if rng.random() < 0.5 else None
    wanted = rng.random() < 0.7
    return DecodeRow(rng.randrange(100), index, slot, table, window_size, wanted, queries)


def copy_of(row: DecodeRow) -> DecodeRow:
    queries = None if row.queries is None else torch.zeros_like(row.queries)
    return dataclasses.replace(row, queries=queries)


def test_weights_that_are_exact_in_bfloat16_are_read_narrow(tiny_model_dir: Path) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    assert native_weights(adapter).decoder.embed.dtype == torch.float32
    for parameter in adapter.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert native_weights(adapter).decoder.embed.dtype == torch.bfloat16


def test_the_model_shares_the_packed_memory(tiny_model_dir: Path) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    before = {name: p.clone() for name, p in adapter.model.named_parameters()}
    weights = native_weights(adapter)
    weights.give_to_model()
    pointers = {copy.data_ptr() for copy in weights.packed.values()}
    shared = [p for p in adapter.model.parameters() if p.data_ptr() in pointers]
    assert len(shared) == len(weights.packed)
    for name, parameter in adapter.model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("llama", {"mlp_bias": True}, "biases"),
        ("granite", {}, "model type"),
        ("llama", {"hidden_size": 40, "num_attention_heads": 4, "head_dim": 16}, "multiple of 16"),
        ("llama", {"head_dim": 8}, "head_dim"),
    ],
)
def test_what_it_does_not_know_is_left_to_the_model(
    random_model_dir: Callable[..., Path],
    library: Path,
    model_type: str,
    settings: dict[str, object],
    reason: str,
) -> None:
    adapter = ModelAdapter.load(str(random_model_dir(model_type, **settings)))
    with pytest.raises(NativeUnavailableError, match=reason):
        NativeDecoder(
            library,
            native_weights(adapter).decoder,
            GpuPool(adapter.spec, 2).data,
            RopeTables(adapter.inv_freq, 128),
            1,
        )


def test_a_step_that_differs_from_the_model_is_not_used(
    tiny_model_dir: Path, library: Path
) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    rope = RopeTables(adapter.inv_freq, 128)
    weights = native_weights(adapter).decoder

    def bind(pool: torch.Tensor) -> NativeDecoder:
        return NativeDecoder(library, weights, pool, rope, 2)

    check(adapter, bind, rope)
    wrong = dataclasses.replace(weights.layers[1], up=1.1 * weights.layers[1].up)
    weights = dataclasses.replace(weights, layers=(weights.layers[0], wrong))
    with pytest.raises(NativeUnavailableError, match="differs"):
        check(adapter, bind, rope)


def test_without_a_compiler_the_engine_runs_on(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    with Engine(str(tiny_model_dir), EngineConfig(window_size=64, cpu_bytes=0)) as engine:
        assert engine.wait_until_fast() is False
        session = engine.session("slow")
        session.feed("the dog sleeps").run()
        assert len(session.generate(SamplingParams(max_tokens=3, ignore_eos=True)).run()) == 3


def test_the_engine_says_the_same_with_and_without_it(tiny_model_dir: Path) -> None:
    found = []
    for compile_mode in ("auto", "off"):
        config = EngineConfig(window_size=64, cpu_bytes=0, compile=compile_mode)  # type: ignore[arg-type]  # a Literal
        with Engine(str(tiny_model_dir), config) as engine:
            assert engine.wait_until_fast() is (compile_mode == "auto")
            session = engine.session("same")
            scores = session.score([[5 + 7 * i % 300] for i in range(200)]).run()
            params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            tokens = [delta.token_id for delta in session.generate(params)]
            found.append(([score.logprob for score in scores[1:]], tokens))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4)
    assert found[0][1] == found[1][1]

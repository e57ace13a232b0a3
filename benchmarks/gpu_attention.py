"""Decode attention on a GPU at eight shapes, against paged and contiguous peers in the same run.

    python benchmarks/gpu_attention.py [--quick]

The heads are those of Llama-3.1-8B (32 query heads, 8 KV heads, head_dim 128, bf16). Each shape is
checked first, then timed in CUDA graphs whose calls go round over more than 1 GB of KV, so that no
call finds its KV in the cache. Peers, each at its best page size: FlashInfer, FlashAttention 3
(from a `vllm` package, if there is one), SDPA over contiguous KV. Then blocks in pinned memory.
"""

import math
import sys
from collections.abc import Callable

import torch
from common import arguments, finish, require, say
from gpu_timing import graph_ms
from report import Report
from torch import Tensor

from streamkv.kernels import batch_reference, gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

Q_HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
SCALE = DIM**-0.5
SHAPES = (
    (1, 1024),
    (1, 4096),
    (1, 8192),
    (1, 32768),
    (1, 131072),
    (16, 4096),
    (64, 4096),
    (64, 8192),
)
KV_BYTES = 1.2e9
BOUNDS = (1.05, 1.02)
"""Times of the better paged peer, where that takes under and over 0.1 ms."""
PINNED_GBS = 50.0
PINNED_MS = 0.29


def rope(length: int) -> RopeTables:
    """Tables on the GPU for every distance up to `length`."""
    inv_freq = 500000.0 ** -(torch.arange(DIM // 2, dtype=torch.float64, device="cuda") * 2 / DIM)
    return RopeTables(inv_freq, length + 1)


def full_tables(batch: int, context: int, block_ids: Tensor) -> list[SequenceTable]:
    """Every token of `context` in the window, in the blocks given [batch, blocks]."""
    starts = torch.arange(0, context, BLOCK)
    cap = torch.full_like(starts, NO_CAP)
    first, end = torch.zeros_like(starts), torch.full_like(starts, BLOCK)
    return [SequenceTable(ids, starts, cap, first, end, 0) for ids in block_ids]


def own_calls(
    pools: list[Tensor], q: Tensor, batch: int, context: int
) -> list[Callable[[], object]]:
    """One call for each layer of the pool, which are copies of the shape's KV."""
    blocks = context // BLOCK
    ids = torch.randperm(batch * blocks).view(batch, blocks)
    tables = full_tables(batch, context, ids)
    table = batch_table(tables, [context] * batch, pools, blocks, "cuda")
    starts = torch.full((batch,), context - 1, device="cuda")
    tables_of = rope(context)
    shape = gpu.Shape.of(pools[0], Q_HEADS, tables_of)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = gpu.decode_splits(shape, batch, blocks, processors)
    scratch = gpu.decode_scratch(shape, batch, 1, splits, "cuda")
    out, softmax = torch.empty_like(q), gpu.Softmax(SCALE)
    check(q, pools, table, starts, tables_of, scratch)
    # A step makes it once for all its layers; here it is left out of the graph.
    seen = gpu.plan_decode(table, starts, 1)

    def call(layer: int) -> Callable[[], object]:
        return lambda: gpu.decode(q, pools[0], layer, table, seen, tables_of, softmax, scratch, out)

    return [call(layer) for layer in range(pools[0].shape[1])]


def check(
    q: Tensor,
    pools: list[Tensor],
    table: BatchTable,
    starts: Tensor,
    tables_of: RopeTables,
    scratch: gpu.DecodeScratch,
) -> None:
    """The first sequence against the oracle, in float32."""
    softmax = gpu.Softmax(SCALE)
    seen = gpu.plan_decode(table, starts, 1)
    found = gpu.decode(q, pools[0], 0, table, seen, tables_of, softmax, scratch)
    one = BatchTable(*(getattr(table, name)[:1] for name in BatchTable.__slots__))
    layers = [pool[:, :1].float().to("cuda") for pool in pools]
    expected = batch_reference.attend(
        q[:1].float(), layers, 0, one, starts[:1], [1], tables_of, SCALE
    )
    difference = (found[0][:1].float() - expected[0]).norm() / expected[0].norm()
    require(bool(difference < 0.01), f"differs from the oracle by {float(difference):g}")


def flash_attention_3(
    kv: Tensor, q: Tensor, batch: int, context: int, page: int
) -> list[Callable[[], object]]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    used = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    pages = torch.randperm(batch * context // page, device="cuda", dtype=torch.int32)
    pages = pages.view(batch, -1)

    def call(i: int) -> Callable[[], object]:
        k, v = (part.view(-1, page, KV_HEADS, DIM) for part in kv[i])
        return lambda: flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            max_seqlen_q=1,
            cu_seqlens_q=cu,
            max_seqlen_k=context,
            seqused_k=used,
            block_table=pages,
            causal=True,
            softmax_scale=SCALE,
            fa_version=3,
        )

    return [call(i) for i in range(kv.shape[0])]


def flash_infer(
    kv: Tensor, q: Tensor, batch: int, context: int, page: int
) -> list[Callable[[], object]]:
    import flashinfer  # type: ignore[import-not-found]

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    pages = torch.randperm(batch * context // page, device="cuda", dtype=torch.int32)
    begin = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * (context // page)
    last = torch.full((batch,), page, dtype=torch.int32, device="cuda")
    kind = torch.bfloat16
    wrapper.plan(
        begin, pages, last, Q_HEADS, KV_HEADS, DIM, page, q_data_type=kind, kv_data_type=kind
    )
    out = torch.empty_like(q)

    def call(i: int) -> Callable[[], object]:
        k, v = (part.view(-1, page, KV_HEADS, DIM) for part in kv[i])
        return lambda: wrapper.run(q, (k, v), out=out)

    return [call(i) for i in range(kv.shape[0])]


def contiguous(kv: Tensor, q: Tensor, batch: int, context: int) -> list[Callable[[], object]]:
    def call(i: int) -> Callable[[], object]:
        k, v = (part.view(batch, context, KV_HEADS, DIM).transpose(1, 2) for part in kv[i])
        return lambda: torch.nn.functional.scaled_dot_product_attention(
            q.view(batch, Q_HEADS, 1, DIM), k, v, enable_gqa=True
        )

    return [call(i) for i in range(kv.shape[0])]


def peers(batch: int, context: int, copies: int, q: Tensor) -> dict[str, float]:
    """Milliseconds of each peer that is installed, at its best page size."""
    kv = torch.randn(copies, 2, batch * context, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    found = {"sdpa_contiguous": graph_ms(contiguous(kv, q, batch, context))}
    paged = {"flash_attention_3": (flash_attention_3, (16, 64, 128)),
             "flashinfer": (flash_infer, (16, 64))}  # fmt: skip
    for name, (make, pages) in paged.items():
        try:
            found[name] = min(graph_ms(make(kv, q, batch, context, page)) for page in pages)
        except ImportError as error:
            say(f"  no {name}: {error}")
    return found


def measure_shape(report: Report, batch: int, context: int) -> None:
    """One shape: ours, the peers, and the bound against the better paged one."""
    num_bytes = batch * context * KV_HEADS * DIM * 2 * 2
    copies = min(80, max(2, math.ceil(KV_BYTES / num_bytes)))
    blocks = batch * context // BLOCK
    q = torch.randn(batch, Q_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    pool = torch.randn(
        blocks + 1, copies, 2, KV_HEADS, BLOCK, DIM, dtype=torch.bfloat16, device="cuda"
    )
    own = graph_ms(own_calls([pool], q, batch, context))
    del pool
    torch.cuda.empty_cache()
    others = peers(batch, context, copies, q)
    paged = [value for name, value in others.items() if name != "sdpa_contiguous"]
    name = f"{batch}x{context}"
    report.add(f"{name}_ms", own, "ms", peers=others, tb_per_s=num_bytes / own / 1e9)
    if paged:
        bound = BOUNDS[0] if min(paged) < 0.1 else BOUNDS[1]
        report.add(f"{name}_ratio", own / min(paged), "x better paged peer", bound=bound)
    shown = ", ".join(f"{key} {value:.4f}" for key, value in others.items())
    say(f"  {name}: {own:.4f} ms; {shown}")


def measure_pinned(report: Report, share: float) -> None:
    """1 x 32,768 with some of the blocks in pinned memory."""
    context, blocks = 32768, 512
    num_cpu = round(share * blocks)
    shape = (1, 2, KV_HEADS, BLOCK, DIM)
    device = torch.randn(blocks - num_cpu + 1, *shape, dtype=torch.bfloat16, device="cuda")
    host = torch.randn(num_cpu, *shape).bfloat16().pin_memory()
    q = torch.randn(1, Q_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    pools = [torch.cat([device[:-1], device[-1:]]), host]
    ids = torch.tensor([i for i in range(blocks + 1) if i != blocks - num_cpu])
    ids = ids[torch.randperm(blocks)].view(1, -1)
    table = batch_table(full_tables(1, context, ids), [context], pools, blocks, "cuda")
    starts, tables_of = torch.full((1,), context - 1, device="cuda"), rope(context)
    layout = gpu.Shape.of(pools[0], Q_HEADS, tables_of)
    scratch = gpu.decode_scratch(layout, 1, 1, min(256, blocks), "cuda")
    check(q, pools, table, starts, tables_of, scratch)
    softmax, out = gpu.Softmax(SCALE), torch.empty_like(q)
    seen = gpu.plan_decode(table, starts, 1)
    ms = graph_ms(
        [lambda: gpu.decode(q, pools[0], 0, table, seen, tables_of, softmax, scratch, out)]
    )
    rate = host.nbytes / ms / 1e6
    name = f"pinned_{round(100 * share)}_percent"
    report.add(f"{name}_ms", ms, "ms", bound=PINNED_MS if share == 0.1 else None)
    bound = PINNED_GBS if share == 1.0 else None
    report.add(f"{name}_gb_per_s", rate, "GB/s", bound=bound, better="higher")
    say(f"  pinned {share:.0%}: {ms:.4f} ms, {rate:.1f} GB/s")


def main() -> int:
    """Measure all shapes; 0 if every bound is kept."""
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    report = Report("gpu_attention")
    for batch, context in SHAPES[:2] if options.quick else SHAPES:
        measure_shape(report, batch, context)
        torch.cuda.empty_cache()
    for share in (0.1,) if options.quick else (0.1, 0.5, 1.0):
        measure_pinned(report, share)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())

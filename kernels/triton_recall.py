"""What each query sees of what each layer recalls: all layers of a step in one launch."""

import triton
import triton.language as tl


@triton.jit
def recalled_seen_kernel(
    starts,
    caps,
    first_valid,
    end_valid,
    counts,
    window_sizes,
    query_starts,
    seen,
    num_layers,
    capacity,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """What one query sees of the entries of one layer: `seen` int32 [S * QUERIES, L, K, 4].

    The four are those of `seen_kernel`. A slot is visible once its token has left the window.
    """
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = row // QUERIES
    entry = tl.program_id(2) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < capacity
    at = (seq * num_layers + layer) * capacity + entry
    token = tl.load(query_starts + seq) + row % QUERIES
    distance = token - tl.load(starts + at, mask=inside, other=0)
    cap = tl.load(caps + at, mask=inside, other=0)
    low = tl.load(first_valid + at, mask=inside, other=0).to(tl.int64)
    high = tl.load(end_valid + at, mask=inside, other=0).to(tl.int64)
    high = tl.minimum(high, distance + 1 - tl.load(window_sizes + seq))
    any_seen = (entry < tl.load(counts + seq * num_layers + layer)) & (low < high)
    place = seen + ((row * num_layers + layer) * capacity + entry) * 4
    position = tl.maximum(tl.minimum(distance, cap), 0)
    tl.store(place, tl.where(any_seen, position, 0).to(tl.int32), mask=inside)
    tl.store(place + 1, tl.where(any_seen, low, 0).to(tl.int32), mask=inside)
    tl.store(place + 2, tl.where(any_seen, high, 0).to(tl.int32), mask=inside)
    tl.store(place + 3, tl.zeros_like(entry), mask=inside)

"""How often recall finds the block that a question is about, by which digest and whose choice.

    python benchmarks/digests.py --data DIR [--quick]

Streams of real text with one number hidden in each are read, the number is asked for, and old
blocks are ranked by the attention that the question's last queries would give them. Found is a
stream whose needle's block is among the k heaviest; candidates are the stream's own old blocks,
then those of other streams besides. Each digest ranks with all query heads alike (`all_heads`),
with the heads that `streamkv.head_measuring` finds (`heads`), and for each layer by itself
(`per_layer`: the share of layers that find it). `product` is what recall does, by its own code.
First that is compared with what a session attends to, and weights with loops over tokens.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import MODEL, arguments, finish, require, say
from digest_kinds import BOUNDS, EXACT, KINDS, block_scores, head_weights, rank, scores_beside_sinks
from digest_streams import Seen, candidates, read_stream
from report import Report
from torch import Tensor

from streamkv import Engine, EngineConfig
from streamkv.config import choose_dtype
from streamkv.device import choose_device
from streamkv.digest_index import digest_dtype
from streamkv.head_measuring import find_retrieval_heads
from streamkv.kernels.digests import block_weights, followed
from streamkv.kernels.rope import RopeTables, rotate
from streamkv.model import ModelAdapter
from streamkv.recall_bench import modes
from streamkv.recall_bench.haystack import read_directory
from streamkv.recall_bench.question import Question, QuestionMaker
from streamkv.recall_bench.run import ModelFacts
from streamkv.recall_bench.statistics import wilson
from streamkv.recalled import farthest
from streamkv.retrieval_heads import RetrievalHeads

MOST_BELOW = 10
"""Points that the product's choice may lie below exact scores of the same heads."""
SEED = 7
NUM_DEPTHS = 10
QUESTION_ROOM = 256
"""Tokens that come after a stream before its answer, and more."""
WAYS = ("heads", "all_heads", "per_layer")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is read and ranked.

    Attributes:
        streams, length: streams, and tokens of each.
        window_size: of the engine.
        blocks: candidates at most, besides the stream's own alone.
        chosen: how many are chosen.
        recall_blocks: of these, the one whose shares are figures.
    """

    streams: int
    length: int
    window_size: int
    blocks: tuple[int, ...]
    chosen: tuple[int, ...]
    recall_blocks: int


FULL = Sizes(48, 8192, 2048, (500, 2000), (4, 8, 16, 32), 16)
QUICK = Sizes(3, 1024, 256, (24,), (1, 2, 4, 8), 4)


class Found(list[int]):
    """How many blocks weighed more than the needle's, of each ranking."""

    def among(self, chosen: int) -> int:
        """In how many rankings it is among the first."""
        return sum(place < chosen for place in self)

    def shares(self, chosen: Sequence[int]) -> dict[int, float]:
        """In which share of them, by how many are chosen."""
        return {each: self.among(each) / len(self) for each in chosen}


class Ranking:
    """Ranks the blocks of all streams, as seen just beyond a window.

    Args:
        model: the adapter.
        heads: that choose.
        streams: all.
        sizes: what is ranked.
        num_sinks: sink tokens of each stream, in the first of its own blocks.
    """

    def __init__(
        self,
        model: ModelAdapter,
        heads: RetrievalHeads,
        streams: Sequence[Seen],
        sizes: Sizes,
        num_sinks: int,
    ) -> None:
        self.sizes = sizes
        self.labels = ("own", *(str(most) for most in sizes.blocks))
        self._model = model
        self._heads = heads
        self._num_sinks = num_sinks
        self._streams = streams
        self._device = model.base.device
        distance = farthest("far", sizes.window_size, sizes.recall_blocks, model.spec.block_size)
        self._angles = RopeTables(model.inv_freq.to(self._device), distance + 1).rows(
            torch.tensor(distance, device=self._device)
        )
        self._keys = torch.cat([stream.keys for stream in streams])
        needles = torch.cat([stream.is_needle for stream in streams])
        most = max(sizes.blocks)
        self._blocks = [candidates(streams, i, most, SEED) for i in range(len(streams))]
        self._is_needle = [needles[blocks].to(self._device) for blocks in self._blocks]
        self._ends = [
            (len(stream.keys), *(max(len(stream.keys), most) for most in sizes.blocks))
            for stream in streams
        ]
        for blocks, ends in zip(self._blocks, self._ends, strict=True):
            require(len(blocks) == ends[-1], f"only {len(blocks)} blocks to choose from")

    @torch.inference_mode()
    def product_weights(self, index: int, end: int) -> Tensor:
        """By recall's own code: float32 [n] of the first candidates of a stream.

        Other streams' blocks are in no order: each counts as if it followed the one before it.
        """
        heads, stream, spec = self._heads, self._streams[index], self._model.spec
        layers, kv_heads = torch.tensor(heads.kv_heads).unbind(1)
        # [rows, n, block_size, head_dim]
        page = self._keys[self._blocks[index][:end]][:, layers, kv_heads].transpose(0, 1)
        queries = torch.stack([stream.queries[head.layer, :, head.q_head] for head in heads.heads])
        scales = [self._model.scales[head.layer] for head in heads.heads]
        weights = block_weights(
            queries.to(self._device),
            [page.to(self._device, digest_dtype(spec))],
            heads.rows,
            *self._angles,
            scales,
            self._num_sinks,
        )
        return followed(weights)

    def product(self) -> dict[str, Found]:
        """How often recall's own code finds the needle, by candidates."""
        found = {size: Found() for size in self.labels}
        for index, ends in enumerate(self._ends):
            for size, end in zip(self.labels, ends, strict=True):
                weights = self.product_weights(index, end)
                found[size].append(rank(weights, self._is_needle[index][:end]))
        return found

    def turned(self, layer: int, index: int) -> Tensor:
        """Queries of a layer, turned and scaled: float32 [num_kv_heads, group * T, head_dim]."""
        queries = self._streams[index].queries[layer].to(self._device).float()
        turned = rotate(queries, *self._angles) * self._model.scales[layer]
        by_head = turned.transpose(0, 1)
        return by_head.unflatten(0, (self._model.spec.num_kv_heads, -1)).flatten(1, 2)

    def keys(self, layer: int) -> Tensor:
        """Of all blocks: float32 [num_kv_heads, n, block_size, head_dim]."""
        return self._keys[:, layer].to(self._device).float().transpose(0, 1)

    @torch.inference_mode()
    def by_kind(self, kind: str) -> dict[tuple[str, str], Found]:
        """How often a digest finds the needle, by way and candidates."""
        found: dict[tuple[str, str], Found] = defaultdict(Found)
        totals: dict[tuple[str, str, int], Tensor] = {}
        for layer in range(self._model.spec.num_layers):
            digests = KINDS[kind](self.keys(layer))
            _, chosen = self._heads.of_layer(layer)
            for index, blocks in enumerate(self._blocks):
                is_needle = self._is_needle[index]
                num_queries = self._streams[index].queries.shape[1]
                mine = digests[:, blocks.to(self._device)]
                turned = self.turned(layer, index)
                scores, drawn = scores_beside_sinks(kind, mine, turned, self._num_sinks)
                for size, end in zip(self.labels, self._ends[index], strict=True):
                    beside = torch.cat((scores[..., :end], drawn), -1)
                    weights = head_weights(beside, num_queries)[:, :end]
                    every = weights.sum(0)
                    found["per_layer", size].append(rank(every, is_needle[:end]))
                    for way, added in (("all_heads", every), ("heads", weights[chosen].sum(0))):
                        place = way, size, index
                        totals[place] = totals[place] + added if place in totals else added
        for (way, size, index), total in totals.items():
            found[way, size].append(rank(total, self._is_needle[index][: len(total)]))
        return found

    def check_attended(self, index: int) -> None:
        """A session attends to the blocks that are heaviest here."""
        attended = self._streams[index].attended
        weights = self.product_weights(index, self._ends[index][0])
        least = weights.sort(descending=True).values[: len(attended)].min()
        wanted = min(self.sizes.recall_blocks, len(weights))
        require(len(attended) == wanted, f"a session attended to {len(attended)} blocks")
        lightest = weights[sorted(attended)].min()
        require(bool(lightest >= 0.99 * least), "a session attended to other blocks")

    def check_loops(self, index: int, num_blocks: int = 3) -> None:
        """Weights of one head by exact keys and by bounds are those of loops over tokens."""
        head = self._heads.heads[0]
        kv_head, place = divmod(head.q_head, self._heads.group)
        keys = self.keys(head.layer)[kv_head, self._blocks[index][:num_blocks].to(self._device)]
        stream = self._streams[index]
        queries = stream.queries[head.layer, :, head.q_head].tolist()
        scale = self._model.scales[head.layer]
        cos, sin = (angle.tolist() for angle in self._angles)
        turned = [[scale * x for x in turn(query, cos, sin)] for query in queries]
        for kind in (EXACT, BOUNDS):
            weights = torch.zeros(num_blocks)
            for query in turned:
                score = exact_score if kind == EXACT else bound_score
                scores = [score(query, block) for block in keys.tolist()]
                weights += torch.tensor(scores).softmax(0) / len(turned)
            mine = self.turned(head.layer, index)[kv_head : kv_head + 1]
            scored = block_scores(kind, KINDS[kind](keys[None]), mine)
            found = head_weights(scored, len(queries))[place].cpu()
            worst = float((found - weights).abs().max())
            require(worst < 1e-4, f"weights by {kind} keys differ from loops by {worst:g}")


def turn(query: list[float], cos: list[float], sin: list[float]) -> list[float]:
    """A query turned pair by pair."""
    half, turned = len(cos), list(query)
    for pair in range(half):
        first, second = query[pair], query[pair + half]
        turned[pair] = first * cos[pair] - second * sin[pair]
        turned[pair + half] = second * cos[pair] + first * sin[pair]
    return turned


def exact_score(query: list[float], block: list[list[float]]) -> float:
    """Log of what all tokens of a block get, up to what all blocks have in common."""
    scores = [sum(q * k for q, k in zip(query, key, strict=True)) for key in block]
    most = max(scores)
    return most + math.log(sum(math.exp(score - most) for score in scores))


def bound_score(query: list[float], block: list[list[float]]) -> float:
    """More than the score of any token of a block, or as much."""
    channels = zip(*block, strict=True)
    return sum(max(q * min(k), q * max(k)) for q, k in zip(query, channels, strict=True))


def questions(options: argparse.Namespace, facts: ModelFacts, sizes: Sizes) -> list[Question]:
    """Streams whose needles have left the window, evenly deep."""
    deepest = (sizes.length - sizes.window_size - QUESTION_ROOM) / sizes.length
    depths = [0.02 + (deepest - 0.02) * step / (NUM_DEPTHS - 1) for step in range(NUM_DEPTHS)]

    def encode(text: str) -> list[int]:
        return facts.tokenizer.encode(text, at_start=False)

    haystack = read_directory(options.data / "books", encode)
    num_prefix = len(facts.tokenizer.prefix_ids)
    maker = QuestionMaker(haystack, encode, num_prefix, SEED, depths)
    return [maker.make(sizes.length, index) for index in range(sizes.streams)]


def ranking(options: argparse.Namespace, sizes: Sizes, dtype: str, device: str) -> Ranking:
    """Read all streams."""
    facts = ModelFacts.read(options.model, dtype, say)
    base = EngineConfig(
        window_size=sizes.window_size,
        dtype=dtype,  # type: ignore[arg-type]  # checked by the class
        device=options.device,
        prefill_chunk=4096 if device == "cuda" else 512,
    )
    longest = sizes.length + QUESTION_ROOM
    config = modes.recall_config(base, facts.spec, modes.WINDOW, sizes.recall_blocks, longest)
    asked = questions(options, facts, sizes)
    streams: list[Seen] = []
    with Engine(options.model, config, on_progress=say) as engine:
        for index, question in enumerate(asked):
            streams.append(read_stream(engine, question, sizes.recall_blocks, index == 0))
            if (index + 1) % 4 == 0:
                say(f"  {index + 1} of {len(asked)} streams of {sizes.length:,} tokens")
        heads = find_retrieval_heads(engine.model, engine.tokenizer, say)
        return Ranking(engine.model, heads, streams, sizes, config.num_sink_tokens)


def measure(report: Report, ranked: Ranking) -> None:
    """Rank by every digest, and as recall does."""
    by_kind = {}
    for kind in KINDS:
        say(f"  {kind}")
        by_kind[kind] = ranked.by_kind(kind)
    product, sizes = ranked.product(), ranked.sizes
    unit = f"share at k={sizes.recall_blocks}"
    for size in ranked.labels:
        found = product[size]
        shares = found.shares(sizes.chosen)
        show(f"product, {size}", shares)
        share = shares[sizes.recall_blocks]
        low, high = wilson(found.among(sizes.recall_blocks), len(found))
        interval = {"low": low, "high": high, "by_k": shares}
        report.add(f"product_{size}", share, unit, better="higher", **interval)
        for way in WAYS:
            each = {kind: ways[way, size].shares(sizes.chosen) for kind, ways in by_kind.items()}
            for kind, of_kind in each.items():
                show(f"{way}, {size}, {kind}", of_kind)
            at_k = {kind: of_kind[sizes.recall_blocks] for kind, of_kind in each.items()}
            exact = at_k.pop(EXACT)
            report.add(f"{way}_{size}", exact, unit, better="higher", peers=at_k, by_k=each)
            if way == "heads":
                below = 100 * (exact - share)
                report.add(f"product_below_exact_{size}", below, "points", bound=MOST_BELOW)


def show(what: str, shares: dict[int, float]) -> None:
    """A line of the whole table."""
    cells = "  ".join(f"k={chosen} {share:.3f}" for chosen, share in shares.items())
    say(f"{what:<32} {cells}")


def main() -> int:
    """Read, check, rank; 0 if recall's choice is as good as exact scores, nearly."""
    parser = arguments(__doc__, data=True)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    if options.device == "auto" and torch.cuda.is_available():
        # The engine's own choice is the CPU, on which this takes an hour.
        options.device = "cuda"
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    ranked = ranking(options, sizes, dtype, device)
    ranked.check_loops(0)
    ranked.check_attended(0)
    report = Report("digests")
    report.notes.append(
        f"{Path(options.model).name}, {dtype}, {sizes.streams} streams of {sizes.length} tokens, "
        f"window {sizes.window_size}"
    )
    measure(report, ranked)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())

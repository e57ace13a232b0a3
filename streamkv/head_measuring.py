"""Which heads of a model look a fact up: measured once per model, by asking it for facts.

Short texts with one made-up fact in the middle and its question at the end run through the model,
with exact attention; the heads whose last queries give the fact the most weight, among what all the
texts say, are those that choose blocks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.fact_texts import NUM_FIRST, FactText, fact_texts
from streamkv.kernels.rope import RopeTables, rotate
from streamkv.model import ModelAdapter
from streamkv.model_cache import read_note, write_note
from streamkv.model_files import OnProgress
from streamkv.retrieval_heads import NUM_HEADS, Head, RetrievalHeads
from streamkv.tiers.spec import BLOCK_SIZE
from streamkv.tokenizer import Tokenizer

NUM_QUERIES = 16
"""Last tokens of a text whose queries count."""

DISTANCE = 2048 + BLOCK_SIZE
"""To the start of a recalled block while heads are measured; nearer for a model trained on less."""

_VERSION = 1
"""Part of the note's name: heads measured in another way are measured anew."""


def find_retrieval_heads(
    adapter: ModelAdapter, tokenizer: Tokenizer, on_progress: OnProgress | None = None
) -> RetrievalHeads:
    """The heads of a model that look facts up; measured if they were not before.

    Args:
        adapter: the model.
        tokenizer: its own.
        on_progress: called with a line for people before anything that takes seconds.
    """
    facts = f"{adapter.architecture}|{adapter.fingerprint.hex()}|{NUM_HEADS}|{_VERSION}"
    note = "heads-" + hashlib.blake2b(facts.encode(), digest_size=12).hexdigest()
    heads = _checked(read_note(note), adapter)
    if heads is None:
        if on_progress is not None:
            on_progress("Measuring which heads of the model look facts up (once) ...")
        heads = measure_heads(adapter, tokenizer)
        write_note(note, [list(head) for head in heads])
    return RetrievalHeads(tuple(heads), adapter.num_q_heads // adapter.spec.num_kv_heads)


def measure_heads(
    adapter: ModelAdapter, tokenizer: Tokenizer, num_heads: int = NUM_HEADS
) -> list[Head]:
    """The heads that look most at facts, by layer, then head; on a tie the earlier one."""
    distance = min(DISTANCE, max(adapter.trained_length - BLOCK_SIZE, 0))
    weights = head_weights(adapter, list(fact_texts(tokenizer)), distance)
    order = weights.flatten().sort(descending=True, stable=True).indices[:num_heads]
    return sorted(Head(*divmod(place, adapter.num_q_heads)) for place in order.tolist())


@torch.inference_mode()
def head_weights(adapter: ModelAdapter, texts: Sequence[FactText], distance: int) -> Tensor:
    """How much each head looks at the facts: float32 [num_layers, num_q_heads], 0 to 1.

    As in recall: the keys of all texts lie in blocks that start at one distance, so that a fact
    has the other texts beside it, and a head must find it by what it says. Of what the last
    `NUM_QUERIES` tokens would look at there, the part that is their own fact; the mean over queries
    and texts. Other texts' facts, and the first tokens and the question of each, are not there.

    Args:
        adapter: the model.
        texts: some.
        distance: to the start of a block.
    """
    device = adapter.base.device
    seen = [_read(adapter, text) for text in texts]
    owner = torch.cat([torch.full((len(each.far),), i) for i, each in enumerate(seen)]).to(device)
    is_fact = torch.cat([each.is_fact for each in seen]).to(device)
    offsets = torch.arange(len(owner), device=device) % BLOCK_SIZE
    rope = RopeTables(adapter.inv_freq.to(device), max(distance, BLOCK_SIZE) + 1)
    cos, sin = (x[:, None] for x in rope.rows(offsets))
    turn = rope.rows(torch.tensor([distance], device=device))
    group = adapter.num_q_heads // adapter.spec.num_kv_heads
    total = torch.zeros(adapter.spec.num_layers, adapter.num_q_heads, device=device)
    for layer in range(adapter.spec.num_layers):
        keys = torch.cat([each.keys[layer][each.far] for each in seen]).float()
        keys = rotate(keys, cos, sin).repeat_interleave(group, 1).transpose(0, 1)
        for index, each in enumerate(seen):
            queries = rotate(each.queries[layer].float(), *turn).transpose(0, 1)
            scores = queries @ keys.mT * adapter.scales[layer]
            scores.masked_fill_(is_fact & (owner != index), -torch.inf)
            own = is_fact & (owner == index)
            total[layer] += scores.softmax(-1)[..., own].sum(-1).mean(-1)
    return total / len(texts)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What a text showed.

    Attributes:
        keys: by layer, [T, num_kv_heads, head_dim], un-rotated.
        queries: by layer, [NUM_QUERIES, num_q_heads, head_dim], un-rotated, of its last tokens.
        far: token indices of text and fact.
        is_fact: bool, of each of these.
    """

    keys: list[Tensor]
    queries: list[Tensor]
    far: Tensor
    is_fact: Tensor


def _read(adapter: ModelAdapter, text: FactText) -> _Seen:
    """Run a text with exact attention and keep its keys and last queries."""
    device = adapter.base.device
    num_tokens = len(text.token_ids)
    rope = RopeTables(adapter.inv_freq.to(device), num_tokens)
    cos, sin = (x[:, None] for x in rope.rows(torch.arange(num_tokens, device=device)))
    seen_keys: list[Tensor] = []
    seen_queries: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen_keys.append(k.clone())
        seen_queries.append(q[-NUM_QUERIES:].clone())
        group = q.shape[1] // k.shape[1]
        queries = rotate(q.float(), cos, sin).transpose(0, 1)
        keys = rotate(k.float(), cos, sin).repeat_interleave(group, 1).transpose(0, 1)
        values = v.float().repeat_interleave(group, 1).transpose(0, 1)
        mask = _mask(num_tokens, adapter.sliding_windows[layer], device)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale
        )
        return mixed.transpose(0, 1).to(q.dtype)

    adapter.hidden(torch.tensor([text.token_ids], device=device), attend)
    far = torch.arange(NUM_FIRST, text.asked)
    return _Seen(seen_keys, seen_queries, far, (far >= text.begin) & (far < text.end))


def _mask(num_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees."""
    tokens = torch.arange(num_tokens, device=device)
    distance = tokens[:, None] - tokens
    return (distance >= 0) & (distance < (window or num_tokens))


def _checked(noted: object, adapter: ModelAdapter) -> list[Head] | None:
    """Heads as they were noted, if they can be this model's."""
    try:
        heads = [Head(int(layer), int(q_head)) for layer, q_head in noted]  # type: ignore[attr-defined]  # any JSON
    except (TypeError, ValueError):
        return None
    known = all(
        0 <= head.layer < adapter.spec.num_layers and 0 <= head.q_head < adapter.num_q_heads
        for head in heads
    )
    return heads if heads and known and heads == sorted(set(heads)) else None

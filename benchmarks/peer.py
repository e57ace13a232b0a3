"""The peer on the same machine: the same weights run by transformers alone, with SDPA.

Invariant: it gets its best plain settings (no cache where none is needed, a prefilled cache where
one is), and its prefill is never part of a decode timing. It knows nothing of streamkv's engine.
"""

import warnings
from typing import Any

import torch
from common import MODEL
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from streamkv.model_files import quiet_transformers, resolve_model

LOGIT_ROWS = 256
"""Rows of logits made at once while scoring: 50 MB in float32."""


class Peer:
    """SmolLM2 as transformers runs it.

    Args:
        dtype: `float32` or `bfloat16`.
    """

    def __init__(self, dtype: str) -> None:
        # Newer versions call the argument `cache`, older ones know only this name.
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        with quiet_transformers():
            load: Any = AutoModelForCausalLM.from_pretrained
            self.model = load(
                resolve_model(MODEL), dtype=getattr(torch, dtype), attn_implementation="sdpa"
            ).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> DynamicCache:
        """A cache of all ids but the last, as a generation begins with it."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([ids[:-1]]), past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def generate(self, ids: list[int], cache: DynamicCache, num_tokens: int) -> list[int]:
        """Greedy tokens after `ids`, whose prefill `cache` is; it is longer afterwards."""
        input_ids = torch.tensor([ids])
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=cache,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found: list[int] = output[0, len(ids) :].tolist()
        return found

    @torch.inference_mode()
    def score(self, ids: list[int]) -> Tensor:
        """Log-probabilities float32 [len(ids) - 1] of all ids but the first."""
        targets = torch.tensor(ids[1:])
        base, head = self.model.model, self.model.lm_head
        hidden = base(torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
        found = [
            head(rows).float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            for rows, wanted in zip(
                torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True
            )
        ]
        return torch.cat(found)

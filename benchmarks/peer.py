"""The peer on the same machine: the same weights run by transformers alone, with SDPA.

Invariant: it gets its best plain settings (no cache where none is needed, a prefilled cache where
one is), a process of its own, and its prefill is never part of a decode timing. It knows nothing of
streamkv's engine.
"""

import multiprocessing
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from common import MODEL
from transformers import AutoModelForCausalLM, DynamicCache

from streamkv.model_files import quiet_transformers, resolve_model

LOGIT_ROWS = 256
"""Rows of logits made at once while scoring: 50 MB in float32."""


class _Transformers:
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
    def generate(self, ids: list[int], num_tokens: int) -> tuple[list[int], float]:
        """Greedy tokens after `ids`, and the seconds they took once all else was in the cache."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([ids[:-1]]), past_key_values=cache, logits_to_keep=1)
        input_ids = torch.tensor([ids])
        started = time.perf_counter()
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=cache,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        elapsed = time.perf_counter() - started
        return output[0, len(ids) :].tolist(), elapsed

    @torch.inference_mode()
    def score(self, ids: list[int]) -> tuple[list[float], float]:
        """Log-probabilities of all ids but the first, and the seconds that took."""
        started = time.perf_counter()
        targets = torch.tensor(ids[1:])
        base, head = self.model.model, self.model.lm_head
        hidden = base(torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
        found = [
            head(rows).float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            for rows, wanted in zip(
                torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True
            )
        ]
        return torch.cat(found).tolist(), time.perf_counter() - started


def _serve(dtype: str, num_threads: int, requests: Connection) -> None:
    """The peer's process: answer until the other end is closed."""
    torch.set_num_threads(num_threads)
    peer = _Transformers(dtype)
    while True:
        try:
            name, arguments = requests.recv()
        except EOFError:
            return
        requests.send(getattr(peer, name)(*arguments))


class Peer:
    """SmolLM2 as transformers runs it, in a process of its own. A context manager.

    In one process the OpenMP workers of both sides would count as more than there are processors,
    and none would wait awake any more: both would be slower than alone.

    Args:
        dtype: `float32` or `bfloat16`.
    """

    def __init__(self, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._answers, requests = context.Pipe()
        target, threads = _serve, torch.get_num_threads()
        self._process = context.Process(target=target, args=(dtype, threads, requests), daemon=True)
        self._process.start()
        requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._answers.close()
        self._process.join()

    def generate(self, ids: list[int], num_tokens: int) -> tuple[list[int], float]:
        """Greedy tokens after `ids`, and the seconds they took once all else was in the cache."""
        self._answers.send(("generate", (ids, num_tokens)))
        tokens, seconds = self._answers.recv()
        return tokens, seconds

    def score(self, ids: list[int]) -> tuple[list[float], float]:
        """Log-probabilities of all ids but the first, and the seconds that took."""
        self._answers.send(("score", (ids,)))
        scores, seconds = self._answers.recv()
        return scores, seconds

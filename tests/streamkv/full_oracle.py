"""What a stream should score: transformers' own eager attention, with a mask row for each token."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

FULL = 10**9
"""A window that holds everything."""


def expected_scores(model_dir: Path, ids: list[int], windows: list[int]) -> list[float]:
    """Log-probability of each token but the first.

    Args:
        model_dir: the model; float32.
        ids: of the stream.
        windows: of each token: how many of the newest it sees, itself included. No sink tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), attention_mask=_mask(windows)).logits[0]
    logprobs = logits.log_softmax(-1)
    return [logprobs[index, token].item() for index, token in enumerate(ids[1:])]


def _mask(windows: list[int]) -> Tensor:
    """[1, 1, T, T], added to the scores."""
    mask = torch.full((len(windows), len(windows)), float("-inf"))
    for index, window in enumerate(windows):
        mask[index, max(0, index - window + 1) : index + 1] = 0
    return mask[None, None]

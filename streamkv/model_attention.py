"""The seam in transformers' attention: every layer hands its q, k and v to a function of ours.

A model whose `_attn_implementation` is `IMPLEMENTATION` builds no mask and calls `_attention` once
per attention layer; which function then attends travels as a keyword argument of the model's
forward, so that nothing is global and several engines can share a process. What attends is the
caller's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from streamkv.errors import UnsupportedModelError

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], scale) -> [T, Hq, D]; q, k un-rotated."""

IMPLEMENTATION: Final = "streamkv"
"""Name under which transformers knows our attention function."""

# Arguments that change the result and that our kernels do not know.
_REFUSED_ARGUMENTS = {
    "softcap": "a soft cap on attention scores",
    "s_aux": "learned sink logits",
    "position_bias": "a bias by position",
}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """How one layer called attention.

    Attributes:
        module: the layer's attention module.
        layer: its `layer_idx`.
        num_q_heads, num_kv_heads, head_dim: as in q and k.
        value_dim: elements of one head of v.
        scale: factor of the scores.
        sliding_window: tokens the layer sees, the query's own included; `None`: all.
        refused: what the layer asks for that no kernel here does.
    """

    module: nn.Module
    layer: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None
    refused: tuple[str, ...]


def register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)


def trace_attention(base: PreTrainedModel, inputs: dict[str, Tensor]) -> list[AttentionCall]:
    """Run `base` once, see `run_base`, and report its attention calls in order."""
    calls: list[AttentionCall] = []
    run_base(base, inputs, attend_nothing, trace=calls)
    return calls


def run_base(
    base: PreTrainedModel,
    inputs: dict[str, Tensor],
    attend: Attend,
    trace: list[AttentionCall] | None = None,
) -> Tensor:
    """Hidden states [1, T, hidden] of `base` when `attend` does the attention.

    Args:
        base: a decoder without head, with attention implementation `IMPLEMENTATION`.
        inputs: `input_ids` int64 [1, T], or `inputs_embeds` [1, T, hidden].
        attend: called once per layer.
        trace: takes a record of each call.
    """
    shown = next(iter(inputs.values()))
    # Rotation by position 0 is the identity, so q and k arrive un-rotated.
    position_ids = torch.zeros(shown.shape[:2], dtype=torch.int64, device=shown.device)
    output = base(
        **inputs,
        position_ids=position_ids,
        use_cache=False,
        streamkv_attend=attend,
        streamkv_trace=trace,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def attend_nothing(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Zeros of the right shape: the trace looks at the calls, not at the values."""
    return q.new_zeros(*q.shape[:2], v.shape[2])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    streamkv_attend: Attend | None = None,
    streamkv_trace: list[AttentionCall] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q, k, v [1, heads, T, head_dim] to [1, T, Hq, D]."""
    if streamkv_attend is None:
        raise UnsupportedModelError("its layers do not pass keyword arguments on to attention")
    layer: int = module.layer_idx  # type: ignore[assignment]  # nn.Module attributes are untyped
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if streamkv_trace is not None:
        streamkv_trace.append(_describe(module, query, key, value, scale, kwargs))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return streamkv_attend(layer, q, k, v, scale)[None], None


def _describe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    kwargs: dict[str, Any],
) -> AttentionCall:
    return AttentionCall(
        module=module,
        layer=module.layer_idx,  # type: ignore[arg-type]  # as above
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=scale,
        sliding_window=kwargs.get("sliding_window"),
        refused=tuple(
            what for name, what in _REFUSED_ARGUMENTS.items() if kwargs.get(name) is not None
        ),
    )

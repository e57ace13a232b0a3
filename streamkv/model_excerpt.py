"""A few layers of a model, copied in float32, that run by its own code.

The excerpt holds the first layers of each kind. It shares nothing with the model that it could
change. Which difference matters between two runs is not its business.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamkv.errors import UnsupportedModelError
from streamkv.model_attention import IMPLEMENTATION, Attend, run_base, trace_attention
from streamkv.model_rope import rotary_modules

LAYERS_PER_KIND = 2


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """A decoder of a few layers.

    Attributes:
        base: the decoder; takes `inputs_embeds`.
        layers: index of each of its layers in the whole model.
        attentions: the modules that call attention, in order.
        embeds: float32 [1, num_tokens, hidden_size], inputs.
    """

    base: PreTrainedModel
    layers: tuple[int, ...]
    attentions: tuple[nn.Module, ...]
    embeds: Tensor

    def own_outputs(self, position: int) -> list[Tensor]:
        """What each attention module returns at `position` and on, by the model's eager code."""
        num_tokens = self.embeds.shape[1]
        positions = torch.arange(position, position + num_tokens, device=self.embeds.device)
        self.base.config._attn_implementation = "eager"
        with _Recorder(self.attentions) as recorder:
            self.base(inputs_embeds=self.embeds, position_ids=positions[None], use_cache=False)
        return recorder.outputs

    def disturbed_outputs(self, noise: Tensor) -> list[Tensor]:
        """As `own_outputs(0)`, with every angle wrong by `noise` [num_tokens, rotary_dim / 2]."""
        cos, sin = (torch.cat((x, x), dim=-1) for x in (noise.cos(), noise.sin()))

        def turn(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> object:
            own_cos, own_sin = output
            return own_cos * cos - own_sin * sin, own_sin * cos + own_cos * sin

        hooks = [module.register_forward_hook(turn) for module in rotary_modules(self.base)]
        try:
            return self.own_outputs(0)
        finally:
            for hook in hooks:
                hook.remove()

    def outputs(self, attend: Attend) -> list[Tensor]:
        """What each attention module returns when `attend` does the attention."""
        self.base.config._attn_implementation = IMPLEMENTATION
        with _Recorder(self.attentions) as recorder:
            run_base(self.base, {"inputs_embeds": self.embeds}, attend)
        return recorder.outputs


class _Recorder:
    """Keeps the first output of every call of some modules, in order, while entered."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.outputs: list[Tensor] = []
        self._modules = modules

    def __enter__(self) -> "_Recorder":
        self._hooks = [module.register_forward_hook(self._record) for module in self._modules]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.outputs.append(output[0] if isinstance(output, tuple) else output)


def make_excerpt(base: PreTrainedModel, num_tokens: int) -> Excerpt:
    """Copy the first layers of each kind.

    Args:
        base: the whole decoder.
        num_tokens: length of the input, of tokens spread over the vocabulary.

    Raises:
        UnsupportedModelError: the decoder has no list of its layers.
    """
    layers = _layer_list(base)
    chosen = choose_layers([_kind(layer) for layer in layers])
    embeddings = base.get_input_embeddings()
    vocab_size: int = base.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(num_tokens, device=base.device) * 7919 + 1) % vocab_size
    embeds = embeddings(ids[None]).float()
    small = _copy_base(base, layers, chosen, embeddings)
    small.config._attn_implementation = IMPLEMENTATION
    calls = trace_attention(small, {"inputs_embeds": embeds[:, :1]})
    return Excerpt(small, tuple(chosen), tuple(call.module for call in calls), embeds)


def choose_layers(kinds: list[object]) -> list[int]:
    """Indices of the first `LAYERS_PER_KIND` layers of each kind, in order."""
    return [
        index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < LAYERS_PER_KIND
    ]


def _layer_list(base: PreTrainedModel) -> nn.ModuleList:
    count = base.config.get_text_config(decoder=True).num_hidden_layers
    for child in base.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UnsupportedModelError("its decoder has no list of its layers")


def _kind(layer: nn.Module) -> object:
    """What a layer does, as far as its modules' classes and plain settings tell."""
    return [
        (name, type(module).__qualname__, _plain_settings(module))
        for name, module in layer.named_modules()
    ]


def _plain_settings(module: nn.Module) -> list[tuple[str, object]]:
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name != "layer_idx"
    )


def _copy_base(
    base: PreTrainedModel, layers: nn.ModuleList, chosen: list[int], embeddings: nn.Module
) -> PreTrainedModel:
    """The decoder with its chosen layers alone, numbered anew, in float32, without embeddings."""
    config = copy.deepcopy(base.config)
    # What deepcopy finds in the memo it takes for already copied.
    memo: dict[int, Any] = {id(base.config): config, id(embeddings): nn.Identity()}
    kept = nn.ModuleList(copy.deepcopy(layers[index], memo) for index in chosen)
    memo[id(layers)] = kept
    small: PreTrainedModel = copy.deepcopy(base, memo)
    small.float()  # type: ignore[no-untyped-call]
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = number  # type: ignore[assignment]  # as nn.Module types it
    _keep_settings_of(config, chosen)
    return small


def _keep_settings_of(config: Any, chosen: list[int]) -> None:
    """Shorten the settings that have one value per layer to the chosen layers."""
    count = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, [value[index] for index in chosen])
    config.num_hidden_layers = len(chosen)

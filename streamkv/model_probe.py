"""The numeric probe: does attention over blocks equal the model's own, for this very model?

An excerpt of the model runs in float32 on a few tokens, by its own eager attention and by ours. It
passes if (a) both agree at positions 0..n, across block boundaries, and (b) its own attention at
P..P+n equals that at 0..n for P up to the trained length, so that only distances matter. Otherwise
it is refused with layer and difference. There is no list of model types, here or elsewhere.
"""

import hashlib
import math
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from streamkv.errors import UnsupportedModelError
from streamkv.kernels import reference
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.model_attention import Attend, attend_nothing, run_base
from streamkv.model_cache import read_note, write_note
from streamkv.model_excerpt import Excerpt, make_excerpt
from streamkv.model_files import brief
from streamkv.tiers.spec import BLOCK_SIZE

if TYPE_CHECKING:
    from streamkv.model import ModelAdapter

PROBE_VERSION = 1
"""Part of the note's name: a sharper probe looks at every model again."""

NUM_BLOCKS = 3
NUM_TOKENS = 2 * BLOCK_SIZE + 9
"""Two block boundaries are crossed, and the last block is open."""

ROUNDING = 1e-3
"""Largest difference, over the RMS of a layer's attention output, that float32 sums explain.
Measured on SmolLM2: 8e-6. Wrong pairs or a layer without rope give 0.1 and more."""

ANGLE_ERROR = 6e-8
"""transformers makes angles in float32: they are wrong by up to this part of themselves."""

ANGLE_MARGIN = 1.5
"""How much more the true errors may change than random ones at their bound, measured on each model:
it differs by a factor of hundred between them. Seen, from flat to one-hot attention: 0.1 to 0.6."""


def probe_once(adapter: "ModelAdapter") -> None:
    """`probe`, unless these weights passed it before under these versions.

    Raises:
        UnsupportedModelError: see `probe`.
    """
    versions = f"{transformers.__version__}|{torch.__version__}|{PROBE_VERSION}"
    name = f"{adapter.architecture}|{adapter.fingerprint.hex()}|{versions}"
    note = "probe-" + hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    if read_note(note) is None:
        probe(adapter)
        write_note(note, name)


@torch.inference_mode()
def probe(adapter: "ModelAdapter") -> None:
    """Compare our attention and our use of the head with the model's own.

    Raises:
        UnsupportedModelError: names the first layer that differs, and by how much.
    """
    try:
        _probe_blocks(adapter)
        _probe_head(adapter)
    except UnsupportedModelError:
        raise
    # The excerpt runs code of unknown make in a way its author did not foresee.
    except Exception as error:
        raise UnsupportedModelError(
            f"it cannot be compared with its own attention ({brief(error)})"
        ) from error


def probe_positions(trained_length: int) -> list[int]:
    """Where (b) looks: one step on, powers of eight, and the last place that fits."""
    last = trained_length - NUM_TOKENS
    wanted = {1, *(8**power for power in range(2, 8)), last}
    return sorted(position for position in wanted if 0 < position <= last)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the RMS of what was expected; infinite if anything is NaN."""
    scale = expected.double().square().mean().sqrt()
    difference = ((found.double() - expected.double()).abs().max() / scale).item()
    return difference if math.isfinite(difference) else math.inf


def _probe_blocks(adapter: "ModelAdapter") -> None:
    excerpt = make_excerpt(adapter.base, NUM_TOKENS)
    own = excerpt.own_outputs(0)
    ours = excerpt.outputs(_block_attend(adapter, excerpt))
    rounding = _angle_rounding(adapter, excerpt, own, NUM_TOKENS)
    problem = "differs over blocks from the model's own, as with other rotary pairs or without rope"
    _compare(excerpt, ours, own, rounding, problem)
    for position in probe_positions(adapter.trained_length):
        far = excerpt.own_outputs(position)
        rounding = _angle_rounding(adapter, excerpt, own, position + NUM_TOKENS)
        problem = f"at position {position} differs from that at 0, so it is not of distances alone"
        _compare(excerpt, far, own, rounding, problem)


def _angle_rounding(
    adapter: "ModelAdapter", excerpt: Excerpt, own: list[Tensor], position: int
) -> list[float]:
    """Per layer of the excerpt, the difference that float32 explains at `position`."""
    generator = torch.Generator().manual_seed(position)
    random = torch.rand(NUM_TOKENS, len(adapter.inv_freq), generator=generator) * 2 - 1
    noise = (random * adapter.inv_freq * position * ANGLE_ERROR).float()
    disturbed = excerpt.disturbed_outputs(noise.to(excerpt.embeds.device))
    return [
        ROUNDING + ANGLE_MARGIN * relative_difference(x, y)
        for x, y in zip(disturbed, own, strict=True)
    ]


def _compare(
    excerpt: Excerpt, found: list[Tensor], own: list[Tensor], allowed: list[float], problem: str
) -> None:
    for layer, x, y, limit in zip(excerpt.layers, found, own, allowed, strict=True):
        difference = relative_difference(x, y)
        if difference > limit:
            raise UnsupportedModelError(
                f"attention of layer {layer} {problem} "
                f"(relative difference {difference:.2g}; {limit:.2g} would be rounding)"
            )


def _probe_head(adapter: "ModelAdapter") -> None:
    ids = torch.arange(3, device=adapter.base.device)[None]
    own = adapter.model(
        input_ids=ids,
        position_ids=torch.zeros_like(ids),
        use_cache=False,
        streamkv_attend=attend_nothing,
    )
    ours = adapter.logits(run_base(adapter.base, {"input_ids": ids}, attend_nothing)[0])
    difference = relative_difference(ours, own.logits[0].float())
    if difference > ROUNDING:
        raise UnsupportedModelError(
            f"logits made from hidden states differ from its own by {difference:.2g}"
        )


def _block_attend(adapter: "ModelAdapter", excerpt: Excerpt) -> Attend:
    """Attention of the reference kernels over a pool of scattered blocks."""
    device = excerpt.embeds.device
    rope = RopeTables(adapter.inv_freq.to(device), NUM_TOKENS)
    _, two, num_kv_heads, block_size, head_dim = adapter.spec.block_shape
    shape = (NUM_BLOCKS + 1, len(excerpt.layers), two, num_kv_heads, block_size, head_dim)
    pool = torch.zeros(shape, device=device)
    block_ids = torch.tensor([2, 0, 1], device=device)
    table = _table(block_ids)
    tokens = torch.arange(NUM_TOKENS, device=device)
    slots = block_ids[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        window = adapter.sliding_windows[excerpt.layers[layer]] or NUM_TOKENS
        reference.write_kv(pool, k, v, slots, layer, rope)
        return reference.attend(q, pool, layer, table, 0, window, rope, scale)

    return attend


def _table(block_ids: Tensor) -> SequenceTable:
    starts = torch.arange(NUM_BLOCKS, device=block_ids.device) * BLOCK_SIZE
    return SequenceTable(
        block_ids=block_ids,
        starts=starts,
        caps=torch.full_like(starts, NO_CAP),
        first_valid=torch.zeros_like(starts),
        end_valid=(NUM_TOKENS - starts).clamp(max=BLOCK_SIZE),
        num_sink_entries=0,
    )

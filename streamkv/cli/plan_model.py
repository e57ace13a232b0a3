"""What `streamkv plan` must know of a model: of one on this machine, or of a shape in numbers.

Reads no weights and fetches nothing. The number of weights of a shape is that of a Llama: attention
without biases, a gated MLP, two norms a layer.
"""

from dataclasses import dataclass, field, fields

from streamkv.cli.doctor_model import local_directory, read_config, read_size
from streamkv.errors import InputError, ModelError
from streamkv.gpu_plan import ModelSize
from streamkv.tiers.spec import DTYPE_BYTES, KVSpec

_MOST = 10**7  # of any number of a shape


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that is not loaded.

    Attributes:
        name: as given.
        size: weights and widths.
        spec: layout of its KV.
        trained_length: positions seen in training.
        sliding_windows: none is known of.
    """

    name: str
    size: ModelSize
    spec: KVSpec
    trained_length: int
    sliding_windows: tuple[int | None, ...] = field(default=(), init=False)


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a model like Llama.

    Attributes:
        layers, hidden, heads, kv_heads, mlp, vocab: sizes, `mlp` that of its inner layer.
        head_dim: elements of a head; 0: `hidden / heads`.
        tied: 1: the embedding is the output layer, too.
        trained: positions seen in training.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    head_dim: int = 0
    tied: int = 0
    trained: int = 131_072

    @property
    def num_weights(self) -> int:
        """Elements of all its tensors."""
        head_dim = self.head_dim or self.hidden // self.heads
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * head_dim
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    def planned(self, name: str, dtype: str) -> PlannedModel:
        """The model of this shape, its weights in `dtype`."""
        head_dim = self.head_dim or self.hidden // self.heads
        spec = KVSpec(self.layers, self.kv_heads, head_dim, dtype)
        config = {
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "vocab_size": self.vocab,
        }
        size = ModelSize.of(config, spec, self.num_weights * DTYPE_BYTES[dtype])
        return PlannedModel(name, size, spec, self.trained)


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 1536, 49_152, tied=1, trained=8192),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 14_336, 128_256),
}
"""Shapes that are known by a name; a model of that name on this machine comes first."""


def planned_model(name: str, shape: str | None, dtype: str) -> PlannedModel:
    """The model to plan for.

    Args:
        name: as for an engine, or one of `SHAPES`.
        shape: numbers such as `layers=32,hidden=4096,...`, instead of what is on this machine.
        dtype: of weights and KV.

    Raises:
        InputError: not a shape.
        ModelError: it is not on this machine, or what is there cannot be read.
    """
    if shape is not None:
        return parse_shape(shape).planned(name, dtype)
    directory = local_directory(name)
    if directory is None and name in SHAPES:
        return SHAPES[name].planned(name, dtype)
    if directory is None:
        raise ModelError(
            f"model={name!r}: not on this machine, so that its size is not known. Load it once, "
            f"name a directory, give --shape, or use one of {', '.join(sorted(SHAPES))}."
        )
    remedy = "Check its files, or give --shape."
    try:
        size, spec = read_size(directory, dtype)
        trained_length = read_config(directory)["max_position_embeddings"]
    except KeyError as error:
        raise ModelError(f"model={name!r}: its config states no {error}. {remedy}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"model={name!r}: its size cannot be read ({error}). {remedy}") from error
    return PlannedModel(name, size, spec, trained_length)


def parse_shape(text: str) -> Shape:
    """The shape in numbers such as `layers=32,hidden=4096,heads=32,...`.

    Raises:
        InputError: a name that is unknown or missing, or a number that cannot be.
    """
    known = [each.name for each in fields(Shape)]
    numbers = dict[str, int]()
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in known or name in numbers or not _is_number(number):
            raise _not_a_shape(text, f"{part.strip()!r} is no size of it")
        numbers[name] = int(number)
    missing = [name for name in known[:6] if numbers.get(name, 0) == 0]
    if missing:
        raise _not_a_shape(text, f"without {', '.join(missing)}")
    shape = Shape(**numbers)
    if shape.tied > 1 or shape.trained == 0:
        raise _not_a_shape(text, "tied is 0 or 1, and trained at least 1")
    if shape.heads % shape.kv_heads or (not shape.head_dim and shape.hidden % shape.heads):
        raise _not_a_shape(text, "heads are no multiple of kv_heads, or hidden none of heads")
    return shape


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(_MOST)) and int(text) <= _MOST


def _not_a_shape(text: str, problem: str) -> InputError:
    remedy = (
        "Write layers=32,hidden=4096,heads=32,kv_heads=8,mlp=14336,vocab=128256 with its own "
        "numbers; head_dim=, tied=1 and trained= may follow."
    )
    return InputError("shape", text, problem, remedy)

"""What the tests of all parts share: the real small model, and a tiny random one.

The real model is converted once per machine, into the user's own cache directory. The tiny one is
made from a seed in a few hundred milliseconds, so that an engine test need not load real weights.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamkv.model_cache import cache_root

if not torch.cuda.is_available():
    # Before anything imports triton: its own functions are made for the interpreter, or not.
    os.environ["TRITON_INTERPRET"] = "1"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOKENIZER_TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun.",
    "A window holds the newest tokens; a block holds sixty-four of them; nothing is forgotten.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Grüße aus Köln, naïve café, 東京の朝, привет мир, 🙂 🙃",
]


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The user's cache directory: what is converted there serves every later run."""
    return cache_root()


@pytest.fixture(scope="session")
def model_name() -> str:
    """Name of the real small model."""
    return "smollm2-135m"


@pytest.fixture(scope="session")
def model_dir(model_name: str, cache_dir: Path) -> Path:
    """Directory of the real small model, converted if this machine has not done so yet."""
    from streamkv.model_files import resolve_model

    return resolve_model(model_name)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for this test alone."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("STREAMKV_CACHE", str(directory))
    return directory


@pytest.fixture
def random_model_dir(tmp_path: Path) -> Callable[..., Path]:
    """Saves a small random model: `random_model_dir("mistral", sliding_window=48)`."""

    def save(model_type: str, **settings: Any) -> Path:
        directory = tmp_path / f"{model_type}-{len(list(tmp_path.iterdir()))}"
        save_random_model(directory, model_type, settings)
        return directory

    return save


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a chat template, the same always."""
    directory = tmp_path_factory.mktemp("tiny_model")
    vocab_size = save_tiny_tokenizer(directory)
    save_tiny_llama(directory, vocab_size)
    return directory


@pytest.fixture(scope="session")
def narrow_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the tiny one, with one head: a step takes a tenth of the time in Triton's interpreter."""
    directory = tmp_path_factory.mktemp("narrow_model")
    vocab_size = save_tiny_tokenizer(directory)
    narrow = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    narrow |= {"hidden_size": 32, "initializer_range": 0.4, "tie_word_embeddings": True}
    save_random_model(directory, "llama", {"vocab_size": vocab_size, **narrow})
    return directory


def save_tiny_tokenizer(directory: Path) -> int:
    """Train and save a byte-level BPE tokenizer of about 400 tokens; returns how many it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXTS * 3, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )
    wrapped.save_pretrained(directory)
    return len(wrapped)


SMALL_CONFIG = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_random_model(directory: Path, model_type: str, settings: dict[str, Any]) -> None:
    """Save a model with seeded random weights; `None` takes a setting out of `SMALL_CONFIG`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**SMALL_CONFIG, **settings}
    config = AutoConfig.for_model(
        model_type, **{name: value for name, value in given.items() if value is not None}
    )
    with torch.random.fork_rng():
        torch.manual_seed(21)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)


def save_tiny_llama(directory: Path, vocab_size: int) -> None:
    """Save a random Llama: 2 layers, 6 query and 2 KV heads of 16, trained length 4096."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        # Large enough for attention to be far from uniform and for greedy choices to be clear.
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)

"""Tokenizers of every family that matters, trained here on a few hundred kilobytes of text."""

import json
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from streamkv.tokenizer import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]

WORLD = """\
The river doesn't stop; we're told it'll never stop. "Don't!" she said (twice), he'd've gone.
Die Straße ist naß – „Grüße“ aus Köln. L'été dernier, j'ai vu l'œuvre d'un élève.
今天的天气很好，我们去公园散步吧。你好！世界真大：山、水、人。東京の朝は静かです。カタカナも、ひらがなも。
오늘은 날씨가 좋습니다. 한국어 문장입니다. שלום עולם, מה שלומך? שָׁלוֹם
Привет, мир! Это проверка. नमस्ते दुनिया, यह परीक्षण है। مرحبا بالعالم
🙂 🙃 👩‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301 o\u0308 n\u0303 ¼ ² ﬁ
for (int i=0;i<10;i++){ a[i]=b[i]+1; }\r\n\tif x == 3.14159: return 'ok'  # comment\n\n\n    pass
2024-11-29 12345678 1,000,000.50 http://example.org/a/b?c=d&e=f
"""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Built:
    """A tokenizer under test and the library's own, with special tokens off, to compare with."""

    name: str
    tokenizer: Tokenizer
    library: Backend

    def ids(self, text: str) -> list[int]:
        """What the library makes of the whole text."""
        found: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return found


def training_texts() -> list[str]:
    """Prose, code and many scripts."""
    topics = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    return [*topics[:150_000].splitlines(keepends=True), *WORLD.splitlines(keepends=True) * 8]


def wrap(backend: Backend, **options: Any) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers would load it."""
    copied = Backend.from_str(backend.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=copied, eos_token="</s>", **options)


def build(name: str, backend: Backend) -> Built:
    """Both sides of a comparison."""
    library = Backend.from_str(backend.to_str())
    library.encode_special_tokens = True
    return Built(name, Tokenizer(wrap(backend)), library)


def train(backend: Backend, **options: Any) -> Backend:
    """Train a BPE of about 1500 tokens."""
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=SPECIAL, show_progress=False, **options
    )
    backend.train_from_iterator(training_texts(), trainer)
    return backend


def byte_level(*steps: Any, use_regex: bool = False, normalizer: Any = None) -> Backend:
    """A byte-level BPE behind other pre-tokenisers."""
    backend = Backend(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return train(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def split_on(pattern: str) -> Any:
    """A pre-tokeniser that cuts by a regular expression."""
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def sentencepiece_bpe(scheme: str) -> Backend:
    """A SentencePiece-like BPE with byte fallback; `legacy`: as Llama 2, without pre-tokeniser."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    model = json.loads(train(trained, limit_alphabet=150).to_str())["model"]
    for byte in range(256):
        model["vocab"][f"<0x{byte:02X}>"] = len(model["vocab"])
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Backend(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    if scheme == "legacy":
        replace = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens(SPECIAL)
    return backend


def unigram() -> Backend:
    """A unigram model, in which control tokens are ordinary pieces."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=800, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(training_texts()[:1500], trainer)
    return backend


def dropping() -> Backend:
    """A BPE of characters that loses those it does not know."""
    backend = Backend(models.BPE())
    backend.decoder = decoders.Fuse()
    return train(backend, limit_alphabet=60)


BUILDERS: dict[str, Callable[[], Backend]] = {
    "gpt2": lambda: byte_level(use_regex=True),
    "llama3": lambda: byte_level(split_on(LLAMA3)),
    "o200k": lambda: byte_level(split_on(O200K)),
    "digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "digits from the right": lambda: byte_level(
        split_on(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"), use_regex=True
    ),
    "nfc": lambda: byte_level(use_regex=True, normalizer=normalizers.NFC()),
    "metaspace": lambda: sentencepiece_bpe("first"),
    "legacy": lambda: sentencepiece_bpe("legacy"),
    "superword": lambda: byte_level(split_on(r"[^\n]+|\n")),
    "unigram": unigram,
    "dropping": dropping,
}


@pytest.fixture(scope="session")
def built() -> Callable[[str], Built]:
    """A tokenizer by its family's name, trained once."""
    cache = dict[str, Built]()

    def get(name: str) -> Built:
        if name not in cache:
            cache[name] = build(name, BUILDERS[name]())
        return cache[name]

    return get

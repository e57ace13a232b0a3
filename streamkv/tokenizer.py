"""A model's tokenizer, as streams need it.

Text is always plain: special tokens off, whatever it spells. Special tokens come from the markup
of a rendered turn only. This is the one module besides the model's that imports transformers.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from streamkv.chat import ChatTemplate, Segment
from streamkv.chat_format import Message, Render, find_format
from streamkv.cuts import Cuts, safe_rules, vocabulary_text
from streamkv.detokenizer import IncrementalDecoder, TokenText, decode
from streamkv.errors import ModelError
from streamkv.incremental import IncrementalEncoder
from streamkv.markup import Marker, MarkupSplitter
from streamkv.token_bytes import DecoderKind, Spec, decoder_kind
from streamkv.tokenizer_spec import (
    adds_space,
    adds_space_after_special,
    with_hidden_pieces,
    without_added_space,
)

_log = logging.getLogger(__name__)


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> "Tokenizer":
    """The tokenizer of a model directory.

    Raises:
        ModelError: there is none, or not one of a supported kind.
    """
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    try:
        eos_ids = _configured_eos_ids(directory)
        loaded = load(str(directory), use_fast=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"tokenizer: cannot load it from {directory}: {error}") from error
    if not loaded.is_fast:
        raise ModelError(
            f"tokenizer: {type(loaded).__name__} in {directory} is written in Python. "
            "Use a model that has a tokenizer.json."
        )
    return Tokenizer(loaded, eos_ids)


def _configured_eos_ids(directory: Path) -> set[int]:
    ids = set[int]()
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            value = json.loads(path.read_text("utf-8")).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [value])
    return {token_id for token_id in ids if isinstance(token_id, int)}


class Tokenizer:
    """Text to ids, ids to text, and the turns of a conversation.

    Args:
        loaded: a fast tokenizer of transformers, owned by this object from now on.
        eos_ids: ids that end a reply by the model's configuration.

    Attributes:
        vocab_size: ids are below this (a model may have more rows).
        special_ids: tokens that are not text.
        stop_ids: tokens that end a reply.
        prefix_ids: what a new stream begins with (a BOS token, or nothing).
        chat: the model's turns.
        cuts: where text may be cut without changing its tokens.
        end_marker_id: the token that ends an assistant's turn; `None` if the turns are plain text.

    Raises:
        ModelError: a tokenizer whose decoder is not supported.
    """

    def __init__(self, loaded: Any, eos_ids: Iterable[int] = ()) -> None:
        backend = loaded.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        markers = {i: token for i, token in added.items() if token.content.strip(" \t\r\n▁")}
        self._backend = backend
        self._kind = decoder_kind(_component(backend.decoder))
        self._bytes = dict[int, bytes]()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._text = TokenText(self.token_bytes, self.special_ids, self._kind.leading_space)
        self._splitter = MarkupSplitter(
            Marker(i, token.content, token.lstrip, token.rstrip) for i, token in markers.items()
        )
        self.prefix_ids = _prefix_ids(backend)
        self._first, self._later, self._space_after_special = _text_backends(backend, markers)
        self.cuts = Cuts(safe_rules(self._encode, _vocabulary(backend, self._kind, markers)))
        self.chat = self._find_chat(loaded)
        self.end_marker_id: int | None = backend.token_to_id(self.chat.end_marker)
        stops = {loaded.eos_token_id, self.end_marker_id, *eos_ids}
        self.stop_ids = frozenset(i for i in stops if i is not None)

    def encode(self, text: str, at_start: bool = True) -> list[int]:
        """Ids of a text, special tokens off.

        Args:
            text: any text.
            at_start: the text begins the stream; some tokenizers put a space before it then.

        Raises:
            InputError: not a str, or invalid Unicode.
        """
        encoder = self.encoder(at_start=at_start)
        return encoder.push(text) + encoder.flush()

    def encode_segments(self, segments: Iterable[Segment], at_start: bool = False) -> list[int]:
        """Ids of a rendered turn: special tokens in its markup, plain text in its content.

        Raises:
            InputError: invalid Unicode in a content.
        """
        ids = list[int]()
        for piece in self._splitter.split(segments):
            if isinstance(piece, Marker):
                ids.append(piece.token_id)
            else:
                begins = self._space_after_special if ids else at_start
                ids += self.encode(piece, at_start=begins)
        return ids

    def encoder(self, *, tail: str = "", at_start: bool = True) -> IncrementalEncoder:
        """An encoder of a stream of text, see `IncrementalEncoder`."""
        return IncrementalEncoder(self._encode, self.cuts, tail=tail, at_start=at_start)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of all ids."""
        return decode(self._text, ids, skip_special=skip_special)

    def decoder(
        self, previous: Sequence[int] = (), *, skip_special: bool = True
    ) -> IncrementalDecoder:
        """A decoder of a stream of ids, see `IncrementalDecoder`."""
        return IncrementalDecoder(self._text, previous, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token, maybe part of a character; empty for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            found = self._bytes[token_id] = b"" if token is None else self._kind.bytes_of(token)
        return found

    def _encode(self, text: str, at_start: bool) -> list[int]:
        backend = self._first if at_start else self._later
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def _find_chat(self, loaded: Any) -> ChatTemplate:
        render = _renderer(loaded) if loaded.chat_template else None
        bos = loaded.bos_token or ""
        chat_format = find_format(render, self._splitter.texts, bos)
        for note in chat_format.notes:
            _log.warning("chat: %s", note)
        if chat_format.bos and not self.prefix_ids:
            self.prefix_ids = (loaded.bos_token_id,)
        return ChatTemplate(chat_format, self._splitter.leading_marker(chat_format.close))


def _component(component: Any) -> Spec | None:
    return None if component is None else json.loads(component.__getstate__())


def _prefix_ids(backend: Any) -> tuple[int, ...]:
    encoding = backend.encode("a", add_special_tokens=True)
    mask: list[int] = encoding.special_tokens_mask
    return tuple(encoding.ids[: mask.index(0)] if 0 in mask else ())


def _text_backends(backend: Any, markers: dict[int, Any]) -> tuple[Any, Any, bool]:
    """Tokenizers of plain text: where a stream begins, and elsewhere; and which follows markers."""
    from tokenizers import Tokenizer as Backend

    _turn_off(backend, markers)
    spec = {
        "normalizer": _component(backend.normalizer),
        "pre_tokenizer": _component(backend.pre_tokenizer),
    }
    is_unigram = type(backend.model).__name__ == "Unigram"
    if not is_unigram and not adds_space(spec):
        return backend, backend, False
    spec = json.loads(backend.to_str())
    if is_unigram:
        spec = with_hidden_pieces(spec, {token.content for token in markers.values()})
    backends = [Backend.from_str(json.dumps(s)) for s in (spec, without_added_space(spec))]
    for copied in backends:
        copied.encode_special_tokens = True
    return backends[0], backends[1], adds_space_after_special(spec)


def _turn_off(backend: Any, markers: dict[int, Any]) -> None:
    """Let no marker be found in a text; of added tokens only runs of whitespace stay."""
    from tokenizers import AddedToken

    backend.add_special_tokens(
        [AddedToken(t.content, special=True, normalized=False) for t in markers.values()]
    )
    backend.encode_special_tokens = True


def _vocabulary(backend: Any, kind: DecoderKind, markers: dict[int, Any]) -> str:
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    plain = [token for token, token_id in vocab.items() if token_id not in markers]
    return vocabulary_text(kind.bytes_of(token).decode(errors="replace") for token in plain)


def _renderer(loaded: Any) -> Render:
    from jinja2 import TemplateError

    def render(messages: list[Message], invite: bool) -> str:
        try:
            text: str = loaded.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=invite
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"chat template: {error}") from error
        return text

    return render

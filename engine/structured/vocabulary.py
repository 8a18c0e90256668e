"""A model's vocabulary for grammars: the bytes of each token, and which tokens are control tokens.

Control tokens never match text in a grammar; a grammar names them (``<|im_end|>``). An added token is one if ``tokenizer.json``
marks it as special, or if it is spelled in angle brackets (``<tool_call>``) or with a bar beside a bracket.

llguidance tokenises texts that a grammar forces, such as the keys of an object. Its own tokeniser would make control tokens of
texts that spell them, so it gets a tokeniser whose control tokens have secret spellings.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import msgspec
from llguidance import LLTokenizer

from engine.wire import CONTROL_TOKEN, GrammarVocabulary


class VocabularyError(ValueError):
    """The tokeniser cannot be used for grammars."""


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, and what another process needs to compile grammars for it (:func:`without_tokenizer`)."""

    tokenizer: LLTokenizer
    tokens: list[bytes]
    controls: list[int]
    eos_token_ids: Sequence[int]


def load_vocabulary(tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Read the vocabulary of a model with ``vocab_size`` rows in its head; rows without a token (padding) are never allowed.

    eos_token_ids: at least one. Raises :class:`VocabularyError`.
    """
    try:
        document = msgspec.json.decode(tokenizer_json)
        controls = {token["id"]: token["content"] for token in document.get("added_tokens") or [] if _is_control(token)}
        plain = LLTokenizer(_with_secret_controls(document, controls))
        size = min(plain.vocab_size, vocab_size)
        tokens = [controls[id].encode() if id in controls else plain.decode_bytes([id]) for id in range(size)]
        tokens += [b""] * (vocab_size - size)
        known = [id for id in controls if id < vocab_size]
        vocabulary = GrammarVocabulary(tokens, known, eos_token_ids[0], plain.tokenize_bytes)
        tokenizer = LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=list(eos_token_ids))
        return Vocabulary(tokenizer, tokens, known, eos_token_ids)
    except BaseException as error:  # the library raises ValueError, and its panics are no Exception
        raise VocabularyError(f"tokenizer.json cannot be used for grammars: {str(error).partition(chr(10))[0]}") from error


def without_tokenizer(tokens: list[bytes], controls: list[int], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return a vocabulary that compiles grammars, and takes the longest token first instead of tokenising as the model does. A
    process with 151,643 tokens takes 78 MiB, and 187 MiB with the tokeniser."""
    made: list[LLTokenizer] = []

    def encode(text: bytes) -> list[int]:
        return made[0].greedy_tokenize(text.decode(errors="replace")) if made else []

    wrapper = llguidance.TokenizerWrapper(GrammarVocabulary(tokens, controls, eos_token_ids[0], encode))
    made.append(LLTokenizer(wrapper, eos_token=list(eos_token_ids)))
    return made[0]


def _is_control(token: dict[str, Any]) -> bool:
    return bool(token["special"]) or CONTROL_TOKEN.fullmatch(token["content"]) is not None


def _with_secret_controls(document: dict[str, Any], controls: dict[int, str]) -> str:
    """Return ``tokenizer.json`` with other spellings of the control tokens, which no text contains."""
    secret = secrets.token_hex(16)
    added = [
        token | {"content": f"\ue000{secret}{token['id']}\ue001", "special": True} if token["id"] in controls else token
        for token in document.get("added_tokens") or []
    ]
    return msgspec.json.encode(document | {"added_tokens": added}).decode()

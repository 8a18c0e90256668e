"""Token ids in, new text out, as a stream."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gateway.text.vocabulary import Vocabulary

_UNFINISHED = 3
"""Bytes of the longest incomplete UTF-8 character."""


class Detokenizer:
    """Turns the tokens of one sequence into text, never splitting a character and never telling a part of one as U+FFFD.

    What ``push`` and ``finish`` return, joined, is what the tokens add to the text of the prompt: with an empty prompt it equals
    ``tokenizer.decode`` of them all, and after a prompt a SentencePiece-style tokeniser's space before the first word is kept.
    A character that the prompt began is told whole. State is at most an incomplete character, so each token costs the same.
    """

    def __init__(self, tokenizer: Vocabulary, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        context = self._last_bytes(prompt_ids)
        self._utf8.decode(context)
        self._strip_space = tokenizer.strips_leading_space and not context

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; "" while a character is unfinished."""
        return self._decode(b"".join(self._tokenizer.pieces(ids, skip_special_tokens=self._skip_special_tokens)), final=False)

    def finish(self) -> str:
        """What is left: U+FFFD where the last character was never finished, else ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's end to know how its last character goes on."""
        context = b""
        for piece in self._tokenizer.pieces(reversed(prompt_ids), skip_special_tokens=self._skip_special_tokens):
            context = piece + context
            if len(context) >= _UNFINISHED:
                break
        return context

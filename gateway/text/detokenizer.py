"""Converts a stream of token ids to text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gateway.text.vocabulary import Vocabulary

_UNFINISHED = 3
"""Length of the longest incomplete UTF-8 character, in bytes."""
_LOOK_BACK = 64
"""Tokens at the prompt's end that may hold an incomplete character: more than 3, as special tokens add no bytes."""


class Detokenizer:
    """Converts the tokens of one sequence to text. It never splits a character or returns a part of one as U+FFFD.

    The joined results of ``push`` and ``finish`` are the text that the tokens add to the prompt. With an empty prompt they equal
    ``tokenizer.decode`` of all tokens; after a prompt, the space that a SentencePiece-style tokeniser has before the first word is
    kept. A character that began in the prompt is returned whole. The state is at most one incomplete character, so each token
    costs the same.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Sequence[int] = (),
    ) -> None:
        """``shown``: special tokens that are not skipped."""
        self._spelling = tokenizer.spellings(skip_special_tokens=skip_special_tokens, shown=shown).__getitem__
        context = self._last_bytes(prompt_ids)
        _, used = codecs.utf_8_decode(context, "replace", False)
        self._unfinished = context[used:]
        """The bytes of an incomplete character."""
        self._strip_space = tokenizer.strips_leading_space and not context
        self.clean = not (self._unfinished or self._strip_space)
        """Whether the next token's text depends on its bytes alone."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that ``ids`` complete; "" while a character is incomplete."""
        data = b"".join(map(self._spelling, ids))
        if not self.clean:
            return self._decode(data, final=False)
        text, used = codecs.utf_8_decode(data, "replace", False)
        if used < len(data):
            self._unfinished, self.clean = data[used:], False
        return text

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        if self._unfinished:
            data = self._unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[used:]
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        self.clean = not (self._unfinished or self._strip_space)
        return text

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Return enough bytes of the prompt's end to complete its last character."""
        context = b""
        for piece in map(self._spelling, reversed(prompt_ids[-_LOOK_BACK:])):
            context = piece + context
            if len(context) >= _UNFINISHED:
                break
        return context

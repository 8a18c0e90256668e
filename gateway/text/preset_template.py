"""A preset's template, fitted to a tokeniser: builds the exact token ids of its prompts.

The pieces of a template are tokenised by themselves. Inside a piece, control tokens of the template become their ids and divide
its text; texts of the request are plain text, also where they spell control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yardstick_llm.gateway.presets.preset import Fitted, Preset, PresetError, fill, placeholders
from yardstick_llm.gateway.text.prepared import UNBOUND, Bounds, TooManyTokens
from yardstick_llm.gateway.text.prompts import ItemsAndSuffix, PrefixAndBranches, PromptTooLongError, common_suffix, tokenise_pairs
from yardstick_llm.gateway.text.tokenizer import UNBOUNDED, Tokenizer

Part = int | str
"""A control token's id, or text with placeholders."""

_SAMPLE = {"instruction": "Find it.", "query": "What is a cat?", "document": "A cat is an animal."}


@dataclass(frozen=True, slots=True)
class _Variant:
    """A list of pieces, divided at the text that holds the document."""

    before: list[list[Part]]
    """Pieces, and the last one's beginning, in front of that text."""
    left: str
    right: str
    """The text around ``{document}``."""
    after: list[list[Part]]


class PresetTemplate:
    """The template of one preset. It is not safe to use from several threads, like the tokeniser."""

    def __init__(self, preset: Preset, tokenizer: Tokenizer) -> None:
        """Raises :class:`PresetError` if the preset does not fit the tokeniser."""
        self.preset = preset
        self._tokenizer = tokenizer
        self._begin, self._end = tokenizer.affixes if preset.add_special_tokens else ([], [])
        self._plain = self._variant(preset.template) if preset.template else None
        self._instructed = self._variant(preset.instructed) if preset.instructed else self._plain
        written = preset.categories.prefix.removeprefix(preset.label_prefix) if preset.categories else ""
        prefix = tokenizer.encode(written, add_special_tokens=False)
        labels = [self._group((group,) if isinstance(group, str) else group) for group in preset.labels]
        categories = [self._group((token,))[0] for token in preset.categories.names] if preset.categories else []
        self.fitted = Fitted(preset, labels, categories, prefix)

    def prompts(
        self,
        documents: Sequence[str],
        *,
        query: str = "",
        instruction: str = "",
        instructed: bool = False,
        limit: int = UNBOUNDED,
        bounds: Bounds = UNBOUND,
        param: str = "documents",
    ) -> PrefixAndBranches:
        """Return the tokens of the prompts of one query with each document: what all share, and the rest of each.

        ``instructed`` chooses the second variant of the template. ``param`` is the field of the request that holds the documents.
        Raises what :func:`tokenise_pairs` raises, and :class:`TooManyTokens` if ``limit`` leaves no room for a document.
        """
        variant = self._instructed if instructed else self._plain
        assert variant is not None, "the preset uses the chat template"
        values = {"query": query, "instruction": instruction}
        before = [*self._begin, *self._encode(variant.before, values, limit)]
        after = [*self._encode(variant.after, values, limit), *self._end]
        room = limit - len(before) - len(after)
        if room < 0:
            raise TooManyTokens(limit - room, exact=True)
        left, right = fill(variant.left, values), fill(variant.right, values)
        if not left:
            rows = self._rows([document + right for document in documents], room, bounds, param)
            return before, [[*row, *after] for row in rows]
        prefix, branches = tokenise_pairs(
            self._tokenizer,
            left,
            [document + right for document in documents],
            limit=room,
            bounds=bounds,
            param=param,
            add_special_tokens=False,
            parse_special_tokens=False,
        )
        return [*before, *prefix], [[*branch, *after] for branch in branches]

    def is_apart(self, *, instructed: bool) -> bool:
        """Whether documents are tokenised by themselves."""
        variant = self._instructed if instructed else self._plain
        return variant is not None and not variant.left and not variant.right

    def items_first(self, rows: Sequence[Sequence[int]], query: str, instruction: str, *, instructed: bool) -> ItemsAndSuffix:
        """Divide the whole prompts of :meth:`prompts` for other documents and the same texts: the beginning of each, and the tokens
        that all end with, which are at most those behind the document."""
        variant = self._instructed if instructed else self._plain
        assert variant is not None, "the preset uses the chat template"
        behind: list[list[Part]] = [[variant.right], *variant.after]
        most = len(self._encode(behind, {"query": query, "instruction": instruction})) + len(self._end)
        shared = common_suffix(rows, most)
        return [[*row[: len(row) - shared]] for row in rows], [*rows[0][len(rows[0]) - shared :]]

    def _rows(self, texts: list[str], limit: int, bounds: Bounds, param: str) -> list[list[int]]:
        """Tokenise each text by itself."""
        rows: list[list[int]] = []
        tokens = 0
        for index, text in enumerate(texts):
            try:
                rows.append(self._tokenizer.encode(text, limit=limit, add_special_tokens=False, parse_special_tokens=False))
            except TooManyTokens as error:
                raise PromptTooLongError(index, error) from None
            tokens += len(rows[-1])
            bounds.check("max_request_tokens", tokens, "tokens or more", param)
        return rows

    def _variant(self, pieces: Sequence[str]) -> _Variant:
        divided = [self._divide(piece) for piece in pieces]
        at = next(index for index, piece in enumerate(pieces) if "document" in placeholders(piece) or index == len(pieces) - 1)
        inner = next(
            (index for index, part in enumerate(divided[at]) if isinstance(part, str) and "document" in placeholders(part)),
            len(divided[at]) - 1,
        )
        text = divided[at][inner]
        assert isinstance(text, str)
        left, _, right = text.partition("{document}")
        self._check(pieces, divided)
        return _Variant([*divided[:at], divided[at][:inner]], left, right, [divided[at][inner + 1 :], *divided[at + 1 :]])

    def _divide(self, piece: str) -> list[Part]:
        """Divide a piece at its control tokens."""
        parts = self._tokenizer.controls.divide(piece)
        for part in parts:
            if isinstance(part, int) and self._tokenizer.controls.strips(part):
                raise PresetError("a control token of `template` absorbs whitespace, which is not supported")
        return parts

    def _check(self, pieces: Sequence[str], divided: list[list[Part]]) -> None:
        """Check that the parts' tokens are those of each whole piece, and that the control tokens are known."""
        for piece, parts in zip(pieces, divided, strict=True):
            whole = self._tokenizer.encode(fill(piece, _SAMPLE), add_special_tokens=False)
            if whole != self._encode([parts], _SAMPLE):
                raise PresetError("the tokeniser does not keep control tokens apart from text, so the template cannot be exact")
            unknown = self._tokenizer.controls.looks_like_control("".join(part for part in parts if isinstance(part, str)))
            if unknown is not None:
                raise PresetError(f"the tokeniser has no token {unknown!r}, which `template` contains")

    def _encode(self, pieces: list[list[Part]], values: dict[str, str], limit: int = UNBOUNDED) -> list[int]:
        """Return the ids of whole pieces. Raises :class:`TooManyTokens`."""
        ids: list[int] = []
        for piece in pieces:
            for part in piece:
                if isinstance(part, int):
                    ids.append(part)
                elif text := fill(part, values):
                    room = max(0, limit - len(ids))
                    ids += self._tokenizer.encode(text, limit=room, add_special_tokens=False, parse_special_tokens=False)
        return ids

    def _group(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of a label. Of several spellings, those that are one token count."""
        found = [ids[0] for text in texts if len(ids := self._tokenizer.encode(text, add_special_tokens=False)) == 1]
        if not found:
            raise PresetError(f"the label {texts[0]!r} is not one token of this model")
        return list(dict.fromkeys(found))

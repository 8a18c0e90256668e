"""A preset's template, fitted to a tokeniser: builds the exact token ids of its prompts.

The pieces of a template are tokenised by themselves. Inside a piece, control tokens of the template become their ids and divide
its text; texts of the request are plain text, also where they spell control tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec.structs import replace as replace_struct

from yardstick_llm.engine import wire
from yardstick_llm.gateway.presets.preset import Fitted, PairTruncation, Preset, PresetError, fill, placeholders
from yardstick_llm.gateway.text.prepared import UNBOUND, Bounds, TooManyTokens
from yardstick_llm.gateway.text.prompts import ItemsAndSuffix, PrefixAndBranches, PromptTooLongError, common_suffix, tokenise_pairs
from yardstick_llm.gateway.text.tokenizer import UNBOUNDED, Tokenizer

Part = int | str
"""A control token's id, or text with placeholders."""

_SAMPLE = {"instruction": "Find it.", "query": "What is a cat?", "document": "A cat is an animal."}


@dataclass(frozen=True, slots=True)
class _Variant:
    """A list of pieces, divided at the text that holds the document, and the special tokens around them."""

    before: list[list[Part]]
    """Pieces, and the last one's beginning, in front of that text."""
    left: str
    right: str
    """The text around ``{document}``."""
    after: list[list[Part]]


class Limits(NamedTuple):
    """How much of the texts of an encoder's prompt is kept."""

    prompt: int
    """Most tokens of a prompt."""
    side: str
    """Which end of a text is cut: right, left or middle."""
    query: int | None = None
    """Most tokens of the query."""
    document: int | None = None


class Whole(NamedTuple):
    """The prompt of one document for an encoder."""

    first: list[int]
    """Tokens of the query with the special tokens around it; empty without a query."""
    second: list[int]
    query_cut: bool
    document_cut: bool


class PresetTemplate:
    """The template of one preset. It is not safe to use from several threads, like the tokeniser."""

    def __init__(self, preset: Preset, tokenizer: Tokenizer) -> None:
        """Raises :class:`PresetError` if the preset does not fit the tokeniser."""
        self.preset = preset
        self._tokenizer = tokenizer
        self._affixes = tokenizer.affixes if preset.add_special_tokens else ([], [])
        self._plain = self._variant(preset.template) if preset.template else None
        self._instructed = self._variant(preset.instructed) if preset.instructed else self._plain
        self._pair: _Variant | None = None
        self._before_query = ""
        """Text of the preset before the first text of a pair."""
        self.typed = False
        """Whether the document of a pair has a token type of its own."""
        if preset.is_pair:
            begin, between, end, self.typed = tokenizer.pair_affixes
            self._before_query = preset.template[0].removesuffix("{query}").removesuffix("{document}")
            self._pair = _Variant([list[Part](begin), ["{query}"], list[Part](between)], "", "", [list[Part](end)])
            alone = self._before_query + "{document}" if preset.task == "classify" else "{document}"
            self._plain = self._instructed = self._variant((alone,))
        self._prompts = {text: self._variant(self._with_prompt(text)) for text in preset.prompts.values()}
        self._late = self._late_tokens() if preset.late_interaction else None
        written = preset.categories.prefix.removeprefix(preset.label_prefix) if preset.categories else ""
        prefix = tokenizer.encode(written, add_special_tokens=False)
        labels = [self._group(group if isinstance(group, tuple) else (group,)) for group in preset.labels]
        categories = [self._group((token,))[0] for token in preset.categories.names] if preset.categories else []
        words = preset.late_interaction.skiplist_words if preset.late_interaction else ()
        skipped = [id for word in words if (id := tokenizer.id_of(word)) is not None]
        unseen = preset.late_interaction is not None and not preset.late_interaction.attend_to_expansion_tokens
        expansion = self._late[2] if self._late and unseen else None
        spelled = [tokenizer.spelled([label])[0] if isinstance(label, int) else label for label in preset.labels]
        named = replace_struct(preset, labels=tuple(spelled))
        self.fitted = Fitted(named, labels, categories, prefix, skipped, expansion)

    def prompts(
        self,
        documents: Sequence[str],
        *,
        query: str | None = "",
        instruction: str = "",
        instructed: bool = False,
        prompt: str | None = None,
        limit: int = UNBOUNDED,
        bounds: Bounds = UNBOUND,
        param: str = "documents",
    ) -> PrefixAndBranches:
        """Return the tokens of the prompts of one query with each document: what all share, and the rest of each.

        ``instructed`` chooses the second variant of the template, and ``prompt`` is put before the document. ``param`` is the field
        of the request that holds the documents. Raises what :func:`tokenise_pairs` raises, and :class:`TooManyTokens` if ``limit``
        leaves no room for a document.
        """
        variant = self._chosen(query, prompt, instructed=instructed)
        values = {"query": self._before_query + (query or ""), "instruction": instruction}
        before = self._encode(variant.before, values, limit)
        after = self._encode(variant.after, values, limit)
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

    @property
    def is_whole(self) -> bool:
        """Whether :meth:`wholes` can be used: each prompt ends with its document."""
        plain, fields = self._plain, placeholders("".join((*self.preset.template, *self.preset.instructed)))
        ends = plain is not None and not plain.right and len(plain.after) == 1
        return ends and (self._pair is not None or fields == {"document"})

    def wholes(
        self, documents: Sequence[str], limits: Limits, *, query: str | None, prompt: str | None, as_query: bool
    ) -> Iterator[Whole]:
        """Yield the prompt of each document for an encoder, cut as transformers cuts it: the tokens of a text, and of a pair those
        that the preset's ``pair_truncation`` names."""
        variant = self._chosen(query, prompt, instructed=False)
        before, after = self._encode(variant.before, {"query": ""}), self._encode(variant.after, {})
        encode, late = self._tokenizer.encode_ends, self.preset.late_interaction
        length = limits.prompt if late is None else min(limits.prompt, late.query_length if as_query else late.document_length)
        room = max(0, length - len(before) - len(after) - bool(self._late and self._late[as_query] is not None))
        text = self._before_query + (query or "")
        asked, query_cut = encode(text, min(room, limits.query or room), limits.side) if text else ([], False)
        begin, between = (before, []) if self._pair is not variant else self._tokenizer.pair_affixes[:2]
        for document in documents:
            ids, cut = encode(variant.left + document, min(room, limits.document or room), limits.side)
            if self._pair is variant:
                kept = pair_lengths(len(asked), len(ids), room, self.preset.pair_truncation)
                first = [*begin, *_kept(asked, kept[0], limits.side), *between]
                second = [*_kept(ids, kept[1], limits.side), *after]
                yield Whole(first, second, query_cut or kept[0] < len(asked), cut or kept[1] < len(ids))
                continue
            row = [*begin, *ids, *after]
            if late is not None and self._late is not None:
                *prefixes, expansion = self._late
                inserted = prefixes[as_query]
                row[1:1] = [] if inserted is None else [inserted]
                if as_query and expansion is not None:
                    row += [expansion] * (length - len(row))
            yield Whole([], row, False, cut)

    def prompt_tokens(self, prompt: str | None) -> int:
        """Return the number of tokens at the beginning that the mean of a text's vectors leaves out, counted like those of
        sentence-transformers."""
        if self.preset.include_prompt or not prompt:
            return 0
        return len(self._affixes[0]) + len(self._tokenizer.encode(prompt.strip(), add_special_tokens=False))

    def is_apart(self, *, query: str | None = "", prompt: str | None = None, instructed: bool) -> bool:
        """Whether documents are tokenised by themselves."""
        variant = self._chosen(query, prompt, instructed=instructed)
        return not variant.left and not variant.right

    def items_first(self, rows: Sequence[Sequence[int]], query: str, instruction: str, *, instructed: bool) -> ItemsAndSuffix:
        """Divide the whole prompts of :meth:`prompts` for other documents and the same texts: the beginning of each, and the tokens
        that all end with, which are at most those behind the document."""
        variant = self._chosen(query, None, instructed=instructed)
        behind: list[list[Part]] = [[variant.right], *variant.after]
        most = len(self._encode(behind, {"query": query, "instruction": instruction}))
        shared = common_suffix(rows, most)
        return [[*row[: len(row) - shared]] for row in rows], [*rows[0][len(rows[0]) - shared :]]

    def _chosen(self, query: str | None, prompt: str | None, *, instructed: bool) -> _Variant:
        if self._pair is not None and query is not None:
            return self._pair
        variant = self._instructed if instructed else self._plain
        assert variant is not None, "the preset uses the chat template"
        if prompt is None:
            return variant
        assert self._plain is not None
        # a text of the request is plain text, and one of the preset may have control tokens
        return self._prompts.get(prompt) or replace(self._plain, left=prompt.lower() if self.preset.lowercase else prompt)

    def _with_prompt(self, text: str) -> list[str]:
        """Return the template's pieces with ``text`` before the document."""
        text = text.lower() if self.preset.lowercase else text
        return [piece.replace("{document}", text + "{document}") for piece in self.preset.template]

    def _late_tokens(self) -> tuple[int | None, int | None, int | None]:
        """Return the tokens that mark documents and queries, and the one that fills up queries."""
        late = self.preset.late_interaction
        assert late is not None
        found = [self._tokenizer.id_of(text) for text in (late.document_prefix, late.query_prefix)]
        for text, id in zip((late.document_prefix, late.query_prefix), found, strict=True):
            if text and id is None:
                raise PresetError(f"the tokeniser has no token {text!r}, which `late_interaction` names")
        expansion = next((id for text in late.expansion if (id := self._tokenizer.id_of(text)) is not None), None)
        if not late.do_query_expansion:
            return found[0], found[1], None
        if expansion is None:
            raise PresetError(f"the tokeniser has none of the tokens {', '.join(late.expansion)}, with which queries are filled up")
        return found[0], found[1], expansion

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
        begin, end = map(list[Part], self._affixes)
        if pieces[0].startswith(wire.TASK_TOKEN.partition("{")[0]):
            begin = begin[1:]  # the token of a task stands for the first one
        behind = [parts for parts in (divided[at][inner + 1 :], *divided[at + 1 :]) if parts]
        return _Variant([begin, *divided[:at], divided[at][:inner]], left, right, [*behind, end])

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

    def _group(self, texts: Sequence[str | int]) -> list[int]:
        """Return the ids of a label. Of several spellings, those that are one token count."""
        ids = [[text] if isinstance(text, int) else self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        found = [each[0] for each in ids if len(each) == 1 and self._tokenizer.spelled(each) != [""]]
        if not found:
            raise PresetError(f"the label {texts[0]!r} is not one token of this model")
        return list(dict.fromkeys(found))


def pair_lengths(first: int, second: int, most: int, truncation: PairTruncation) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, as the tokenizers library's ``truncate_encodings``
    (https://github.com/huggingface/tokenizers). With ``longest_first``, the longer one is cut; if both have more than half, each
    keeps half, and of an odd number the longer one more, or the second one if each has more than ``most``. The others cut one
    text; where the library fails because the other one alone is too long, that one is cut and nothing else is left."""
    first, second = min(first, most), min(second, most)
    if truncation != "longest_first":
        return (first, min(second, most - first)) if truncation == "only_second" else (min(first, most - second), second)
    if first + second <= most:
        return first, second
    short, long = sorted((first, second))
    long = max(short, most - short)
    if short + long > most:
        short, long = most // 2, most - most // 2
    return (long, short) if first > second else (short, long)


def _kept(ids: list[int], most: int, side: str) -> list[int]:
    """Return ``most`` of a text's tokens."""
    if side == "left":
        return ids[len(ids) - most :]
    tail = most // 2 if side == "middle" and most < len(ids) else 0
    return [*ids[: most - tail], *ids[len(ids) - tail :]]

"""Builds the prompts of a preset: one query with many documents, or texts without a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, cast

import msgspec

from yardstick_llm.gateway.errors import ContextExceeded, InvalidRequest
from yardstick_llm.gateway.presets.preset import Task
from yardstick_llm.gateway.requests import chat
from yardstick_llm.gateway.requests.endpoint import Model
from yardstick_llm.gateway.schemas.chat import ChatMessage
from yardstick_llm.gateway.schemas.common import Truncation
from yardstick_llm.gateway.text.prepared import Prepared, Refusal, TooManyTokens
from yardstick_llm.gateway.text.preset_template import Limits, PresetTemplate
from yardstick_llm.gateway.text.prompts import EmptyPromptError, PrefixAndBranches, PromptTooLongError, share_prefix

CUTS_OF_EACH = ("max_tokens_per_query", "max_tokens_per_doc")
SEAM_TOKENS = 4
"""Tokens by which a document is cut shorter than the room it has, because its tokens next to a template's text may differ."""


@dataclass(slots=True)
class Pairs:
    """The texts of one request, and how they are to be cut."""

    model: Model
    preset: PresetTemplate
    cuts: Truncation
    param: str
    """Field of the request that holds the documents."""
    query: str | None = None
    instruction: str | None = None
    as_query: bool = False
    """With the task ``embed``: the texts are queries."""
    prompt: str | None = None
    """With the task ``embed``: text before each document."""
    query_param: str = "query"
    """Field of the request that holds the query."""
    first: int = 0
    """Index of the first document in the request, for error messages."""
    partial: bool = False
    """Whether a document that is too long is left out, instead of refusing the request."""
    _truncated: list[int] = field(default_factory=list)
    _refused: list[Refusal] = field(default_factory=list)
    _room: int | None = None
    """See :meth:`_document_room`; None before it is known."""

    def prepared(self, documents: Sequence[str], *, texts: bool = False) -> Prepared:
        """Return the prompts, and with ``texts`` the documents. Raises :class:`InvalidRequest`."""
        if self.instruction and not self.preset.preset.takes_instruction:
            name = self.preset.preset.name
            raise InvalidRequest(f"The prompt of the preset {name!r} has no place for an instruction.", param="instruction")
        given = documents
        if self.preset.preset.lowercase:
            documents = [document.lower() for document in documents]
            self.query = self.query and self.query.lower()
        bounds = self.model.bounds
        numbers = len(documents) * max(1, sum(map(len, self.preset.fitted.labels)))
        bounds.check("max_scores", numbers, "numbers (documents and labels)", self.param)
        bounds.check("max_request_characters", self._characters(documents), "characters that must be tokenised", self.param)
        if self.model.facts.encoder and self.preset.is_whole:
            return self._whole(documents, given if texts else None)
        query_truncated = self._cut_query()
        kept = self._cut([*documents])
        if self.partial:
            kept = self._fitting(kept)
        prefix, rows = self._build(kept) if kept else ([], [])
        first = self.preset.preset.item_first and self.query is not None and len(rows) > 0
        bounds.check("max_request_tokens", len(prefix) * (len(rows) if first else 1) + sum(map(len, rows)), "tokens", self.param)
        suffix: list[int] = []
        if first:
            whole = [[*prefix, *row] for row in rows]
            rows, suffix = self.preset.items_first(whole, self.query or "", self._instruction, instructed=self._instructed)
            prefix = []
        return Prepared(
            rows,
            prefix,
            suffix,
            texts=[*given] if texts else None,
            param=f"{self.param}[]",
            truncated=self._truncated,
            query_truncated=query_truncated,
            refused=self._refused,
        )

    def _whole(self, documents: Sequence[str], given: Sequence[str] | None) -> Prepared:
        """Return the prompts of an encoder. Texts are cut unless the request forbids it, as the models' own library cuts them."""
        context, asked = self.model.facts.context, self.cuts.truncate_prompt_tokens
        most = context if asked in (None, -1) else min(context, asked or 0)
        query, document = (getattr(self.cuts, name) or getattr(self.preset.preset, name) for name in CUTS_OF_EACH)
        limits = Limits(most, self.cuts.side, query, document)
        whole = self.preset.wholes(documents, limits, query=self.query, prompt=self.prompt, as_query=self.as_query)
        firsts: list[list[int]] = []
        rows: list[list[int]] = []
        tokens, query_truncated, bounds = 0, False, self.model.bounds
        may_cut = self.cuts.may_cut is not False or any((asked, query, document))
        for index, (first, second, query_cut, cut) in enumerate(whole):
            if (query_cut or cut) and not may_cut:
                error = self._too_long(TooManyTokens(most, exact=False), index)
                if not self.partial:
                    raise error
                self._refused.append(Refusal(index, error.message, error.code))
                continue
            if len(first) + len(second) > most:
                raise InvalidRequest(
                    f"A prompt of {most} tokens has no room for the special tokens.", param="truncate_prompt_tokens"
                )
            self._truncated += [index] if cut else []
            query_truncated = query_truncated or query_cut
            firsts.append(first)
            rows.append(second)
            tokens += len(first) + len(second)
            bounds.check("max_request_tokens", tokens, "tokens or more", self.param)
        prepared = Prepared(
            rows,
            texts=None if given is None else [*given],
            param=f"{self.param}[]",
            truncated=self._truncated,
            query_truncated=query_truncated,
            refused=self._refused,
            prompt_tokens=self.preset.prompt_tokens(self.prompt),
        )
        if self.preset.typed and firsts and all(first == firsts[0] for first in firsts):
            prepared.prefix = firsts[0]
            return prepared
        # without token types, a pair is a text as any other
        prepared.seams = [*map(len, firsts)] if self.preset.typed else []
        prepared.rows = [[*first, *second] for first, second in zip(firsts, rows, strict=True)]
        return prepared

    def _characters(self, documents: Sequence[str]) -> int:
        """Return the number of characters to tokenise. A chat template repeats the query for each document."""
        repeats = 1 if self.preset.preset.template else len(documents)
        return sum(map(len, documents)) + (len(self.query or "") + len(self.instruction or "")) * repeats

    def _cut_query(self) -> bool:
        """Cut the query where the request or the preset allows it; return whether it was cut."""
        most = self.cuts.max_tokens_per_query or self.preset.preset.max_tokens_per_query
        if most is None or self.query is None:
            return False
        self.query, cut = self._shortened(self.query, most)
        return cut

    def _cut(self, documents: list[str]) -> list[str]:
        """Return the documents, cut where the request or the preset allows it."""
        most = self._most_tokens()
        if most is None:
            return documents
        for index, document in enumerate(documents):
            documents[index], cut = self._shortened(document, most)
            if cut:
                self._truncated.append(index)
        return documents

    def _shortened(self, text: str, most: int) -> tuple[str, bool]:
        """Return ``text`` cut to ``most`` tokens where the request says, and whether it was cut. A text with images is not cut."""
        if any(mark in text for mark in self.model.texts.tokenizer.image_marks):
            return text, False
        side = self.cuts.side
        if side == "middle":
            return self.model.texts.tokenizer.cut_middle(text, most)
        return self.model.texts.tokenizer.shorten(text, most, left=side == "left")

    def _most_tokens(self) -> int | None:
        """Return the most tokens of a document; None if documents must not be cut."""
        rooms = [self.cuts.max_tokens_per_doc or self.preset.preset.max_tokens_per_doc]
        whole, context = self.cuts.truncate_prompt_tokens, self.model.facts.context
        cuts_itself = self.model.facts.encoder or self.preset.preset.max_length is not None
        if whole is not None or (cuts_itself if self.cuts.may_cut is None else self.cuts.may_cut):
            room = self._document_room()
            if room < 1:
                raise self.model.facts.too_long(TooManyTokens(context, exact=False), self._frame_param)
            most = context if whole in (None, -1) else min(context, whole or 0)
            if room <= context - most:
                raise InvalidRequest(
                    f"`truncate_prompt_tokens` is {most}, and a prompt has {context - room} tokens without its document.",
                    param="truncate_prompt_tokens",
                )
            rooms.append(room - (context - most))
        return min((room for room in rooms if room is not None), default=None)

    def _fitting(self, documents: list[str]) -> list[str]:
        """Return the documents that fit into the context, and note the others."""
        room = self._document_room()
        fitting = []
        for index, document in enumerate(documents):
            if self.model.texts.tokenizer.shorten(document, room)[1]:
                error = self._too_long(TooManyTokens(self.model.facts.context, exact=False), index)
                self._refused.append(Refusal(index, error.message, error.code))
            else:
                fitting.append(document)
        return fitting

    def _document_room(self) -> int:
        """Return the most tokens of a document whose prompt fits into the context. Raises :class:`ContextExceeded` that names the
        query if nothing fits beside it."""
        if self._room is None:
            try:
                prefix, (row,) = self._tokens(["a"])
            except (PromptTooLongError, TooManyTokens) as error:
                tokens = error.tokens if isinstance(error, PromptTooLongError) else error
                raise self.model.facts.too_long(tokens, self._frame_param) from None
            apart = bool(self.preset.preset.template) and self.preset.is_apart(
                query=self.query, prompt=self.prompt, instructed=self._instructed
            )
            self._room = max(0, self.model.facts.context - (len(prefix) + len(row) - 1) - (0 if apart else SEAM_TOKENS))
        return self._room

    def _build(self, documents: list[str]) -> PrefixAndBranches:
        """Return the prompts' tokens. Raises :class:`InvalidRequest`."""
        try:
            return self._tokens(documents)
        except TooManyTokens as error:
            raise self.model.facts.too_long(error, self._frame_param) from None
        except PromptTooLongError as error:
            raise self._too_long(error.tokens, self._place(error.index)) from None
        except EmptyPromptError as error:
            empty = f"{self.param}[{self.first + self._place(error.index)}]"
            raise InvalidRequest(f"`{empty}` is empty; there is no token to read.", param=empty) from None

    def _tokens(self, documents: Sequence[str]) -> PrefixAndBranches:
        """Return the prompts' tokens. Raises what :meth:`PresetTemplate.prompts` raises."""
        preset = self.preset.preset
        if not preset.template:
            return self._by_chat_template(documents)
        prefix, rows = self.preset.prompts(
            documents,
            query=self.query,
            instruction=self._instruction,
            instructed=self._instructed,
            prompt=self.prompt,
            limit=self.model.facts.context,
            bounds=self.model.bounds,
            param=self.param,
        )
        if self.model.facts.encoder:
            return [], [[*prefix, *row] for row in rows]
        return (prefix, rows) if prefix else share_prefix([[*row] for row in rows])

    @property
    def _instruction(self) -> str:
        return self.preset.preset.instruction if self.instruction is None else self.instruction

    @property
    def _instructed(self) -> bool:
        """Whether the second variant of the template is used."""
        return self.as_query or (self.preset.preset.task != "embed" and bool(self.instruction))

    def _by_chat_template(self, documents: Sequence[str]) -> PrefixAndBranches:
        """Render the model's own chat template for each document."""
        preset, tokenizer = self.preset.preset, self.model.texts.tokenizer
        if preset.roles[0]:  # which the templates of few models know
            chat.expect_roles(self.model, preset.roles[1:], preset.chat_template_kwargs)
        rows: list[list[int]] = []
        tokens = 0
        for index, document in enumerate(documents):
            texts = [document] if self.query is None else [self.query, document]
            by_role = [*zip(preset.roles[1:], texts, strict=False)]
            if self._instruction and preset.roles[0]:
                by_role.insert(0, (preset.roles[0], self._instruction))
            marked = chat.render(
                self.model,
                [ChatMessage(cast(Any, role), text) for role, text in by_role],
                preset.chat_template_kwargs,
                parse_special_tokens=False,
                followed_by=[preset.label_prefix],
                add_generation_prompt=preset.add_generation_prompt,
            )
            try:
                rows.append(tokenizer.encode_marked(marked.followed_by(preset.label_prefix), limit=self.model.facts.context))
            except TooManyTokens as error:
                raise PromptTooLongError(index, error) from None
            tokens += len(rows[-1])
            self.model.bounds.check("max_request_tokens", tokens, "tokens or more", self.param)
        return share_prefix(rows)

    def _place(self, index: int) -> int:
        """Return the place in the request of a document that was not refused."""
        refused = {refusal.index for refusal in self._refused}
        return next(islice((place for place in count() if place not in refused), index, None))

    @property
    def _frame_param(self) -> str:
        return self.query_param if self.query is not None else "instruction"

    def _too_long(self, tokens: TooManyTokens, index: int) -> ContextExceeded:
        remedy = "Shorten it, or allow cutting it with `truncate`."
        return self.model.facts.too_long(tokens, f"{self.param}[{self.first + index}]", remedy=remedy)


def to_compare(
    model: Model,
    preset: PresetTemplate,
    cuts: Truncation,
    queries: tuple[str, Sequence[str]],
    documents: tuple[str, Sequence[str]],
    instruction: str | None,
    *,
    texts: bool = False,
    partial: bool = False,
) -> Prepared:
    """Return the prompts of queries and documents for an embedding model, and with ``texts`` the documents. Both come after the
    field of the request that holds them. Raises :class:`InvalidRequest`."""
    if instruction is not None or partial:
        wrong = "partial_results" if instruction is None else "instruction"
        raise InvalidRequest(f"`{wrong}` is for rerankers; this is an embedding model.", param=wrong)
    published = preset.preset
    instructed = bool(published.instructed) and "query" not in published.prompts
    asked = Pairs(model, preset, cuts, queries[0], as_query=True, prompt=None if instructed else published.prompt_for("query"))
    first = asked.prepared(queries[1])
    second = Pairs(model, preset, cuts, documents[0], prompt=published.prompt_for("document")).prepared(documents[1], texts=texts)
    if first.prompt_tokens or second.prompt_tokens:
        message = f"The embeddings of {model.facts.name!r} leave out its prompts; use /v1/embeddings and compare them yourself."
        raise InvalidRequest(message, param="model")
    rows = [[*part.prefix, *row] for part in (first, second) for row in part.rows]
    model.bounds.check("max_request_tokens", sum(map(len, rows)), "tokens", documents[0])
    prefix, rows = ([], rows) if model.facts.encoder else share_prefix(rows)
    prepared = msgspec.structs.replace(second, rows=rows, prefix=prefix, queries=len(first.rows))
    prepared.query_truncated = bool(first.truncated)
    return prepared


def preset_of(model: Model, task: Task) -> PresetTemplate:
    """Return the model's preset. Raises :class:`InvalidRequest` if it has none for ``task``."""
    preset = model.texts.preset
    if preset is None or not preset.fitted.serves(task):
        raise InvalidRequest(
            f"The model {model.facts.name!r} has no preset for this; /v1/models shows what it does.", param="model"
        )
    return preset

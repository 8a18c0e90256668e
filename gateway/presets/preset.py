"""The format of a preset, read from TOML.

A preset is data and never code: a template with three placeholders, and the choice of what is read after it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

MAX_BYTES = 64 << 10
"""Largest TOML document."""
FIELDS = frozenset({"instruction", "query", "document"})
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

Text = Annotated[str, msgspec.Meta(max_length=16384)]
Pieces = Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)]
Group = str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
"""A label: one token, or several whose probabilities are added."""
Task = Literal["rerank", "classify", "embed"]
Activation = Literal["softmax", "sigmoid", "difference", "none"]


class PresetError(ValueError):
    """A preset cannot be read, or does not fit a tokeniser. The message is one line that names the key and the problem."""


class Categories(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Categories that a guard model names after its verdict."""

    prefix: Text
    """Text that the model writes before the token of a category, with its verdict."""
    names: dict[str, str]
    """Token that the model writes, and the category's name in the answer."""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is prompted and read."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
    source: str = ""
    """Where the template and the formula come from."""
    task: Task
    """``rerank``: a query and a document; ``classify``: a text; ``embed``: a text, or a query with an instruction."""
    models: tuple[str, ...] = ()
    """Shell patterns of the model names that this preset is for, compared in lower case with the part after the last slash."""
    architectures: tuple[str, ...] = ()
    """If not empty, the model's architecture must be one of these as well."""
    optional: bool = False
    """If the preset does not fit the model's tokeniser, the model is served without a preset (True), or it is not served and the
    log gives the reason (False)."""

    template: Pieces = ()
    """Pieces of the prompt; each is tokenised by itself, so that no token spans two of them. ``{instruction}``, ``{query}`` and
    ``{document}`` stand for texts of the request; exactly one piece contains ``{document}``. Empty: the model's own chat template
    renders the query as a message of the user and the document as one of the assistant; without a query, the document is the
    user's."""
    instructed: Pieces = ()
    """Used instead of ``template`` for requests with an instruction. With the task ``embed``: for queries, as ``{document}``."""
    instruction: Text = ""
    """Default instruction."""
    add_special_tokens: bool = False
    """Add the tokens that the tokeniser puts around every text."""

    labels: Annotated[tuple[Group, ...], msgspec.Meta(max_length=256)] = ()
    """Tokens that are read after the prompt; the first one is the positive answer. Empty: the model's own head is read."""
    label_prefix: Text = ""
    """Text that the model writes before the label, for example a newline. It is tokenised together with the end of the chat
    template."""
    add_generation_prompt: bool = True
    """Whether the chat template ends with the beginning of an answer."""
    activation: Activation = "softmax"
    """The score from the labels: ``softmax`` is the probability of the first among them; ``difference`` is the logit of the first
    minus that of the second; ``none`` is the first logit, and ``sigmoid`` is the sigmoid of ``scale`` times it. From a head:
    ``softmax`` and ``sigmoid`` give its classes' probabilities, ``none`` its logits."""
    scale: Annotated[float, msgspec.Meta(gt=-1e6, lt=1e6)] = 1.0
    categories: Categories | None = None
    """Only with the task ``classify`` and labels."""

    max_tokens_per_query: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    """Longer queries are cut to this many tokens. None: never cut."""
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    """Longer documents are cut to this many tokens. None: never cut."""

    @property
    def raw(self) -> bool:
        """Whether a label's logit is read, which its log-probability does not give."""
        return bool(self.labels) and self.activation in ("none", "sigmoid")

    @property
    def item_first(self) -> bool:
        """Whether the document comes before the query, with and without an instruction. Its keys and values then serve every
        query."""
        return self.task == "rerank" and bool(self.template) and all(map(_puts_document_first, (self.template, self.instructed)))

    @property
    def takes_instruction(self) -> bool:
        """Whether a request's instruction has a place in the prompt."""
        return "instruction" in placeholders("".join(self.instructed or self.template))

    @property
    def flat_labels(self) -> list[str]:
        """All tokens of all labels."""
        return [token for group in self.labels for token in ((group,) if isinstance(group, str) else group)]


def parse_preset(document: bytes) -> Preset:
    """Return the preset in a TOML document. Raises :class:`PresetError`."""
    if len(document) > MAX_BYTES:
        raise PresetError(f"it has {len(document)} bytes; at most {MAX_BYTES} are read")
    try:
        preset = msgspec.toml.decode(document, type=Preset)
    except RecursionError:
        raise PresetError("it is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise PresetError(str(error)) from None
    for name in ("template", "instructed"):
        _check_pieces(name, getattr(preset, name))
    if preset.template and preset.label_prefix:
        raise PresetError("`label_prefix` goes with the chat template; write it at the end of `template`")
    if not preset.template and (preset.instructed or preset.task == "embed"):
        raise PresetError("`template` is missing")
    if preset.activation == "difference" and len(preset.labels) != 2:
        raise PresetError(f"`activation` difference needs two labels, not {len(preset.labels)}")
    if preset.raw and any(not isinstance(group, str) for group in preset.labels):
        raise PresetError(f"`activation` {preset.activation} reads logits, which cannot be added; give labels of one token each")
    if preset.categories is not None and (preset.task != "classify" or not preset.labels):
        raise PresetError("`categories` need the task classify and `labels`")
    if preset.task == "embed" and preset.labels:
        raise PresetError("the task embed reads no `labels`")
    if preset.task == "rerank" and preset.template and "query" not in placeholders("".join(preset.template)):
        raise PresetError("`template` must contain {query} for the task rerank")
    return preset


def placeholders(text: str) -> set[str]:
    """Return the names of the fields in a piece."""
    return set(_PLACEHOLDER.findall(text)) & FIELDS


def fill(piece: str, values: dict[str, str]) -> str:
    """Return ``piece`` with its placeholders replaced, in one pass: a value's own braces are text."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), piece)


def _puts_document_first(pieces: tuple[str, ...]) -> bool:
    text = "".join(pieces)
    return "{query}" not in text.partition("{document}")[0]


def _check_pieces(name: str, pieces: tuple[str, ...]) -> None:
    if not pieces:
        return
    used = [field for piece in pieces for field in _PLACEHOLDER.findall(piece) if field in FIELDS]
    if used.count("document") != 1:
        raise PresetError(f"`{name}` must contain {{document}} exactly once")
    repeated = next((field for field in used if used.count(field) > 1), None)
    if repeated:
        raise PresetError(f"`{name}` contains {{{repeated}}} more than once")

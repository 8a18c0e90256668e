"""Presets: how a model is prompted and read.

A preset is data and never code, read from TOML: a template with three placeholders, and the choice of what is read after it.
:func:`choose` takes the server's setting, then ``yardstick.toml`` beside the weights, then the model's name, then the model's
sentence-transformers files. :class:`Fitted` is a preset whose labels are token ids of a model."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from yardstick_llm.engine import wire

MAX_BYTES = 64 << 10
"""Largest TOML document."""
FIELDS = frozenset({"instruction", "query", "document"})
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

Text = Annotated[str, msgspec.Meta(max_length=16384)]
Pieces = Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)]
Group = str | Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
"""A label: one token, by its text or its id, or several whose probabilities are added."""
Task = Literal["rerank", "classify", "embed"]
Activation = Literal["softmax", "sigmoid", "difference", "none"]
PairTruncation = Literal["longest_first", "only_first", "only_second"]


class PresetError(ValueError):
    """A preset cannot be read, or does not fit a tokeniser. The message is one line that names the key and the problem."""


class Categories(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Categories that a guard model names after its verdict."""

    prefix: Text
    """Text that the model writes before the token of a category, with its verdict."""
    names: dict[str, str]
    """Token that the model writes, and the category's name in the answer."""


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model of the ColBERT kind is prompted; the names and defaults are those of PyLate's ``models.ColBERT``."""

    query_prefix: Text = "[Q] "
    """Token that is put behind the first special token of a query; empty: none."""
    document_prefix: Text = "[D] "
    query_length: Annotated[int, msgspec.Meta(ge=4, lt=1 << 20)] = 32
    """Longer queries are cut to this many tokens, and shorter ones are filled up with ``expansion``."""
    document_length: Annotated[int, msgspec.Meta(ge=4, lt=1 << 20)] = 180
    do_query_expansion: bool = True
    attend_to_expansion_tokens: bool = False
    """Whether a query's tokens see those that fill it up."""
    skiplist_words: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)] = tuple(string.punctuation)
    """Tokens of documents without a vector."""
    expansion: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=16)] = ("[MASK]", "<mask>")
    """Token that fills up queries: the first of these that the tokeniser has."""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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
    renders a message for each, with ``roles``; without a query, the document has the role of the query."""
    instructed: Pieces = ()
    """Used instead of ``template`` for requests with an instruction. With the task ``embed``: for queries, as ``{document}``."""
    instruction: Text = ""
    """Default instruction."""
    add_special_tokens: bool = False
    """Add the tokens that the tokeniser puts around every text; if ``template`` has two pieces, one with the query and one with the
    document, those that it puts around and between a pair of texts."""
    prompts: Annotated[dict[str, Text], msgspec.Meta(max_length=256)] = {}
    """Only with the task ``embed``: texts that go before ``{document}``, by the names with which requests choose them."""
    default_prompt: str = ""
    """Name of the prompt of requests that choose none; empty: none."""
    include_prompt: bool = True
    """False: the mean of a text's vectors leaves out those of the prompt."""
    lowercase: bool = False

    labels: Annotated[tuple[Group, ...], msgspec.Meta(max_length=256)] = ()
    """Tokens that are read after the prompt; the first one is the positive answer. Empty: the model's own head is read."""
    roles: tuple[Text, Text, Text] = ("", "user", "assistant")
    """Roles of the chat template's messages with the instruction, the query and the document; if the first one is empty, the prompt
    has no place for an instruction."""
    label_prefix: Text = ""
    """Text that the model writes before the label, for example a newline. It is tokenised together with the end of the chat
    template."""
    add_generation_prompt: bool = True
    """Whether the chat template ends with the beginning of an answer."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template."""
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
    max_length: Annotated[int, msgspec.Meta(ge=4, lt=1 << 31)] | None = None
    """Longer prompts are cut to this many tokens, unless the request forbids it. None: the context, to which prompts of encoders
    are cut, and no others."""
    pair_truncation: PairTruncation = "longest_first"
    """Which text of a pair an encoder cuts if the pair is too long. The values are those of transformers."""
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    """Only with the task ``embed``: the score of a query and a document from their embeddings. Of distances, the negative."""
    late_interaction: LateInteraction | None = None
    """Only with the task ``embed``: the score is MaxSim of token vectors."""

    @property
    def raw(self) -> bool:
        """Whether a label's logit is read, which its log-probability does not give."""
        return bool(self.labels) and self.activation in ("none", "sigmoid")

    @property
    def item_first(self) -> bool:
        """Whether the document comes before the query, with and without an instruction. Its keys and values then serve every
        query."""
        before = ["".join(pieces).partition("{document}")[0] for pieces in (self.template, self.instructed)]
        return self.task == "rerank" and bool(self.template) and not any("{query}" in text for text in before)

    @property
    def takes_instruction(self) -> bool:
        """Whether a request's instruction has a place in the prompt."""
        if not self.template:
            return bool(self.roles[0])
        return "instruction" in placeholders("".join(self.instructed or self.template))

    @property
    def is_pair(self) -> bool:
        """Whether the prompt of two texts is the tokeniser's pair of them, the first with text of the preset before it."""
        pair = ("{document}",) if self.task == "classify" else ("{query}", "{document}")
        ends = len(self.template) == len(pair) and all(map(str.endswith, self.template, pair))
        fields = [placeholders(piece) for piece in self.template] == [placeholders(piece) for piece in pair]
        return self.add_special_tokens and ends and fields and not self.instructed

    @property
    def prompt_names(self) -> list[str]:
        """Names with which requests choose a prompt. As in sentence-transformers, ``query`` and ``document`` are always known."""
        return [*dict.fromkeys((*self.prompts, "query", "document"))]

    def prompt_for(self, name: str | None) -> str | None:
        """Return the text before the document that a prompt's name or a purpose (:data:`PROMPTS_OF`) chooses; None: nothing but
        ``template``."""
        if name in self.prompts:
            return self.prompts[name]
        spelled = {each.lower(): text for each, text in self.prompts.items()}
        found = next((spelled[each] for each in PROMPTS_OF.get(name or "", ()) if each in spelled), None)
        return self.prompts.get(self.default_prompt) if found is None else found

    @property
    def flat_labels(self) -> list[str]:
        """All tokens of all labels."""
        return [str(token) for group in self.labels for token in (group if isinstance(group, tuple) else (group,))]


PROMPTS_OF: dict[str, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query", "s2p_query"),
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage"),
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}
"""Names of prompts in published models, by purpose; "query" and "document" begin with those that sentence-transformers'
``encode_query`` and ``encode_document`` look for."""


def parse_preset(document: bytes) -> Preset:
    """Return the preset in a TOML document, or in JSON. Raises :class:`PresetError`."""
    if len(document) > MAX_BYTES:
        raise PresetError(f"it has {len(document)} bytes; at most {MAX_BYTES} are read")
    try:
        decode = msgspec.json.decode if document.startswith(b"{") else msgspec.toml.decode
        preset = decode(document, type=Preset)
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
    if preset.raw and any(isinstance(group, tuple) for group in preset.labels):
        raise PresetError(f"`activation` {preset.activation} reads logits, which cannot be added; give labels of one token each")
    if preset.categories is not None and (preset.task != "classify" or not preset.labels):
        raise PresetError("`categories` need the task classify and `labels`")
    if preset.task == "embed" and preset.labels:
        raise PresetError("the task embed reads no `labels`")
    if preset.task != "embed" and (preset.prompts or preset.late_interaction):
        raise PresetError("`prompts` and `late_interaction` go with the task embed")
    if preset.default_prompt and preset.default_prompt not in preset.prompts:
        raise PresetError(f"`default_prompt` {preset.default_prompt!r} is not one of `prompts`")
    if named := next((name for name, text in preset.prompts.items() if placeholders(text)), None):
        raise PresetError(f"the prompt {named!r} contains a placeholder")
    if preset.task == "rerank" and preset.template and "query" not in placeholders("".join(preset.template)):
        raise PresetError("`template` must contain {query} for the task rerank")
    return preset


def placeholders(text: str) -> set[str]:
    """Return the names of the fields in a piece."""
    return set(_PLACEHOLDER.findall(text)) & FIELDS


def fill(piece: str, values: dict[str, str]) -> str:
    """Return ``piece`` with its placeholders replaced, in one pass: a value's own braces are text."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), piece)


def _check_pieces(name: str, pieces: tuple[str, ...]) -> None:
    if not pieces:
        return
    used = [field for piece in pieces for field in _PLACEHOLDER.findall(piece) if field in FIELDS]
    if used.count("document") != 1:
        raise PresetError(f"`{name}` must contain {{document}} exactly once")
    repeated = next((field for field in used if used.count(field) > 1), None)
    if repeated:
        raise PresetError(f"`{name}` contains {{{repeated}}} more than once")


class Fitted(msgspec.Struct, frozen=True):
    """The preset of a served model."""

    preset: Preset
    labels: list[list[int]] = []
    """Token ids of each label."""
    categories: list[int] = []
    """Token id of each category."""
    categories_prefix: list[int] = []
    """Tokens between a prompt and the token of a category."""
    skipped: list[int] = []
    """Tokens of documents without a vector."""
    expansion: int | None = None
    """Token that fills up queries, if no other token sees it."""

    @property
    def readout(self) -> wire.ScoreReadout:
        """The output that engines compute after each prompt, from which scores are computed."""
        if self.preset.late_interaction is not None:
            return wire.TokenVectors()
        if self.preset.task == "embed":
            return wire.Embedding(normalize=self.preset.similarity == "cosine")
        if not self.labels:
            return wire.Classes()
        tokens = [id for label in self.labels for id in label] + self.categories
        return wire.Labels(tokens, raw=self.preset.raw or self._relative)

    def serves(self, task: Task) -> bool:
        """Whether prompts for ``task`` can be built and read. A reranker with a head classifies texts, too, which are documents
        without a query, and an embedding model ranks by similarity."""
        if self.preset.task == task or (task, self.preset.task) == ("rerank", "embed"):
            return True
        return task == "classify" and self.preset.task == "rerank" and not self.labels and bool(self.preset.template)

    @property
    def _relative(self) -> bool:
        """Whether labels are compared with each other only, so that the sum over the vocabulary cancels."""
        return len(self.labels) > 1 and not self.categories

    @property
    def names(self) -> list[str]:
        """Name of each label: its first spelling."""
        return [str(label[0] if isinstance(label, tuple) else label).strip() for label in self.preset.labels]

    def score(self, row: Sequence[float], *, raw: bool = False) -> float:
        """Return the score of one prompt, or with ``raw`` the number before the activation, from a row of :attr:`readout`. The row
        of an embedding model is the similarity of a query and a document."""
        if self.preset.task == "embed":
            return row[0]
        logit = self._logit(row)
        if raw or self.preset.activation in ("none", "difference"):
            return logit
        return sigmoid(logit * self.preset.scale if self.preset.activation == "sigmoid" else logit)

    def _logit(self, row: Sequence[float]) -> float:
        """The logit of the first label; against all others where the activation compares them."""
        if not self.labels:
            return row[0]
        logits = self.label_logits(row)
        if self.preset.activation in ("none", "sigmoid"):
            return logits[0]
        others = log_sum(logits[1:]) if len(logits) > 1 else math.log1p(-min(math.exp(logits[0]), 1 - 1e-16))
        if others == -math.inf:
            return 0.0 if logits[0] == -math.inf else MOST_LOGIT
        return max(logits[0] - others, -MOST_LOGIT)

    def label_logits(self, row: Sequence[float]) -> list[float]:
        """Return the logit or log-probability of each label from the row of its tokens."""
        logits, start = [], 0
        for label in self.labels:
            logits.append(log_sum(row[start : start + len(label)]))
            start += len(label)
        return logits

    def category_logprobs(self, row: Sequence[float]) -> list[float]:
        """Return the log-probability of each category from the row of the prompt that ends with the categories' prefix."""
        return list(row[len(row) - len(self.categories) :])


MOST_LOGIT = 1e3
"""Stands for an infinite difference of logits, which JSON cannot express."""


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(−logit)) without overflow."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def softmax(logits: Sequence[float]) -> list[float]:
    """Return the probabilities. If every logit is minus infinity, they are equal."""
    total = log_sum(logits)
    if total == -math.inf:
        return [1 / len(logits)] * len(logits)
    return [math.exp(logit - total) for logit in logits]


def log_sum(logits: Sequence[float]) -> float:
    """Return the logarithm of the sum of the exponentials."""
    highest = max(logits)
    if highest == -math.inf or len(logits) == 1:
        return highest
    return highest + math.log(sum(math.exp(logit - highest) for logit in logits))


FALLBACKS = {
    "classify": "classifier",
    "embed": "embedding",
    "token_vectors": "embedding",
    "sparse": "embedding",
    "score": "judge",
}
"""Presets of models that no other preset is for, by the first of these capabilities that the model has."""
EMBEDS = {"embed", "token_vectors", "sparse"}
"""Capabilities of models whose task is ``embed``."""
ONE_CLASS = "cross-encoder"
"""Preset in place of "classifier" of a model whose head has one number: such a model is a reranker."""
PUBLISHED = "sentence-transformers"
"""Name of a preset that a model's files describe."""
TASK_WORDS = ("rerank", "zerank", "guard", "reward", "embed")
NO_PRESET = "none"
"""Value of the setting for a model that should have none."""


@cache
def builtin() -> dict[str, str]:
    """Return the TOML text of each preset in the package, by name."""
    folder = files("yardstick_llm.gateway.presets") / "builtin"
    return {file.name.removesuffix(".toml"): file.read_text("utf-8") for file in sorted(folder.iterdir(), key=str)}


@cache
def builtin_presets() -> dict[str, Preset]:
    """Return the presets in the package, by name."""
    return {name: parse_preset(text.encode()) for name, text in builtin().items()}


def choose(
    model: str,
    architecture: str,
    capabilities: Collection[str],
    *,
    classes: int = 0,
    encoder: bool = False,
    beside: str | None,
    chosen: Mapping[str, str],
    model_files: Mapping[str, bytes] | None = None,
) -> str | None:
    """Return the text of the preset of ``model``, TOML or JSON; None if it has none. Raises :class:`PresetError`.

    ``classes``: numbers of the model's head. ``encoder``: :attr:`engine.wire.Info.encoder`. ``beside``: the text of
    ``yardstick.toml`` beside the weights. ``chosen``: the setting ``presets``, from model name to the name or file of a preset.
    ``model_files``: :attr:`engine.wire.TokenizerFiles.model_files`; a preset that the model's name chooses is completed from them.
    """
    name = chosen.get(model) or chosen.get(_short(model))
    if name == NO_PRESET:
        return None
    if name is not None or beside is not None:
        text = beside or "" if name is None else named(name)
        if problem := unreadable(parse_preset(text.encode()), capabilities, classes):
            raise PresetError(problem)
        return text
    fitting = [
        name
        for name, preset in builtin_presets().items()
        if fits(preset, model, architecture) and not unreadable(preset, capabilities, classes)
    ]
    # A name that fits several presets does not say which prompt is right.
    own = builtin_presets()[fitting[0]] if len(fitting) == 1 else None
    joins_pairs = encoder and not architecture.startswith(_DECODERS)
    published = of_sentence_transformers(model_files or {}, capabilities, classes, encoder=joins_pairs, base=own)
    if published is not None and published is not own:
        return msgspec.json.encode(published).decode()
    name = fallback_of(capabilities, classes) if own is None else own.name
    return None if name is None else builtin()[name]


def is_fallback(preset: str, model: str, *, beside: str | None, chosen: Mapping[str, str]) -> bool:
    """Whether the preset of this name was taken because no other is for ``model``; the other arguments are those of
    :func:`choose`."""
    named_by_operator = beside is not None or model in chosen or _short(model) in chosen
    return preset in (*FALLBACKS.values(), ONE_CLASS) and not named_by_operator


def names_a_task(model: str) -> bool:
    """Whether a model's name says that it was trained with a prompt of its own, which no fallback has."""
    return any(word in _short(model) for word in TASK_WORDS)


def unreadable(preset: Preset, capabilities: Collection[str], classes: int) -> str | None:
    """Return why ``preset`` cannot serve a model with these capabilities, whose head has ``classes`` numbers; None if it can."""
    if preset.task == "embed":
        able = EMBEDS.intersection(capabilities)
        return None if able else f"{preset.name} is for embeddings, and the model has none"
    if preset.labels:
        return None if "score" in capabilities else f"{preset.name} reads probabilities of tokens, and the model has none"
    if "classify" not in capabilities:
        return f"{preset.name} reads a classification head, and the model has none"
    if preset.task == "rerank" and classes > 1:
        return f"{preset.name} reads one number, and the model's head has {classes} classes"
    return None


def fallback_of(capabilities: Collection[str], classes: int) -> str | None:
    """Return the name of the preset of a model that no other preset is for."""
    name = next((name for capability, name in FALLBACKS.items() if capability in capabilities), None)
    return ONE_CLASS if name == FALLBACKS["classify"] and classes == 1 else name


def named(name: str) -> str:
    """Return the text of the preset called ``name``, or in the file ``name``. Raises :class:`PresetError`."""
    if name in builtin():
        return builtin()[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise PresetError(f"there is no preset {name!r}; name one of {', '.join(builtin())}, or a .toml file")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(f"the file {name!r} cannot be read: {error}") from None


def fits(preset: Preset, model: str, architecture: str) -> bool:
    """Whether ``preset`` is for models of this name and architecture."""
    named = any(fnmatchcase(_short(model), pattern.lower()) for pattern in preset.models)
    return named and (not preset.architectures or architecture in preset.architectures)


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()


class _SentenceTransformers(msgspec.Struct, frozen=True):
    """Keys of ``config_sentence_transformers.json`` that are read. PyLate writes those from ``query_prefix`` on."""

    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    activation_fn: str | None = None
    query_prefix: str | None = None
    document_prefix: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None
    skiplist_words: list[str] | None = None


class _TextProcessing(msgspec.Struct, frozen=True):
    """Arguments of the tokeniser's calls."""

    truncation: Any = True


class _Processing(msgspec.Struct, frozen=True):
    """The part of ``processing_kwargs`` that is read."""

    text: _TextProcessing = _TextProcessing()
    chat_template: dict[str, Any] | None = None
    """Variables of the chat template, and ``restore_suffix``, which is always so here."""


class _Expansion(msgspec.Struct, frozen=True):
    """How queries of a model with a vector for each token are filled up."""

    strategy: Literal["fixed"]
    length: int
    attend: bool = False
    token: str | None = None


class _Transformer(msgspec.Struct, frozen=True):
    """What is read of the file of the module ``Transformer``."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    processing_kwargs: _Processing = _Processing()
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: _Expansion | None = None


class _Mask(msgspec.Struct, frozen=True):
    """Keys that are read in the configuration of the module ``MultiVectorMask``."""

    skiplist_words: list[str] = []
    skiplist_tasks: tuple[Literal["document"]] = ("document",)
    keep_only_token_ids: None = None


class _ColBERT(msgspec.Struct, frozen=True):
    """Keys that are read in ``artifact.metadata``, a file that Stanford's ColBERT writes."""

    query_token_id: str = "[unused0]"  # noqa: S105 - the name of a token
    doc_token_id: str = "[unused1]"  # noqa: S105
    query_maxlen: int = 32
    doc_maxlen: int = 180
    mask_punctuation: bool = True
    attend_to_mask_tokens: bool = False


class _Pooling(msgspec.Struct, frozen=True):
    """What is read of the file of the module ``Pooling``."""

    include_prompt: bool = True


class _LogitScore(msgspec.Struct, frozen=True):
    """The file of the module ``LogitScore`` of a causal reranker."""

    true_token_id: int
    false_token_id: int | None = None


class _Activation(msgspec.Struct, frozen=True):
    """What is read of ``sentence_transformers`` in ``config.json``."""

    activation_fn: str | None = None


class _Config(msgspec.Struct, frozen=True):
    """Keys of ``config.json`` that are read: the activation of a cross-encoder, and the prompts of a model with tasks."""

    sentence_transformers: _Activation | None = None
    sbert_ce_default_activation_function: str | None = None
    """Name of ``activation_fn`` before release 4."""
    task_instructions: dict[str, str] = {}
    """Prompt of each task."""


_CONFIG, _COLBERT = "config_sentence_transformers.json", "artifact.metadata"
_DECODERS = (
    *("Llama", "Qwen", "Gemma", "Mistral", "Ministral", "Mixtral", "Phi", "SmolLM", "Olmo", "Granite"),
    *("SeedOss", "Exaone", "Glm", "Ernie4"),
)
"""Beginnings of the architectures of decoders, whose tokenisers join no pairs, also where all tokens attend to each other."""
_UNCUT = (1 << 20) - 1
"""Length of texts that nothing but the context cuts."""
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
"""Classes of torch that cross-encoders name, by their last part."""
_File = TypeVar("_File", bound=msgspec.Struct)


def of_sentence_transformers(
    files: Mapping[str, bytes], capabilities: Collection[str], classes: int, *, encoder: bool, base: Preset | None
) -> Preset | None:
    """Return the preset that the files of a sentence-transformers folder describe; None if they say nothing. Raises
    :class:`PresetError`.

    ``base``: the preset that the model's name chooses. An embedding model's is completed: a prompt that both name is that of
    ``base``. Other models keep theirs.
    """
    if not EMBEDS.isdisjoint(capabilities):
        return base if files.keys().isdisjoint(("modules.json", _CONFIG, _COLBERT)) else _embedding(files, base)
    logits = next((path for path in files if path.endswith("LogitScore/config.json")), "")
    if base is not None or not (logits or "classify" in capabilities) or not (files or encoder):
        return base
    config, whole = _read(files, "config.json", _Config), _read(files, _CONFIG, _SentenceTransformers)
    former = (config.sentence_transformers or _Activation()).activation_fn or config.sbert_ce_default_activation_function
    named = whole.activation_fn or former
    if named is None and not (encoder or logits):
        return None
    kind = "Sigmoid" if named is None else named.rpartition(".")[2]
    if named is not None and kind not in _ACTIVATIONS:
        raise PresetError(f"the model's files name the activation {named!r}; known are {', '.join(_ACTIVATIONS)}")
    prompt = (whole.prompts or {}).get(whole.default_prompt_name or "", "")
    if logits:
        return _causal_reranker(files, logits, _ACTIVATIONS[kind], prompt)
    # CrossEncoder writes Identity for a model of several classes, unless its author chose an activation.
    activation = "softmax" if classes != 1 and (named is None or kind == "Identity") else _ACTIVATIONS[kind]
    fallback = builtin_presets()[ONE_CLASS if classes == 1 else FALLBACKS["classify"]]
    truncation = _transformer(files).processing_kwargs.text.truncation
    cut = truncation if truncation in ("only_first", "only_second") else fallback.pair_truncation
    made = msgspec.structs.replace(fallback, name=PUBLISHED, activation=activation, pair_truncation=cut)
    if prompt:
        made = msgspec.structs.replace(made, template=(prompt + made.template[0], *made.template[1:]))
    return parse_preset(msgspec.json.encode(made))  # checks it


def _causal_reranker(files: Mapping[str, bytes], path: str, activation: Activation, prompt: str) -> Preset:
    """Return the preset of a decoder whose chat template has a message each for the instruction, the query and the document, and
    whose score is the logit of a token, or the difference of two. ``path``: the file that names them."""
    score, transformer = _read(files, path, _LogitScore), _transformer(files)
    variables = dict(transformer.processing_kwargs.chat_template or {})
    variables.pop("restore_suffix", None)
    labels, by_difference = [score.true_token_id], {"sigmoid": "softmax", "none": "difference"}
    if score.false_token_id is not None:
        labels.append(score.false_token_id)
    made = {
        "name": PUBLISHED,
        "task": "rerank",
        "roles": ["system", "query", "document"],
        "instruction": prompt,
        "labels": labels,
        "activation": by_difference.get(activation, activation) if len(labels) == 2 else activation,
        "add_generation_prompt": variables.pop("add_generation_prompt", False),
        "chat_template_kwargs": variables,
        "max_length": transformer.max_seq_length,
    }
    return parse_preset(msgspec.json.encode(made))


def _embedding(files: Mapping[str, bytes], base: Preset | None) -> Preset:
    config = _read(files, _CONFIG, _SentenceTransformers)
    transformer = _transformer(files)
    similarity = config.similarity_fn_name
    late, mask = None, next((path for path in files if path.endswith("_MultiVectorMask/config.json")), "")
    if mask:
        words, expansion = _read(files, mask, _Mask).skiplist_words, transformer.query_expansion
        late = LateInteraction(
            query_prefix="",  # prefixes are in the prompts
            document_prefix="",
            query_length=expansion.length if expansion else transformer.query_length or _UNCUT,
            document_length=transformer.document_length or _UNCUT,
            do_query_expansion=expansion is not None,
            attend_to_expansion_tokens=expansion is not None and expansion.attend,
            skiplist_words=tuple(words),
            **({"expansion": (expansion.token,)} if expansion and expansion.token else {}),
        )
    elif _COLBERT in files and config.query_length is None:
        stanford = _read(files, _COLBERT, _ColBERT)
        late = LateInteraction(
            query_prefix=stanford.query_token_id,
            document_prefix=stanford.doc_token_id,
            query_length=stanford.query_maxlen,
            document_length=stanford.doc_maxlen,
            attend_to_expansion_tokens=stanford.attend_to_mask_tokens,
            skiplist_words=tuple(string.punctuation) if stanford.mask_punctuation else (),
        )
    elif similarity == "MaxSim" or config.query_length is not None:
        given = {
            name: getattr(config, name) for name in LateInteraction.__struct_fields__ if getattr(config, name, None) is not None
        }
        late = LateInteraction(**given)
    elif similarity not in (None, "cosine", "dot", "euclidean", "manhattan"):
        raise PresetError(f"{_CONFIG} names the similarity {similarity!r}, which is unknown")
    if base is None:
        base = Preset(name=PUBLISHED, task="embed", template=("{document}",), add_special_tokens=True)
    tasks = {
        name: wire.TASK_TOKEN.format(name) + text for name, text in _read(files, "config.json", _Config).task_instructions.items()
    }
    prompts = (config.prompts or {}) | tasks | base.prompts
    if base.instructed:
        prompts.pop("query", None)  # the template has it, with a place for another instruction
    chosen = base.default_prompt or config.default_prompt_name or ""
    pooling = next((path for path in files if path.endswith("_Pooling/config.json")), "")
    made = msgspec.structs.replace(
        base,
        add_special_tokens=base.add_special_tokens and b".StaticEmbedding" not in files.get("modules.json", b""),
        include_prompt=base.include_prompt and _read(files, pooling, _Pooling).include_prompt,
        prompts=prompts,
        default_prompt=chosen if chosen in prompts else "",
        lowercase=base.lowercase or transformer.do_lower_case,
        max_length=base.max_length or (None if late else transformer.max_seq_length),
        similarity=base.similarity if late or similarity is None else similarity,
        late_interaction=base.late_interaction or late,
    )
    return parse_preset(msgspec.json.encode(made))  # checks it


def _transformer(files: Mapping[str, bytes]) -> _Transformer:
    path = next((path for path in files if path.rpartition("/")[2].startswith("sentence_") and path.endswith("_config.json")), "")
    return _read(files, path, _Transformer)


def _read(files: Mapping[str, bytes], name: str, kind: type[_File]) -> _File:
    """Return what ``kind`` describes of a JSON file, or its defaults. Raises :class:`PresetError`."""
    try:
        return msgspec.json.decode(files[name], type=kind) if name in files else kind()
    except (ValueError, RecursionError) as error:
        raise PresetError(f"{name}: {error}") from None

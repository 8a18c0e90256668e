"""``/v1/models``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody

from yardstick_llm.engine import wire
from yardstick_llm.gateway.api.access import Quotas, requested_model, visible_models
from yardstick_llm.gateway.api.answers import encoded
from yardstick_llm.gateway.api.openapi import READ_ERRORS, ApiOperation
from yardstick_llm.gateway.api.reader import Reader, post_json
from yardstick_llm.gateway.errors import ModelNotFound
from yardstick_llm.gateway.http.body import Body
from yardstick_llm.gateway.http.context import AnyRequest, RequestContext
from yardstick_llm.gateway.pool.adapters import AdapterModel
from yardstick_llm.gateway.pool.pool import Pool
from yardstick_llm.gateway.pool.replica import ServedModel
from yardstick_llm.gateway.presets.preset import Preset, Task
from yardstick_llm.gateway.requests.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from yardstick_llm.gateway.workers.workers import Workers


class PresetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The preset of a model; `yardstick presets NAME` prints a whole one."""

    name: str
    task: Literal["rerank", "classify", "embed"]
    """The endpoint that it serves."""
    instruction: str
    """Default instruction; empty if there is none."""
    labels: list[str]
    """Tokens that are read; empty for a model with a head of its own."""
    activation: Literal["softmax", "sigmoid", "difference", "none"]
    """The score from what is read: a probability (`softmax`, `sigmoid`), or logits."""
    fallback: bool = False
    """Whether it prompts the model because no preset is for the model's name. A model that was trained with another prompt needs
    another preset."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model or an adapter that engines serve."""

    id: str
    """The name to send as `model`."""
    root: str
    """Name of the model that answers; differs from `id` for an alias. For an adapter: `base:adapter`."""
    parent: str | None = None
    """Name of the model that an adapter changes; null for a model."""
    digest: str | None = None
    """Digest of an adapter's files; null for a model."""
    object: Literal["model"] = "model"
    created: int
    """Time at which the gateway first saw the model, in seconds since 1970."""
    owned_by: str = "yardstick"
    max_model_len: int
    """Largest number of prompt and completion tokens together."""
    capabilities: list[str]
    """Supported operations: `score`, `generate`, `classify`, `embed`, `token_vectors`, `sparse`, `length_guidance` (the request
    field and `/v1/length`)."""
    model_type: Literal["LLM", "embedding", "rerank"] | None = None
    """Kind of the model in the words of Xinference, whose client asks for it first; null for another kind."""
    model_ability: list[str]
    """Abilities of a model of the kind `LLM`, in the words of Xinference; empty for other models."""
    preset: PresetInfo | None = None
    """How the model is prompted and read by `/v1/rerank`, `/v1/classify` or `/v1/embeddings`; null if it serves none of these."""
    lenvm_gamma: float | None = None
    """Discount factor of its length model; null if it has none."""
    lenvm_calibration: wire.Calibration | None = None
    """How real lengths differ from those that the length model predicts; null if it names none."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models that engines serve."""

    object: Literal["list"] = "list"
    data: list[Model]


def model_routes(pool: Pool) -> list[HTTPRouteHandler]:
    """Create the routes."""

    @get("/v1/models", responses=READ_ERRORS, operation_class=ApiOperation, tags=["models"])
    async def list_models(request: AnyRequest) -> ModelList:
        """List the models that are served here and that the key may use."""
        return ModelList(data=[_described(name, model) for name, model in visible_models(request, pool).items()])

    @get("/v1/models/{model:path}", responses=READ_ERRORS, operation_class=ApiOperation, tags=["models"])
    async def show_model(request: AnyRequest, model: FromPath[str]) -> Model:
        """Describe one model."""
        name = model.removeprefix("/")
        found = visible_models(request, pool).get(name)
        if found is None:
            raise ModelNotFound(f"The model {name!r} does not exist; GET /v1/models lists what is served.", param="model")
        return _described(name, found)

    return [list_models, show_model]


def _described(name: str, model: ServedModel) -> Model:
    fitted, writes = model.tokenizer.table.fitted, "generate" in model.info.capabilities
    task = None if fitted is None or (model.preset_is_fallback and writes) else fitted.preset.task
    kinds: dict[Task | None, Literal["embedding", "rerank"]] = {"embed": "embedding", "rerank": "rerank"}
    return Model(
        id=name,
        root=str(model.reference) if isinstance(model, AdapterModel) else model.name,
        parent=model.base.name if isinstance(model, AdapterModel) else None,
        digest=model.adapter_digest or None,
        created=model.created,
        max_model_len=model.context,
        capabilities=list(model.info.capabilities),
        model_type=kinds.get(task, "LLM" if writes else None),
        model_ability=["chat", "generate"] if writes else [],
        preset=None if fitted is None else _preset(fitted.preset, fallback=model.preset_is_fallback),
        lenvm_gamma=model.info.lenvm_gamma,
        lenvm_calibration=model.info.lenvm_calibration,
    )


def _preset(preset: Preset, *, fallback: bool) -> PresetInfo:
    return PresetInfo(
        name=preset.name,
        task=preset.task,
        instruction=preset.instruction,
        labels=preset.flat_labels,
        activation=preset.activation,
        fallback=fallback,
    )


def tokenize_routes(pool: Pool, reader: Reader, quotas: Quotas, workers: Workers) -> list[HTTPRouteHandler]:
    """Create the routes. No engine takes part: the text workers read the requests and encode the responses."""

    @post_json(["/tokenize", "/v1/tokenize"], "tokens")
    async def tokenize(request: AnyRequest, data: JSONBody[Body[TokenizeRequest]]) -> Response[TokenizeResponse]:
        """Convert a text or a conversation to token ids.

        The ids are those that `/v1/completions` and `/v1/chat/completions` use for the same `prompt` or `messages`. A text may be
        longer than the model's context.
        """
        return await converted(request, TokenizeRequest, data)

    @post_json(["/detokenize", "/v1/detokenize"], "tokens")
    async def detokenize(request: AnyRequest, data: JSONBody[Body[DetokenizeRequest]]) -> Response[DetokenizeResponse]:
        """Convert token ids to text, with special tokens."""
        return await converted(request, DetokenizeRequest, data)

    async def converted(request: AnyRequest, kind: type[Any], data: Body[Any]) -> Response[Any]:
        """Charge the tokens like those of a prompt, and respond with the body that the reader has encoded."""
        body = await reader.body(request, kind, data)
        prepared = await body.read(requested_model(request, pool, body.fields.model))
        RequestContext.of(request).account.prompt_tokens = prepared.tokens
        await quotas.charge(request, tokens=prepared.tokens)
        return encoded(prepared.response)

    @get("/tokenizer_info", responses=READ_ERRORS, operation_class=ApiOperation, tags=["tokens"])
    async def tokenizer_info(request: AnyRequest, model: FromQuery[str | None] = None) -> TokenizerInfo:
        """Describe the tokeniser of `model`, which is optional if only one is served: its special tokens and its chat template."""
        served = requested_model(request, pool, model)
        files = workers.files(served.text)
        special = {name: text for name, text in files.special_tokens.items() if name in TokenizerInfo.__struct_fields__}
        return TokenizerInfo(model_max_length=served.context, chat_template=files.chat_template, **special)

    return [tokenize, detokenize, tokenizer_info]

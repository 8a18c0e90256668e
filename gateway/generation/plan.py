"""Builds a :class:`Generation` from a validated request and the tokens of a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from yardstick_llm.engine import wire
from yardstick_llm.gateway.errors import InvalidRequest
from yardstick_llm.gateway.generation.generation import Generation
from yardstick_llm.gateway.generation.length import default_min_p
from yardstick_llm.gateway.generation.sequence import TextOptions
from yardstick_llm.gateway.pool.replica import ServedModel, paths_of
from yardstick_llm.gateway.schemas.common import new_id
from yardstick_llm.gateway.schemas.generation import GenerationRequest
from yardstick_llm.gateway.text.prepared import Prepared, as_list

UNSTATED_TOKENS = 1024
"""Output tokens charged in advance to a key's limits if the request states no maximum. Charging the whole context would exceed
most limits."""
WHOLE_TOKENS = 16
"""Tokens in each delta if nothing is streamed: few enough that another engine can resume without much repeated work."""
MAX_BIASES = 4096
MAX_STOP_CHARACTERS = 4096


def check(model: ServedModel, fields: GenerationRequest, *, logprobs: int | None) -> None:
    """Raise :class:`InvalidRequest` if the model does not support the request."""
    limits = model.info.limits
    if "generate" not in model.info.capabilities:
        raise InvalidRequest(f"The model {model.name!r} does not generate text; it serves {paths_of(model)}.", param="model")
    if fields.sequences > limits.max_sequences:
        raise InvalidRequest(f"`n` is at most {limits.max_sequences} with this model.", param="n")
    if logprobs is not None and logprobs > limits.max_logprobs:
        raise InvalidRequest(f"This model gives at most {limits.max_logprobs} log-probabilities a token.", param="logprobs")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("`stream_options` is only for streams; set `stream` to true.", param="stream_options")
    if len(fields.logit_bias or ()) > MAX_BIASES:
        raise InvalidRequest(
            f"`logit_bias` has {len(fields.logit_bias or ())} entries; at most {MAX_BIASES} are allowed.", param="logit_bias"
        )
    for index, stop in enumerate(fields.stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            message = f"`stop[{index}]` has {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are allowed."
            raise InvalidRequest(message, param=f"stop[{index}]")
    for param in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        unknown = next((id for id in getattr(fields, param) or () if not model.tokenizer.has_token(id)), None)
        if unknown is not None:
            raise InvalidRequest(f"`{param}`: {unknown} is not a token of {model.name!r}.", param=param)
    if fields.prompt_logprobs is not None and fields.prompt_logprobs > limits.max_logprobs:
        message = f"This model gives at most {limits.max_logprobs} log-probabilities a token."
        raise InvalidRequest(message, param="prompt_logprobs")
    if fields.prompt_logprobs is not None and fields.stream:
        message = "`prompt_logprobs` is not for streams; set `stream` to false, or use /v1/completions with `echo` and `logprobs`."
        raise InvalidRequest(message, param="prompt_logprobs")


def _check_grammar(model: ServedModel, fields: GenerationRequest) -> None:
    if "grammar" not in model.info.capabilities:
        raise InvalidRequest(f"The output of {model.name!r} cannot be constrained; name another model.", param="model")
    if fields.ignore_eos:
        message = "`ignore_eos` contradicts a constrained output, which ends where it is complete; leave one of them out."
        raise InvalidRequest(message, param="ignore_eos")


def plan(
    model: ServedModel,
    fields: GenerationRequest,
    prepared: Prepared,
    place: int = 0,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    guidance: wire.LengthGuidance | None,
    thinking_limit: wire.ThinkingLimit | None = None,
    priority: int,
    caller: wire.Caller,
) -> Generation:
    """Return the generation of the prompt at ``place``. ``max_tokens``: None for as many as the context holds, which limits it
    in any case."""
    prompt, param, format = as_list(prepared.rows[place]), prepared.param_of(place), prepared.format
    echo = prepared.texts[place] if prepared.texts else None
    if not prompt:
        raise InvalidRequest(f"`{param}` is empty; send at least one token.", param=param)
    model.facts.check_prompt(len(prompt), param, room=0 if max_tokens == 0 else 1)
    if prepared.grammar:
        _check_grammar(model, fields)
    if prepared.images and fields.prompt_logprobs is not None:
        message = "`prompt_logprobs` does not go with images, whose tokens have no log-probabilities."
        raise InvalidRequest(message, param="prompt_logprobs")
    room = model.context - len(prompt)
    limit = room if max_tokens is None else min(max_tokens, room)
    if (fields.min_tokens or 0) > limit:
        raise InvalidRequest(f"`min_tokens` is more than the {limit} tokens that may be generated.", param="min_tokens")
    lookup = fields.prompt_lookup
    request = wire.Generate(
        id=new_id(),
        prompt=prompt,
        sampling=_sampling(fields, limit, guidance, prepared.bad_words),
        logprobs=logprobs,
        length_guidance=guidance,
        grammar=prepared.grammar,
        thinking_limit=thinking_limit,
        prompt_lookup=None if lookup is None else wire.DraftOptions(lookup.max_tokens, lookup.ngram),
        prompt_logprobs=_prompt_logprobs(fields, logprobs, echoes=echo is not None, limit=limit),
        # stop strings need every token at once, because the gateway ends the sequence at one
        tokens_per_delta=1 if fields.stream or fields.stops or not (format is None or format.counts_tokens) else WHOLE_TOKENS,
        priority=priority,
        caller=caller,
        adapter=model.adapter_digest,
        images=[*prepared.images],
    )
    text = TextOptions(
        logprobs=logprobs is not None,
        stops=fields.stops,
        min_tokens=fields.min_tokens or 0,
        skip_special_tokens=fields.skip_special_tokens is not False,
        keeps_stop=bool(fields.include_stop_str_in_output),
        end_logprob=echo is not None,
        format=format,
        token_ids=bool(fields.return_token_ids),
    )
    return Generation(
        model,
        request,
        text,
        first_index=place * fields.sequences,
        echo=echo,
        prompt_logprobs=fields.prompt_logprobs,
        most_expected=UNSTATED_TOKENS if max_tokens is None else limit,
    )


def _sampling(
    fields: GenerationRequest, limit: int, guidance: wire.LengthGuidance | None, bad_words: Sequence[Sequence[int]]
) -> wire.Sampling:
    """Return how tokens are drawn, at most ``limit`` of them."""
    seed = random.getrandbits(63) if fields.seed is None else fields.seed & (2**63 - 1)
    sampling = fields.sampling(max_tokens=limit, seed=seed)
    if bad_words:
        sampling = msgspec.structs.replace(sampling, bad_words=tuple(map(tuple, bad_words)))
    if fields.min_p is None and (min_p := default_min_p(guidance)) is not None:
        sampling = msgspec.structs.replace(sampling, min_p=min_p)
    return sampling


def _prompt_logprobs(fields: GenerationRequest, logprobs: int | None, *, echoes: bool, limit: int) -> int | None:
    """Return the number of top tokens at each position of the prompt to ask the engine for; None for no log-probabilities."""
    asked = [fields.prompt_logprobs, logprobs if echoes else None]
    # a request without output tokens must ask for some, or there is nothing to compute
    return max((top for top in asked if top is not None), default=0 if echoes and limit == 0 else None)

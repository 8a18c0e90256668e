"""Parameters of other servers that this server lacks: some are refused, and some are ignored.

A parameter that would change the answer is refused with status 400, unless its value requests the behaviour that the server has
anyway. One that would not change the answer is accepted, ignored, and named in ``x-yardstick-ignored``. The names come from
OpenAI's API reference, vLLM's and SGLang's ``protocol.py``, Text Embeddings Inference, Text Generation Inference, llama.cpp and
Ollama, and from the API references of Cohere, Jina and Voyage. ``docs/api.md`` shows this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

MAX_SECONDS = 86_400.0
"""Longest time limit of a request."""
TokenId = Annotated[int, msgspec.Meta(ge=0)]

EndpointName = Literal[
    "score",
    "rerank",
    "classify",
    "embeddings",
    "completions",
    "chat",
    "responses",
    "length",
    "tokenize",
    "detokenize",
    "catalogue",
    "catalogue_items",
    "load_adapter",
    "unload_adapter",
    "tei",
    "cohere_embed",
]

OWN: tuple[EndpointName, ...] = (
    "catalogue",
    "catalogue_items",
    "load_adapter",
    "unload_adapter",
    "tei",
    "cohere_embed",
)
"""Endpoints that do not answer prompts, or answer the clients of one server. The tables below do not apply to them."""
ALL: tuple[EndpointName, ...] = tuple(endpoint for endpoint in get_args(EndpointName) if endpoint not in OWN)
GENERATING: tuple[EndpointName, ...] = ("completions", "chat", "responses")
MULTIPLE: tuple[EndpointName, ...] = ("completions", "chat")
"""Endpoints whose requests may have several answers."""
UNCUT: tuple[EndpointName, ...] = ("completions", "chat", "responses", "length", "tokenize", "detokenize")
"""Endpoints whose texts are never cut."""
TEMPLATED: tuple[EndpointName, ...] = ("chat", "responses", "length")

BEAMS = "there is no beam search; ask for `n` completions and choose"
TEXT = "input and output are text"
SAMPLERS = "use `temperature`, `top_k`, `top_p` or `min_p`"
TOKENS = "use `logit_bias`"
NEVER_CUT = "prompts are not truncated; shorten the prompt"
ADAPTERS = "name the adapter in `model`, as `adapter` or `base:adapter`"
RAW_OUTPUT = "an answer holds text and, with `logprobs`, tokens"
TEMPLATE = "the model's own chat template is used; `chat_template_kwargs` passes variables to it"
EFFORT = "use `reasoning.effort`"
BUDGET = 'use `length_guidance` with `target_length` and `applies_to` "thinking"'
ONE_ANSWER = "a response has one answer; use /v1/chat/completions"
ON_CHAT = "use /v1/chat/completions"
FLOAT32 = "embeddings are numbers or, with `encoding_format` `base64`, float32"
PIXELS = "images are processed as the model's settings say"
UNRENDERED = "send the rendered texts as `input`"
AS_PROMPT = "send text or token ids as `prompt`"
TOP_LEVEL = "send each parameter as a field of the request"


class Parameters(msgspec.Struct, kw_only=True):
    """Base class of request bodies."""

    endpoint: ClassVar[EndpointName]
    """Selects the rows of this module's tables."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] | None = None
    """Time in seconds within which the whole answer is of use, streams included; after it the request ends with an error."""


@dataclass(frozen=True)
class Refused:
    """A parameter that would change the answer and is not supported."""

    name: str
    endpoints: tuple[EndpointName, ...]
    remedy: str
    """Reason, or what to use instead."""
    accepts: tuple[Any, ...] = ()
    """Values, besides null, that request the behaviour that the server has anyway."""

    @property
    def message(self) -> str:
        """Message of the error."""
        return f"`{self.name}` is not supported: {self.remedy}."


@dataclass(frozen=True)
class Ignored:
    """A parameter that has no effect here and would not change the answer elsewhere."""

    name: str
    endpoints: tuple[EndpointName, ...]


REFUSED: tuple[Refused, ...] = (
    Refused("structural_tag", GENERATING, "use `tools`, or a `lark` grammar"),
    Refused("stop_regex", GENERATING, "use `stop`, with fixed texts", ([],)),
    Refused("tools", ("completions",), ON_CHAT, ([],)),
    Refused("tool_choice", ("completions",), ON_CHAT, ("none", "auto")),
    Refused("functions", GENERATING, "use `tools` of /v1/chat/completions", ([],)),
    Refused("function_call", GENERATING, "use `tool_choice` of /v1/chat/completions", ("none", "auto")),
    Refused("web_search_options", GENERATING, "this server does not search the web"),
    Refused("moderation", GENERATING, "answers are not moderated"),
    Refused("best_of", ("chat",), "ask for `n` completions and choose", (1,)),
    Refused("best_of", ("responses",), ONE_ANSWER, (1,)),
    Refused("use_beam_search", GENERATING, BEAMS, (False,)),
    Refused("length_penalty", GENERATING, f"{BEAMS}, or steer the length with `length_guidance`", (1,)),
    Refused("early_stopping", GENERATING, BEAMS, (False,)),
    Refused("suffix", GENERATING, "the models only generate text after a prompt", ("",)),
    Refused("echo", ("chat", "responses"), "use /v1/completions", (False,)),
    Refused("modalities", GENERATING, TEXT, (["text"],)),
    Refused("audio", GENERATING, TEXT),
    Refused("image_data", GENERATING, "send `image_url` parts in `messages`", ([],)),
    Refused("mm_processor_kwargs", GENERATING, PIXELS, ({},)),
    Refused("verbosity", GENERATING, "steer the length with `length_guidance`", ("medium",)),
    Refused("reasoning", ("chat",), "use `reasoning_effort`"),
    Refused("thinking", ("chat",), "use `enable_thinking`"),
    Refused("typical_p", GENERATING, SAMPLERS, (1,)),
    Refused("top_a", GENERATING, SAMPLERS, (0,)),
    Refused("tfs", GENERATING, SAMPLERS, (1,)),
    Refused("tfs_z", GENERATING, SAMPLERS, (1,)),
    Refused("eta_cutoff", GENERATING, SAMPLERS, (0,)),
    Refused("epsilon_cutoff", GENERATING, SAMPLERS, (0,)),
    Refused("mirostat", GENERATING, SAMPLERS, (0,)),
    Refused("mirostat_mode", GENERATING, SAMPLERS, (0,)),
    Refused("dynatemp_range", GENERATING, SAMPLERS, (0,)),
    Refused("smoothing_factor", GENERATING, SAMPLERS, (0,)),
    Refused("xtc_probability", GENERATING, SAMPLERS, (0,)),
    Refused("dry_multiplier", GENERATING, "use `repetition_penalty`", (0,)),
    Refused("no_repeat_ngram_size", GENERATING, "use `repetition_penalty`", (0,)),
    Refused("max_repetition_pattern_size", GENERATING, "use `repetition_penalty`", (0,)),
    Refused("repetition_detection", GENERATING, "use `repetition_penalty`"),
    Refused("logits_processors", GENERATING, TOKENS, ([],)),
    Refused("custom_logit_processor", GENERATING, TOKENS),
    Refused("vllm_xargs", GENERATING, "it has no meaning here", ({},)),
    Refused("truncate", UNCUT, NEVER_CUT, (False,)),
    Refused("truncate_prompt_tokens", UNCUT, NEVER_CUT),
    Refused("lora_path", ALL, ADAPTERS),
    Refused("lora_name", ALL, ADAPTERS),
    Refused("lora_request", ALL, ADAPTERS),
    Refused("adapter_id", ALL, ADAPTERS),
    Refused("return_hidden_states", GENERATING, RAW_OUTPUT, (False,)),
    Refused("return_routed_experts", GENERATING, RAW_OUTPUT, (False,)),
    Refused("chat_template", ("chat", "responses", "length"), TEMPLATE),
    Refused("chat_template", ("score", "rerank", "classify", "embeddings"), "the model's preset is used"),
    Refused("add_generation_prompt", ("responses",), ON_CHAT, (True,)),
    Refused("continue_final_message", ("responses",), ON_CHAT, (False,)),
    Refused("add_special_tokens", ("responses",), ON_CHAT, (False,)),
    Refused("n", ("responses",), ONE_ANSWER, (1,)),
    Refused("messages", ("responses",), "use `input`"),
    Refused("logprobs", ("responses",), 'use `include`: `["message.output_text.logprobs"]`', (False,)),
    Refused("max_tokens", ("responses",), "use `max_output_tokens`"),
    Refused("max_completion_tokens", ("responses",), "use `max_output_tokens`"),
    Refused("reasoning_effort", ("responses",), EFFORT),
    Refused("enable_thinking", ("responses",), EFFORT),
    Refused("thinking", ("responses",), EFFORT),
    Refused("thinking_budget", ("responses",), BUDGET),
    Refused("thinking_token_budget", ("responses",), ON_CHAT),
    Refused("prompt_logprobs", ("responses",), ON_CHAT),
    Refused("return_token_ids", ("responses",), ON_CHAT, (False,)),
    Refused("return_tokens_as_token_ids", ("responses",), ON_CHAT, (False,)),
    Refused("background", ("responses",), "responses are computed while the client waits; stream them", (False,)),
    Refused("conversation", ("responses",), "send `previous_response_id`, or the whole conversation as `input`"),
    Refused("prompt", ("responses",), "there are no stored prompts; send `instructions` and `input`"),
    Refused("max_tool_calls", ("responses",), "it limits built-in tools, and this server has none"),
    Refused("context_management", ("responses",), "use `truncation`", ([],)),
    Refused("documents", TEMPLATED, "write the documents into the messages", ([],)),
    Refused("add_generation_prompt", ("length",), UNRENDERED, (True,)),
    Refused("continue_final_message", ("length",), UNRENDERED, (False,)),
    Refused("prompt_embeds", GENERATING, AS_PROMPT),
    Refused("input_embeds", GENERATING, AS_PROMPT),
    Refused("input_ids", GENERATING, AS_PROMPT),
    Refused("session_params", GENERATING, "send the whole conversation; what it shares with earlier ones is cached"),
    Refused("max_new_tokens", MULTIPLE, "use `max_tokens`"),
    Refused("max_new_tokens", ("responses",), "use `max_output_tokens`"),
    Refused("n_predict", MULTIPLE, "use `max_tokens`", (-1,)),
    Refused("n_predict", ("responses",), "use `max_output_tokens`", (-1,)),
    Refused("num_predict", MULTIPLE, "use `max_tokens`", (-1,)),
    Refused("num_predict", ("responses",), "use `max_output_tokens`", (-1,)),
    Refused("min_new_tokens", GENERATING, "use `min_tokens`", (0,)),
    Refused("num_return_sequences", MULTIPLE, "use `n`", (1,)),
    Refused("num_return_sequences", ("responses",), ONE_ANSWER, (1,)),
    Refused("stop_sequences", GENERATING, "use `stop`", ([],)),
    Refused("stop_strings", GENERATING, "use `stop`", ([],)),
    Refused("do_sample", GENERATING, "use `temperature`, where 0 is greedy", (True,)),
    Refused("repeat_penalty", GENERATING, "use `repetition_penalty`", (1,)),
    Refused("sampling_seed", GENERATING, "use `seed`"),
    Refused("random_seed", GENERATING, "use `seed`"),
    Refused("no_stop_trim", GENERATING, "use `include_stop_str_in_output`", (False,)),
    Refused("parameters", GENERATING, TOP_LEVEL, ({},)),
    Refused("sampling_params", GENERATING, TOP_LEVEL, ({},)),
    Refused("options", GENERATING, TOP_LEVEL, ({},)),
    Refused("extra_body", ALL, TOP_LEVEL, ({},)),
    Refused("normalize", ("score",), "use `apply_softmax`"),
    Refused("rank_fields", ("rerank",), "send each document as one text", (["text"],)),
    Refused("top_k", ("rerank",), "use `top_n`"),
    Refused("messages", ("classify", "embeddings"), "send texts as `input`"),
    Refused("add_special_tokens", ("classify", "embeddings"), "send token ids for a prompt without special tokens", (True,)),
    Refused("use_activation", ("embeddings",), "use `normalize`", (True,)),
    Refused("normalized", ("embeddings",), "use `normalize`", (True,)),
    Refused("task", ("embeddings",), "use `input_type`", ("retrieval.passage",)),
    Refused("embedding_type", ("embeddings",), "use `encoding_format`", ("float",)),
    Refused("embed_dtype", ("embeddings",), FLOAT32, ("float32",)),
    Refused("output_dtype", ("embeddings",), FLOAT32, ("float",)),
    Refused("endianness", ("embeddings",), "`base64` is that of little-endian numbers", ("native", "little")),
    Refused("output_dimension", ("embeddings",), "use `dimensions`"),
    Refused("late_chunking", ("embeddings",), "each text has an embedding of its own", (False,)),
    Refused("return_documents", ("score",), "scores are in the order of the items", (False,)),
    Refused("return_text", ("score",), "scores are in the order of the items", (False,)),
    Refused("return_pooled_hidden_states", ("score",), "an answer holds scores", (False,)),
    Refused("chat_template", ("tokenize",), TEMPLATE),
    Refused("mm_processor_kwargs", ("score", "rerank", "classify", "embeddings"), PIXELS, ({},)),
    Refused("mm_processor_kwargs", ("tokenize",), TEXT, ({},)),
    Refused("media_io_kwargs", ("tokenize",), TEXT, ({},)),
    Refused("documents", ("tokenize",), "write the documents into the messages", ([],)),
    Refused("skip_special_tokens", ("detokenize",), "the text has its special tokens; leave them out of `tokens`", (False,)),
)

IGNORED: tuple[Ignored, ...] = (
    Ignored("metadata", ALL),
    Ignored("service_tier", ALL),
    Ignored("safety_identifier", ALL),
    Ignored("store", GENERATING),
    Ignored("prediction", GENERATING),
    Ignored("parallel_tool_calls", ("completions",)),
    Ignored("prompt_cache_key", GENERATING),
    Ignored("prompt_cache_options", GENERATING),
    Ignored("prompt_cache_retention", GENERATING),
    Ignored("request_id", ALL),
    Ignored("rid", ALL),
    Ignored("include_reasoning", ("completions",)),
    Ignored("separate_reasoning", GENERATING),
    Ignored("stream_reasoning", GENERATING),
    Ignored("spaces_between_special_tokens", GENERATING),
    Ignored("guided_decoding_backend", GENERATING),
    Ignored("guided_whitespace_pattern", GENERATING),
    Ignored("truncation_direction", UNCUT),
    Ignored("truncation_side", UNCUT),
    Ignored("kv_transfer_params", GENERATING),
    Ignored("bootstrap_host", GENERATING),
    Ignored("bootstrap_port", GENERATING),
    Ignored("bootstrap_room", GENERATING),
    Ignored("data_parallel_rank", GENERATING),
    Ignored("return_cached_tokens_details", GENERATING),
)

"""Bodies of ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``.

The fields are those of vLLM (``vllm/entrypoints/serve/tokenize/protocol.py``) and those that the remote tokeniser of lm-eval reads
(``RemoteTokenizer`` in ``lm_eval/utils.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from gateway.schemas.chat import ChatMessage
from gateway.schemas.parameters import EndpointName, Parameters, TokenId
from gateway.schemas.tools import Tools

MAX_TOKENS = 1 << 20


class TokenizeRequest(Parameters, kw_only=True):
    """Convert a text or a conversation to token ids. Give `prompt` or `messages`."""

    endpoint: ClassVar[EndpointName] = "tokenize"
    model: str | None = None
    """Name of the model; optional if only one is served."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    """A conversation, for the model's chat template."""
    add_special_tokens: bool | None = None
    """Add the special tokens, such as BOS, that the tokeniser adds to a text. The default is true for `prompt` and false for
    `messages`, because a chat template writes them."""
    return_token_strs: bool | None = False
    """Return the spelling of each token in the vocabulary as well."""
    add_generation_prompt: bool | None = None
    """With `messages`: end the prompt with the beginning of the answer; true by default."""
    continue_final_message: bool | None = False
    """With `messages`: end the prompt within the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """With `messages`: further variables for the model's chat template."""
    tools: Tools | None = None
    """With `messages`: functions that the model may call."""
    parse_special_tokens: bool | None = None
    """Whether text such as `<|im_end|>` becomes a control token. The default is true in `prompt` and false in `messages`."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a text."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Largest number of prompt and completion tokens together; a longer text is tokenised too."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """Spelling of each token in the vocabulary, such as `Ġred`; null unless `return_token_strs` is set."""


class DetokenizeRequest(Parameters, kw_only=True):
    """Convert token ids to text."""

    endpoint: ClassVar[EndpointName] = "detokenize"
    model: str | None = None
    """Name of the model; optional if only one is served."""
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
    """Token ids."""
    user: str | None = None
    """Accepted for compatibility and not used."""


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids."""

    prompt: str
    """The text with its special tokens. Bytes that are not UTF-8 become U+FFFD."""


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokeniser's configuration, with the names of `tokenizer_config.json`."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    """The class of transformers that loads any `tokenizer.json`."""
    model_max_length: int
    """Largest number of prompt and completion tokens together."""
    chat_template: str | None
    """Source of the model's Jinja template; null if it has none."""
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None

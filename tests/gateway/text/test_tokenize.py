"""``/tokenize`` against the tokenizers library and transformers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from tokenizers import Tokenizer as Library

from tests.gateway.text.test_special import KINDS, Chat
from tests.gateway.text.test_tokenizer import TEXT
from yardstick_llm.gateway.requests.endpoint import Model, TextSide
from yardstick_llm.gateway.requests.tokenize import TOKENIZE, TokenizeRequest, TokenizeResponse
from yardstick_llm.gateway.schemas.chat import ChatMessage
from yardstick_llm.gateway.text.chat_template import ChatTemplate
from yardstick_llm.gateway.text.prepared import Bounds, Facts
from yardstick_llm.gateway.text.tokenizer import Tokenizer

MESSAGES = [ChatMessage("system", "Be brief."), ChatMessage("user", "naïve 😀")]


def read(model: Model, **fields: Any) -> TokenizeResponse:
    prepared = TOKENIZE.read(TokenizeRequest(**fields), model)
    response = msgspec.json.decode(prepared.response, type=TokenizeResponse)
    assert response.count == len(response.tokens) == prepared.tokens
    return response


@given(text=TEXT)
def test_tokens_and_spellings_are_the_librarys(library: Library, tokenizer: Tokenizer, text: str) -> None:
    model = Model(Facts("m", 100, 10**6, 10), tokenizer, Bounds(), TextSide(tokenizer, ChatTemplate(None, {})))
    for adds, special in ((None, True), (True, True), (False, False)):
        encoding = library.encode(text, add_special_tokens=special)
        answer = read(model, prompt=text, add_special_tokens=adds, return_token_strs=True)
        assert (answer.tokens, answer.token_strs) == (encoding.ids, encoding.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_are_those_of_transformers(kind: str) -> None:
    chat = Chat(*KINDS[kind])
    model = chat.model()
    assert read(model, messages=MESSAGES).tokens == chat.expected(MESSAGES)
    told = [message.for_template() for message in MESSAGES]
    closed = chat.reference.apply_chat_template(told, add_generation_prompt=False, return_dict=False)
    assert read(model, messages=MESSAGES, add_generation_prompt=False).tokens == closed


@pytest.mark.parametrize("content", ["plain", "with <|eot_id|> in it"])
def test_special_tokens_are_added_to_a_conversation_on_request(content: str) -> None:
    chat = Chat(*KINDS["llama"])
    messages = [ChatMessage("user", content)]
    begin, end = chat.tokenizer.affixes
    assert begin
    plain = read(chat.model(), messages=messages).tokens
    assert read(chat.model(), messages=messages, add_special_tokens=True).tokens == [*begin, *plain, *end]

"""All families of tool calls, and the one that a model's chat template asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.tools.families.deepseek import (
    ALL,
    ALL_END,
    CALL,
    CALL_END,
    SEPARATOR,
    DeepSeekBlockFrame,
    DeepSeekFrame,
    DeepSeekParser,
)
from gateway.tools.families.hermes import HermesFrame, HermesParser
from gateway.tools.families.llama_json import LlamaJsonFrame, LlamaJsonParser
from gateway.tools.families.mistral import MistralFrame, MistralNamedFrame, MistralParser
from gateway.tools.families.pythonic import PythonicFrame, PythonicParser
from gateway.tools.families.qwen3_coder import Qwen3CoderFrame, Qwen3CoderParser
from gateway.tools.frame import Frame
from gateway.tools.parser import ToolParser
from gateway.tools.parts import call_id, short_call_id


@dataclass(frozen=True)
class Family:
    """A format of tool calls."""

    parser: type[ToolParser]
    frame: Frame
    """Builds grammars of calls."""
    signs: tuple[tuple[str, ...], ...]
    """The texts of chat templates that ask for this format: one of these groups occurs as a whole."""
    tokens: tuple[str, ...] = ()
    """Texts of the format that are special tokens in the vocabularies of some models."""
    new_id: Callable[[], str] = call_id

    def asked_for(self, template: str) -> bool:
        """Whether the chat template ``template`` asks for this format."""
        return any(all(sign in template for sign in group) for group in self.signs)


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = (ALL, ALL_END, CALL, CALL_END, SEPARATOR)

FAMILIES: dict[str, Family] = {
    "mistral_named": Family(
        MistralParser, MistralNamedFrame(), (("[TOOL_CALLS]", "[ARGS]"),), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_call_id
    ),
    "mistral": Family(MistralParser, MistralFrame(), (("[TOOL_CALLS]",),), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_call_id),
    "qwen3_coder": Family(Qwen3CoderParser, Qwen3CoderFrame(), (("<function=", "<parameter="),), _TOOL_CALL),
    "deepseek_block": Family(DeepSeekParser, DeepSeekBlockFrame(), ((SEPARATOR, "```json"),), _DEEPSEEK),
    "deepseek": Family(DeepSeekParser, DeepSeekFrame(), ((SEPARATOR,),), _DEEPSEEK),
    "hermes": Family(HermesParser, HermesFrame(), (("<tool_call>", '"arguments"'),), _TOOL_CALL),
    "pythonic": Family(
        PythonicParser, PythonicFrame(), (("<|python_start|>",), ("[func_name1(",)), ("<|python_start|>", "<|python_end|>")
    ),
    "llama_json": Family(
        LlamaJsonParser, LlamaJsonFrame(), (("<|python_tag|>",), ('"parameters": dictionary',)), ("<|python_tag|>",)
    ),
}
"""Families by name. Where several fit a template, the first one counts, because the later ones ask for less. One parser reads both
of Mistral's formats; only what is forced differs."""


def family_of(template: str) -> str | None:
    """Return the name of the family that the chat template ``template`` asks for; None if it asks for none that is known."""
    plain = template.replace('\\"', '"')  # in Jinja's strings, quotes may be escaped
    return next((name for name, family in FAMILIES.items() if family.asked_for(plain)), None)

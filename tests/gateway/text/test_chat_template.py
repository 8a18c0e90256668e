"""Chat templates of the kinds that models come with, against transformers, and templates that misbehave."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from yardstick_llm.gateway.text import chat_template
from yardstick_llm.gateway.text.chat_template import ChatTemplate, ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}
{%- endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' -}}
{% endfor %}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' -}}{% endif -%}
{%- endif -%}
"""
HEADERS = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ignored' %}{%- continue %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""
PARTS = """{% for message in messages %}<|{{ message.role }}|>
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endif %}
{% endfor %}"""

FILES = [path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))]
"""Templates with macros, namespaces, filters, dates and thinking sections, as models have them."""

USER = {"role": "user", "content": ' Red <shoes> & "tables"? 東京 it\'s '}
ASSISTANT = {"role": "assistant", "content": "Yes.\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
THINKING = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {"colour": "rot & 'grün' <é>"}}}]}
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}}},
}


def reference(library: Library, source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=source, **SPECIAL)
    return tokenizer.apply_chat_template(messages, tokenize=False, **variables)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("source", "messages", "extra"),
    [
        (CHATML, [USER], {}),
        (CHATML, [SYSTEM, USER, ASSISTANT, USER], {}),
        (CHATML, [USER], {"enable_thinking": False}),
        (HEADERS, [USER, ASSISTANT, USER], {}),
        (HEADERS, [SYSTEM, USER, {"role": "ignored", "content": ""}, CALL, USER], {"tools": [TOOL]}),
        (ALTERNATING, [USER, ASSISTANT, USER, ASSISTANT], {}),
        (PARTS, [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "text", "text": " shoes"}]}], {}),
        *((source, messages, {}) for source in FILES for messages in ([USER], [USER, THINKING, USER, ASSISTANT, USER])),
    ],
)
def test_it_renders_what_transformers_renders(
    byte_library: Library, source: str, messages: list[dict[str, Any]], extra: dict[str, Any], add_generation_prompt: bool
) -> None:
    expected = reference(byte_library, source, messages, add_generation_prompt=add_generation_prompt, **extra)
    assert expected
    assert ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=add_generation_prompt, **extra) == expected


def test_content_in_parts_becomes_lines_where_the_template_knows_no_parts() -> None:
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "shoes"}]
    template = ChatTemplate(CHATML, SPECIAL)
    assert template.render([{"role": "user", "content": parts}]) == template.render([{"role": "user", "content": "red\nshoes"}])


def test_texts_become_parts_where_the_template_reads_parts_only(byte_library: Library) -> None:
    """Like the template of Llama-Guard-3-1B, which shows nothing of a message whose content is a text."""
    shown = "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] | trim }};{% endfor %}"
    source = "{% for message in messages %}{{ message['role'] }}: " + shown + "{% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": " red "}]}]
    expected = reference(byte_library, source, parts, add_generation_prompt=True)
    assert expected == "user: red;"
    for content in (" red ", parts[0]["content"]):
        assert ChatTemplate(source, SPECIAL).render([{"role": "user", "content": content}]) == expected


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate(CHATML, SPECIAL, "{{ tools[0].function.name }} {{ messages[0].content }}")
    assert template.shows_tools
    assert "tools" in template.sources
    assert template.render([USER]) == ChatTemplate(CHATML, SPECIAL).render([USER])
    assert template.render([USER], tools=[TOOL]) == f"{TOOL['function']['name']} {USER['content']}"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "red", {"type": "text", "text": 3}]
)
def test_other_parts_are_an_error_that_names_the_part(part: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"content\[1\]"):
        ChatTemplate(CHATML, SPECIAL).render([{"role": "user", "content": [{"type": "text", "text": "red"}, part]}])


def test_json_is_not_escaped_and_takes_options() -> None:
    template = ChatTemplate("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", {})
    assert template.render([]) == '{"a":1,"b":"<é>"}'


def test_the_templates_own_message_reaches_the_client() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(ALTERNATING, SPECIAL).render([USER, USER])


def test_no_template_says_what_to_do() -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template; use /v1/completions"):
        ChatTemplate(None, SPECIAL).render([USER])


def test_a_broken_template_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match="broken: line 2"):
        ChatTemplate("\n{% for %}", SPECIAL).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.json.dumps(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__['os'].getcwd() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, SPECIAL).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' ~ a ~ b }}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [0] * 6000000 }}",
        "{{ ('x' * 60000) * 60000 }}",
        "{{ 9 ** 999999 }}",
        "{{ range(10000000000) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_runaway_template_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARACTERS", 100_000)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, SPECIAL).render([USER])


def test_ordinary_arithmetic_is_allowed() -> None:
    assert ChatTemplate("{{ 3 * 4 }} {{ 2 ** 10 }} {{ '-' * 5 }} {{ 1.5 * 2 }}", {}).render([]) == "12 1024 ----- 3.0"


def test_what_a_template_shows_depends_on_variables() -> None:
    template = ChatTemplate("{% for message in messages if message.role == role %}{{ message.content }}{% endfor %}", {})
    assert template.shows(("query",), {"role": "query"})
    assert not template.shows(("query",), {"role": "user"})
    assert template.shows(("query",), {"role": "query"})

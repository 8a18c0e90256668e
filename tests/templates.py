"""Chat templates with tools and thinking, in the form of those of real models but shorter."""

from __future__ import annotations

_TURNS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
CALL
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_EARLIER_THINKING = """{% if message.role == 'assistant' and message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}"""
_JSON_CALL = """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""

HERMES = """{% if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write each call as <tool_call>
{{ '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}' }}
</tool_call><|im_end|>
{% endif %}""" + _TURNS.replace("CALL", _JSON_CALL)
"""Qwen2.5 and Hermes."""
THINKING = (
    HERMES.replace("{{ message.content }}", _EARLIER_THINKING)
    + "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""Qwen3: thinking can be switched off."""
ALWAYS_THINKING = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
"""DeepSeek-R1 and the thinking models of Qwen3: the prompt opens the section."""
EFFORT = "Effort: {{ reasoning_effort | default('medium') }}\n" + HERMES
"""The amount of thinking is a word in the prompt."""
QWEN3_CODER = """{% if tools %}<|im_start|>system
{% for tool in tools %}<function>{{ tool.function.name }}: {{ tool.function.parameters | tojson }}</function>
{% endfor %}<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call><|im_end|>
{% endif %}""" + _TURNS.replace(
    "CALL",
    "<function={{ call.function.name }}>{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}"
    "</parameter>{% endfor %}</function>",
)
LLAMA_JSON = """{% if tools %}Environment: ipython
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}""" + _TURNS.replace(
    "CALL", '<|python_tag|>{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
)
PYTHONIC = "{% if tools %}[func_name1(params_name1=params_value1)]\n{{ tools | tojson }}{% endif %}" + _TURNS.replace(
    "CALL", "[f()]"
)
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + _TURNS.replace(
    "CALL", "[TOOL_CALLS] [{{ call.function | tojson }}]"
)
MISTRAL_NAMED = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + _TURNS.replace(
    "CALL", "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
)
_DEEPSEEK_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
DEEPSEEK = "{{ tools | tojson }}" + _TURNS.replace(
    "CALL", _DEEPSEEK_CALL.format("{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}")
)
DEEPSEEK_BLOCK = "{{ tools | tojson }}" + _TURNS.replace(
    "CALL",
    _DEEPSEEK_CALL.format("function<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ call.function.arguments | tojson }}\n```"),
)
ARGUMENTS_AS_TEXT = HERMES.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
"""DeepSeek-V3: only texts can be joined with ``+``."""
TOOLS_IN_NO_FORMAT = "{{ tools | tojson }}" + _TURNS.replace("CALL", "")

FAMILY_OF = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama_json": LLAMA_JSON,
    "pythonic": PYTHONIC,
    "deepseek": DEEPSEEK,
    "deepseek_block": DEEPSEEK_BLOCK,
    "mistral": MISTRAL,
    "mistral_named": MISTRAL_NAMED,
}
"""A template of each family of tool calls."""

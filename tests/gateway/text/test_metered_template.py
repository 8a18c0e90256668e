"""Metered chat templates write what the others write, and no template makes the event loop work long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text import metered_template as module
from gateway.text.bounds import NeedsWorker
from gateway.text.chat_template import ChatTemplate, ChatTemplateError
from gateway.text.metered_environment import ALLOWANCE
from gateway.text.metered_template import MeteredTemplate, compile_metered
from tests.fakes import TEMPLATE
from tests.gateway.text.test_chat_template import ALTERNATING, ASSISTANT, CHATML, HEADERS, PARTS, SPECIAL, SYSTEM, USER

FILES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
TEMPLATES = FILES | {"chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING, "parts": PARTS, "plain": TEMPLATE}
THINKING = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, THINKING, USER, ASSISTANT, USER],
    "thinking": [SYSTEM, USER, {**ASSISTANT, "reasoning_content": "hm"}, USER],
    "tool": [USER, ASSISTANT, {"role": "tool", "content": "3"}],
}
LONG = [{"role": role, "content": "a" * 1500} for role in ("user", "assistant", "user")]
LOOP = "{% for a in range(1000) %}"
CONTENT = "messages[0].content"
REFUSED = {
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "power": "{{ 10 ** 1000000 }}",
    "format": "{{ '%999999d' | format(1) }}",
    "indent": f"{{{{ {CONTENT} | indent(1000000) }}}}",
    "center": f"{{{{ {CONTENT} | center(100000000) }}}}",
    "unknown filter": "{{ messages | pprint }}",
    "sorting": "{{ messages | sort(attribute='content') }}",
    "lists within lists": "{% set x = [messages, messages] %}{{ x }}",
    "tuples within tuples": "{% set x = (messages, messages) %}{{ x }}",
    "objects within objects": "{% set x = {'a': messages, 'b': messages} %}{{ x }}",
    "call with a list of arguments": "{{ raise_exception(*messages) }}",
    "private attribute": "{{ messages.__class__ }}",
    "private name": "{{ _x }}",
    "the template itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "include": "{% include 'a' %}",
    "import": "{% import 'a' as b %}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "cycler": "{% set x = cycler(1, 2) %}",
    "filter block": "{% filter upper %}a{% endfilter %}",
    "call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}a{% endcall %}",
    "chain of comparisons": "{{ 1 < 2 < 3 }}",
    "deep nesting": "{{ " + "(" * 100 + "1" + " + 1)" * 100 + " }}",
    "nested loops": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "deeper than the parser": "{{ " + "(" * 5000 + " }}",
    "large number": "{{ " + "1" * 5000 + " }}",
    "no template": "{% if %}",
    "broken in a branch": "{% if nothing %}{{ 1[1:] }}{% endif %}",
    "gigabytes when it is compiled": "{{ '%9999999999d' | format(1) }}",
    "doubling when it is compiled": "{{ 'aa'" + " | replace('a', 'aaaaaaaa')" * 40 + " }}",
    "doubling in a condition": "{% if 'aa'" + " | replace('a', 'aaaaaaaa')" * 40 + " %}{% endif %}{{ [[1]] }}",
    "long": "a" * (module.MAX_SOURCE + 1),
}
"""Templates that are never run on the event loop."""
STOPPED = {
    "range": "{% for a in range(100000) %}{% endfor %}",
    "loops": "{% for a in messages %}" * 9 + "{% endfor %}" * 9,
    "loop with a condition": "{% for a in range(100000) if a > 100001 %}{% endfor %}",
    "endless macro": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "doubling macro": "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}",
    "macro in a variable": "{% macro m() %}{{ x.n() }}{{ x.n() }}{% endmacro %}{% set x = namespace() %}{% set x.n = m %}{{ m() }}",
    "doubling text": f"{{% set x = namespace(t='a') %}}{LOOP}{{% set x.t = x.t + x.t %}}{{% endfor %}}",
    "doubling by concatenation": f"{{% set x = namespace(t='a') %}}{LOOP}{{% set x.t = x.t ~ x.t %}}{{% endfor %}}",
    "doubling by a block": f"{{% set x = namespace(t='a') %}}{LOOP}{{% set y %}}{{{{ x.t }}}}{{{{ x.t }}}}{{% endset %}}"
    "{% set x.t = y %}{% endfor %}",
    "doubling by replacement": f"{{% set x = namespace(t='aa') %}}{LOOP}{{% set x.t = x.t.replace('a', x.t) %}}{{% endfor %}}",
    "doubling by a filter": f"{{% set x = namespace(t='aa') %}}{LOOP}{{% set x.t = x.t | replace('a', x.t) %}}{{% endfor %}}",
    "doubling by joining": f"{{% set x = namespace(t='aa') %}}{LOOP}{{% set x.t = x.t | list | join(x.t) %}}{{% endfor %}}",
    "product of a text": "{% set x = 'a' * 100000000 %}",
    "product of a list": "{% set x = [1] * 100000000 %}",
    "sum of lists": "{% set x = messages + messages %}",
    "squares": f"{{% set x = namespace(n=3) %}}{LOOP}{{% set x.n = x.n * x.n %}}{{% endfor %}}",
    "doubling number": f"{{% set x = namespace(n=3) %}}{LOOP}{{% set x.n = x.n + x.n %}}{{% endfor %}}",
    "percent": "{{ '%999999999d' % 1 }}",
    "format method": "{{ '{:999999999}'.format(1) }}",
    "filter by its name": "{{ messages | map('format', 'x') | list }}",
    "center method": f"{{{{ {CONTENT}.center(999999999) }}}}",
    "join method": f"{{{{ {CONTENT}.join(messages) }}}}",
    "translate method": f"{{{{ {CONTENT}.translate({{}}) }}}}",
    "list method": "{{ messages.copy() }}",
    "namespaces within namespaces": "{% set x = namespace() %}{% set y = namespace(a=x, b=x) %}",
    "namespace within itself": "{% set x = namespace() %}{% set x.x = x %}",
    "other items within lists": "{% set x = namespace() %}{% set x.a = messages | map(attribute='content') %}",
    "whole conversation": f"{LOOP}{{{{ messages | tojson }}}}{{% endfor %}}",
    "indented": "{{ messages | tojson(indent=100000) }}",
    "separators": "{{ messages | tojson(separators=(',', ':')) }}",
    "text of a list": "{{ messages }}",
    "text of an object": "{{ messages[0] ~ messages[0] }}",
    "content": f"{LOOP}{{{{ {CONTENT} }}}}{{% endfor %}}",
    "upper": f"{LOOP}{{% set x = {CONTENT} | upper %}}{{% endfor %}}",
    "splitting": f"{LOOP}{{% set x = {CONTENT}.split('a') %}}{{% endfor %}}",
    "searching": f"{LOOP}{{% set x = '{'a' * 30}b' in {CONTENT} %}}{{% endfor %}}",
    "slices": f"{LOOP}{{% set x = {CONTENT}[::-1] %}}{{% endfor %}}",
    "slices of lists": f"{{% set x = {CONTENT} | list %}}{LOOP}{{% set y = x[::-1] %}}{{% endfor %}}",
    "lists of attributes": f"{LOOP}{{% set x = messages | map(attribute='role') | list %}}{{% endfor %}}",
    "chains of generators": "{% set x = messages" + " | map('trim')" * 30 + " | list %}",
    "comparing": f"{LOOP}{{% if {CONTENT} + 'a' == {CONTENT} + 'b' %}}{{% endif %}}{{% endfor %}}",
    "comparing conversations": "{% if messages == messages %}{% endif %}",
    "objects within texts": "{% if messages[0] in messages %}{% endif %}",
    "dates": f"{LOOP}{{% set x = strftime_now('%c') %}}{{% endfor %}}",
    "long date": "{{ strftime_now('" + "%c" * 1000 + "') }}",
    "digits": f"{{{{ ('1' ~ {CONTENT}) | int }}}}",
    "straight on": "{{ messages[0].role == 'a' }}" * 900,
}
"""Templates that are stopped when they exceed their allowance, or do something that is not metered."""


def made(source: str) -> MeteredTemplate:
    compiled = compile_metered(source)
    assert compiled is not None, source
    return MeteredTemplate(source, SPECIAL, compiled)


def cost(template: MeteredTemplate) -> int:
    return ALLOWANCE - template._metered.left


def outcome(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The text, or the error."""
    try:
        return template.render(messages, **variables)
    except ChatTemplateError as error:
        return f"error: {error}"


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("variables", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}], ids=str)
def test_the_text_is_that_of_the_plain_template(name: str, conversation: str, variables: dict[str, Any]) -> None:
    template, plain, messages = made(TEMPLATES[name]), ChatTemplate(TEMPLATES[name], SPECIAL), CONVERSATIONS[conversation]
    expected, found = (outcome(each, messages, variables) for each in (plain, template))
    assert found == expected
    assert cost(template) < ALLOWANCE / 3, "ten messages more have room"
    assert template.reads("enable_thinking") == plain.reads("enable_thinking")


@pytest.mark.parametrize("name", REFUSED)
def test_constructs_without_a_meter_are_refused(name: str) -> None:
    assert compile_metered(REFUSED[name]) is None


@pytest.mark.parametrize("name", STOPPED)
def test_hostile_templates_are_stopped(name: str) -> None:
    template = made(STOPPED[name])
    began = time.thread_time()
    with pytest.raises((NeedsWorker, ChatTemplateError)):
        template.render(LONG)
    assert time.thread_time() - began < 0.1, "some 0.001 s on an idle machine"


def test_a_template_that_was_stopped_renders_the_next_messages() -> None:
    source = "{% for m in messages %}{% for a in range(m.content | length) %}{{ a }}{% endfor %}{% endfor %}"
    template = made(source)
    with pytest.raises(NeedsWorker):
        template.render(LONG)
    template.begin()
    assert template.render([USER]) == ChatTemplate(source, SPECIAL).render([USER])


def test_prompts_of_a_request_share_one_allowance() -> None:
    template = made("a")
    for _ in range(5):
        template.render([USER])
    assert cost(template) >= 5 * module.RUN_COST
    with pytest.raises(NeedsWorker):
        [template.render([USER]) for _ in range(ALLOWANCE // module.RUN_COST)]
    template.begin()
    assert template.render([USER]) == "a"


def test_texts_that_depend_on_what_a_probe_could_not_tell_are_left_to_workers() -> None:
    """The template writes a list as text, so it cannot be tried whether it reads parts."""
    template = made("{% for m in messages %}{{ m.content | trim }}{% endfor %}")
    assert template.render([USER]) == USER["content"].strip()
    with pytest.raises(NeedsWorker):
        template.render([{"role": "user", "content": [{"type": "text", "text": "red"}]}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "text", "text": "shoes"}]}]
    assert made(PARTS).render(parts) == ChatTemplate(PARTS, SPECIAL).render(parts)
    assert made(TEMPLATES["thinking"]).render(parts) == ChatTemplate(TEMPLATES["thinking"], SPECIAL).render(parts)


NAMES = st.sampled_from(
    ["messages", "messages[0].content", "messages[-1].role", "m", "m.content", "x", "y.z", "loop.index0", "tools"]
)
CONSTANTS = st.sampled_from(["'a'", "''", "' b '", "1", "0", "2", "none", "true", "['user', 'a']", "{'a': 1}", "nothing"])
UNARY = [
    *("({} | trim)", "({} | length)", "({} | upper)", "({} | list)", "({} | tojson)", "({} is string)", "({} is defined)"),
    *("(not {})", "({}[1:])", "({}[::-1])", "({}.strip())", "({}.split('a'))", "({} | first)", "({} | default('d'))"),
    *("({}.items())", "f({})", "({} is none)", "({} | join(','))", "({} | int)", "({} | string)", "({}[0])", "({}.content)"),
    *("namespace(z={})", "(-{})", "({} | map('upper') | list)", "({} | selectattr('role', 'equalto', 'user') | list)"),
    *("({} | replace('a', 'bc'))", "({} | items)"),
]
BINARY = ["+", "-", "*", "%", "//", "/", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
EXPRESSIONS = st.recursive(
    NAMES | CONSTANTS,
    lambda inner: st.one_of(
        st.builds(str.format, st.sampled_from(UNARY), inner),
        st.builds("({1} {0} {2})".format, st.sampled_from(BINARY), inner, inner),
        st.builds("({0} if {1} else {2})".format, inner, inner, inner),
    ),
    max_leaves=4,
)
STATEMENTS = st.recursive(
    st.one_of(
        st.builds("{{{{ {0} }}}}".format, EXPRESSIONS),
        st.builds("{{% set x = {0} %}}".format, EXPRESSIONS),
        st.builds("{{% set y.z = {0} %}}".format, EXPRESSIONS),
        st.sampled_from([" text\n", "{% break %}", "{% continue %}"]),
    ),
    lambda inner: st.one_of(
        st.builds("{0}{1}".format, inner, inner),
        st.builds("{{% for m in {0} %}}{1}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for m in messages if {0} %}}{1}{{% else %}}{2}{{% endfor %}}".format, EXPRESSIONS, inner, inner),
        st.builds("{{% if {0} %}}{1}{{% elif {2} %}}{3}{{% else %}}-{{% endif %}}".format, EXPRESSIONS, inner, EXPRESSIONS, inner),
        st.builds("{{% set x %}}{0}{{% endset %}}".format, inner),
    ),
    max_leaves=6,
)
FRAME = "{{% set y = namespace(z='c') %}}{{% macro f(a) %}}<{{{{ a }}}}>{{% endmacro %}}{{% for m in messages %}}{0}{{% endfor %}}"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # Jinja folds constants to expressions such as 1[1:]
@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(source=st.builds(FRAME.format, STATEMENTS))
def test_generated_templates_write_the_same(source: str) -> None:
    compiled = compile_metered(source)
    if compiled is None:
        return
    template = MeteredTemplate(source, SPECIAL, compiled)
    try:
        text = template.render([USER, ASSISTANT])
    except (NeedsWorker, ChatTemplateError):
        return  # a worker decides
    assert text == ChatTemplate(source, SPECIAL).render([USER, ASSISTANT])

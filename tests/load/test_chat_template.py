"""Chat templates: transformers' results, and programs that try to get out or never to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jattn.llm.load import ChatTemplate, chat_template
from torch_core.base.errors import InvalidInput

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <2 & 3>?"},
    {"role": "assistant", "content": "5"},
]
ROLES = """{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>
{{ message.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TOOLS = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for m in messages %}
    {%- if loop.first and m.role == 'system' %}[{{ m.content ~ '!' }}]{% elif not loop.last %}{{ loop.index0 * 2 }}
    {% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{%- endfor %}"""
COUNTS = """{% set ns = namespace(n=0) %}{% for m in messages %}
{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% continue %}{% endif %}
{{ m.content[:3].upper() }}{% endfor %}{{ ns.n }}{{ ', '.join(['a', 'b']) }}"""
TEMPLATES = [ROLES, TOOLS, COUNTS]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_the_text_is_transformers(source, tools) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special: Any = {"bos_token": "<s>", "eos_token": "</s>"}

    text = ChatTemplate(source, special).render(MESSAGES, tools=tools)

    (expected,), _ = render_jinja_template([MESSAGES], tools, None, source, add_generation_prompt=True, **special)
    assert text == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.mro() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing.at.all }}",
        "{{ messages[0] + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ '%0999999999d' % 5 }}",
        "{{ 9 ** 99999999 }}",
        "{% set ns = namespace(t='xx') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        "{% set ns = namespace(t='xx') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{% for a in range(9000) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ ('\t' * 9999999).expandtabs(1000) }}",
        "{{ [0] * 60000000 }}",
        "{{ ('x' * 999999).translate({120: 'y' * 999}) }}",
        "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% if t.isalpha() %}{% endif %}{% endfor %}",
        "{% set t = 'a ' * 99999 %}{% for i in range(99999) %}{% if t.split() %}{% endif %}{% endfor %}",
        "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'ab' in t %}{% endif %}{% endfor %}",
        "{% set a = namespace(t=[0]) %}{% for i in range(40) %}{% set a.t = [a.t, a.t] %}{% endfor %}{{ a.t }}",
        "{% set a = namespace(t=[0]) %}{% for i in range(40) %}{% set a.t = (a.t, a.t) %}{% endfor %}{{ a.t|tojson }}",
    ],
)
def test_a_template_that_reaches_out_fails_or_never_ends_is_stopped(source, monkeypatch) -> None:
    small = replace(chat_template._RENDER, seconds=0.1, memory_bytes=32 << 20)
    monkeypatch.setattr(chat_template, "_RENDER", small)
    monkeypatch.setattr(chat_template, "_COMPILE", replace(small, function="compile_template"))

    with pytest.raises(InvalidInput, match=r"^the chat template"):
        ChatTemplate(source).render(MESSAGES)


def test_a_long_conversation_is_put_together_piece_by_piece() -> None:
    source = (
        "{% set ns = namespace(all=[], text='') %}{% for m in messages %}{% set ns.all = ns.all + [m] %}"
        "{% set ns.text = ns.text ~ m.content | trim %}{% endfor %}{{ ns.all | length }}{{ ns.text }}"
    )

    text = ChatTemplate(source).render([{"role": "user", "content": "x" * 200}] * 1000)

    assert text == "1000" + "x" * 200_000


def test_a_template_that_takes_all_memory_leaves_none_of_it_here() -> None:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("this system has no /proc")
    ChatTemplate("x")
    before = int(status.read_text().split()[1])

    with pytest.raises(InvalidInput, match=r"MiB of memory"):
        ChatTemplate("{{ ('x' * 999999).translate({120: 'y' * 999}) }}").render(MESSAGES)

    assert (int(status.read_text().split()[1]) - before) * 4096 < 50 << 20


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nowhere }}", "x" * (1 << 18), 5])
def test_a_source_that_is_no_template_is_refused(source) -> None:
    with pytest.raises(InvalidInput, match=r"^chat_template "):
        ChatTemplate(source)

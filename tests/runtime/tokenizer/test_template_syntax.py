"""What templates use: the date, raise_exception, tojson, block tags, generation blocks, and the rest of Jinja."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from llmctl.runtime.tokenizer.chat_template import render_chat


def user(text: str = "Hi") -> dict[str, str]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%A", "%H:%M:%S", "", "%%"])
def test_date_call(judge: Any, form: str) -> None:
    template = "{{ strftime_now('" + form + "') }}|{{ strftime_now is defined }}"
    assert judge.agrees(template, [user()]) == judge.now.strftime(form) + "|True"


def test_the_clock_is_read_at_each_call(judge: Any) -> None:
    ticks = iter([judge.now, judge.now + datetime.timedelta(days=1)])
    text = render_chat("{{ strftime_now('%d') }} {{ strftime_now('%d') }}", [user()], clock=lambda: next(ticks))
    assert text == "04 05"


def test_without_a_clock_the_date_is_todays() -> None:
    before = datetime.datetime.now().isoformat()
    text = render_chat("{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}", [user()])
    assert before <= text <= datetime.datetime.now().isoformat()


def test_raise_exception_carries_the_templates_words(judge: Any) -> None:
    refusal = "{{ raise_exception('System role not\nsupported: ' ~ messages | length) }}"
    template = "{% if messages[0].role == 'system' %}" + refusal + "{% endif %}ok"
    assert judge.agrees(template, [user()]) == "ok"
    assert judge.agrees(template, [SYSTEM, user()]) is None
    assert judge.refused(template, [SYSTEM]) == "the chat template refuses this conversation: System role not supported: 1"


TOJSON = [
    "",
    "(ensure_ascii=True)",
    "(indent=4)",
    "(indent='\t')",
    "(indent=0)",
    "(separators=(',', ':'))",
    "(sort_keys=True)",
    "(True, 2, (', ', ' = '), True)",
    "(indent=2, ensure_ascii=False, sort_keys=true)",
]


@pytest.mark.parametrize("arguments", TOJSON)
def test_tojson(judge: Any, arguments: str) -> None:
    numbers = [1, 2.5, -0.0, 1e300, True, None, {}, []]
    value = {"z": "<b> & 'é' \"😀\" \\ \u2028\n\x7f", "a": numbers, "Ä": {"y": 1, "x": 2}, "10": ""}
    text = judge.agrees("{{ value | tojson" + arguments + " }}", [user()], value=value)
    assert text is not None
    assert ("Ä" in text) == ("True, 2" not in arguments and "ensure_ascii=True" not in arguments)
    if "sort_keys" not in arguments and "True, 2" not in arguments:
        assert text.index('"z"') < text.index('"a"')  # the order given


def test_tojson_of_what_is_not_json(judge: Any) -> None:
    assert judge.agrees("{{ missing | tojson }}", [user()]) is None
    assert judge.agrees("{{ range(3) | tojson }}", [user()]) is None
    assert judge.agrees("{{ (1, 2) | tojson }}{{ 'x' | tojson }}", [user()]) == '[1, 2]"x"'


SYNTAX = {
    "un-dashed blocks": "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "indented blocks": "a\n    {% for m in messages %}\n  {{ m.role }}\n    {% endfor %}\n  {# note #}\n end\n\n",
    "dashes and pluses": "x  {%- if true -%}  y  {%+ endif +%}  z {{- 1 -}} \n w{#- c -#} \n v",
    "text before a block": "a {% if true %} b {% endif %} c\n\t{% set x = 1 %}\n{{ x }}\n",
    "carriage returns": "a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r\n",
    "raw": "{% raw %}{{ not }} {% this %}{% endraw %}\n!",
    "break and continue": (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}\n {{ m.role }}{{ loop.index }}\n{% endgeneration %}{% endfor %}",
    "dashed generation": "a {%- generation -%} {{ 1 }} {%- endgeneration -%} b",
    "what generation sets stays inside": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "a namespace in generation": "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
    "generation is not closed": "{% generation %}{{ 1 }}",
    "break in generation": "{% for i in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "loop variables": (
        "{% for a in 'abc' %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}"
        "{{ loop.nextitem }}{% endfor %}"
    ),
    "loop with a test": "{% for a in range(7) if a % 2 %}{{ a }},{{ loop.length }};{% else %}none{% endfor %}",
    "loop over nothing": "{% for a in [] if a %}{{ a }}{% else %}none{% endfor %}{% for a in missing %}x{% endfor %}",
    "loop over a number": "{% for a in 5 %}{% endfor %}",
    "recursive loop": (
        "{% for a in [1, [2, [3]]] recursive %}{% if a is number %}{{ a }}{% else %}"
        "({{ loop(a) }}){% endif %}{% endfor %}"
    ),
    "unpacking": "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}{% set p, q = 1, [2] %}{{ p }}{{ q }}",
    "concatenation": "{{ 1 ~ 'a' ~ none ~ missing ~ [1, 'b'] ~ {'k': (1, 2)} }}{{ ('<' | escape) ~ '<' }}",
    "literals": (
        "{{ [] }}{{ {} }}{{ () }}{{ (1,) }}{{ [1] + [2] }}{{ {'a': [1, (2, 3)]} }}"
        "{{ 'a' in ['a'] }}{{ (1, 2) == (1, 2) }}"
    ),
    "operators": (
        "{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [0] * 2 }}{{ 2 * 'x' }}"
        "{{ -3 }}{{ 'x' * -1 }}{{ 10 ** 20 }}"
    ),
    "formatting": (
        "{{ '%s-%05d-%.2f-%%' % ('a', 3, 2.5) }}{{ '%s' | format(1) }}"
        "{{ '{:>5}|{a}|{{}}'.format('x', a=[1]) }}{{ '%(a)s' % {'a': 1} }}"
    ),
    "comparing": (
        "{{ 1 == 1.0 }}{{ 'a' < 'b' }}{{ none is none }}{{ 1 is number }}"
        "{{ messages is sequence }}{{ missing is defined }}"
    ),
    "filters": (
        "{{ ' a b ' | trim | upper | replace('A', 'x') | center(9) | indent(2) | title }}"
        "{{ [3, 1] | sort | join(',') }}"
        "{{ {'b': 1, 'A': 2} | dictsort }}{{ [[1], [2]] | sum(start=[]) }}{{ messages | map(attribute='role') | list }}"
        "{{ [1, 2, 3] | select('odd') | list }}{{ 'x' | default('y') }}"
        "{{ '' | default('y', true) }}{{ [1, 2, 3] | batch(2, 0) | list }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ 2.567 | round(1) }}{{ '<a>' | e }}{{ [1, 1] | unique | list }}"
    ),
    "string methods": (
        "{{ ' x '.strip() }}{{ 'a-b'.split('-') }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}"
        "{{ 'x'.join(['1', '2']) }}{{ 'é'.encode() }}"
    ),
    "macros": (
        "{% macro m(a, b=[1], c='x') %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}"
        "{{ caller() if caller }}{% endmacro %}"
        "{{ m(1) }}{{ m(1, 2, 3, 4, k=5) }}{% call m('q') %}body{% endcall %}"
    ),
    "namespaces": (
        "{% set n = namespace(a=1, self=2) %}{% for i in [1, 2] %}{% set n.a = n.a + i %}"
        "{% endfor %}{{ n.a }}{{ n.self }}{{ n }}"
    ),
    "private namespace names": "{% set n = namespace() %}{% set n._x = 1 %}",
    "private names at once": "{{ namespace(__class__=1) }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['a'], 1) }}{{ dict.mro is defined }}",
    "cycler and joiner": (
        "{% set c = cycler('a', 'b') %}{% set j = joiner('|') %}{{ c.next() }}{{ c.next() }}"
        "{{ j() }}{{ j() }}{{ c.current }}"
    ),
    "block assignment": "{% set x %}a{{ 1 }}b{% endset %}{{ x | length }}{{ x }}{% set y | upper %}q{% endset %}{{ y }}",
    "with and filter blocks": "{% with a = 1, b = [2] %}{{ a }}{{ b }}{% endwith %}{% filter upper %}abc{% endfilter %}",
    "blocks": "{% block a %}x{% endblock %}{{ self.a() }}",
    "undefined": "{{ missing }}{{ messages[0].missing }}{{ messages[99] }}|{{ missing | default('d') }}",
    "attribute of undefined": "{{ missing.name }}",
    "unknown filter": "{{ 1 | from_json }}",
    "unknown filter not reached": "{% if false %}{{ 1 | from_json }}{% endif %}ok",
    "unknown tag": "{% frobnicate %}",
    "not closed": "{% if true %}",
    "division by zero": "{{ 1 / 0 }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token is defined }}",
    "arguments": (
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}"
        "{{ continue_final_message is defined }}"
    ),
    "include": "{% include 'other' %}",
}


REFUSED = {
    *("generation is not closed", "break in generation", "loop over a number", "private namespace names"),
    *("private names at once", "attribute of undefined", "unknown filter", "unknown tag", "not closed"),
    *("division by zero", "include"),
}


@pytest.mark.parametrize("case", SYNTAX)
def test_syntax(judge: Any, case: str) -> None:
    assert (judge.agrees(SYNTAX[case], [SYSTEM, user("x"), ASSISTANT]) is None) == (case in REFUSED)


def test_generation_block_is_its_body(judge: Any) -> None:
    assert judge.agrees(SYNTAX["generation"], [user(), ASSISTANT]) == " user1\n assistant2\n"


def test_un_dashed_blocks_leave_no_lines(judge: Any) -> None:
    assert judge.agrees(SYNTAX["un-dashed blocks"], [user()]) == "a\nb\nc"


def test_variables_win_over_special_tokens(judge: Any) -> None:
    assert judge.agrees("{{ bos_token }}{{ enable_thinking }}", [user()], bos_token="B", enable_thinking=False) == "BFalse"


def test_a_special_token_the_model_lacks_is_undefined() -> None:
    assert render_chat("{{ bos_token is defined }}[{{ bos_token }}]", [user()]) == "False[]"

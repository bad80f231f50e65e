"""Hostile templates: no way out of the sandbox, and no way to keep the program busy or to fill the memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from llmctl.errors import ChatTemplateError
from llmctl.runtime.tokenizer import template_budget
from llmctl.runtime.tokenizer.chat_template import render_chat

USER = {"role": "user", "content": "Hi"}


def refused(template: str, **given: Any) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render_chat(template, [USER], **given)
    return str(caught.value)


ESCAPES = {
    "class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "class by filter": "{{ (''|attr('__class__')).__mro__ }}",
    "class by map": "{{ ([''] | map(attribute='__class__') | first).__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "globals of a method": "{{ dict.fromkeys.__func__.__globals__ }}",
    "globals of a class": "{{ cycler.__init__.__globals__.os }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "format string": "{{ '{0.__class__.__mro__}'.format(1).secret() }}",
    "format map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}).secret() }}",
    "a frame": "{{ ([1] | map('upper')).gi_frame.f_globals }}",
    "a private namespace name": "{{ namespace(_Namespace__attrs=1) }}",
    "an own filter": "{{ 1 | #tick }}",
    "another file": "{% include '/etc/passwd' %}",
    "a module": "{% from 'os' import system %}",
    "append": "{{ messages.append(messages[0]) }}",
    "pop": "{{ messages.pop() }}",
    "update": "{{ messages[0].update(role='system') }}",
    "clear": "{{ tools[0].clear() }}",
    "own list": "{% set l = [] %}{% set _ = l.append(1) %}",
}


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES.keys())
def test_the_sandbox_holds(template: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused(template, tools=tools)
    assert tools == [{"type": "function", "function": {"name": "f"}}]


def test_attributes_of_python_print_as_nothing() -> None:
    assert render_chat("{{ ''.__class__ }}{{ messages[0].__dict__ }}{{ '{0.__class__}'.format(1) }}", [USER]) == ""


# Each would run for minutes at least, or need gigabytes at least.
BOMBS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops whose test is false": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "a loop over text": "{% for a in 'x' * 1000000 %}{% for b in 'x' * 1000000 %}{% endfor %}{% endfor %}",
    "comparing in a loop": "{% set a = 'a' * 9000000 %}{% set b = 'a' * 9000000 %}"
    "{% for i in range(100000) %}{% if a == b %}{% endif %}{% endfor %}",
    "searching in a loop": "{% set a = 'a' * 9000000 %}{% for i in range(100000) %}{% if 'ab' in a %}{% endif %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "printing namespaces": "{% set n = namespace(s=namespace()) %}{% for i in range(60) %}"
    "{% set n.s = namespace(a=n.s, b=n.s) %}{% endfor %}{{ n }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless macro with a copy": "{% macro f(x) %}{{ f(x ~ 'a') }}{% endmacro %}{{ f('a' * 9000000) }}",
    "endless loop call": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "long text": "{{ 'a' * 10 ** 10 }}",
    "long text, count first": "{{ 10 ** 10 * 'a' }}",
    "long list": "{{ ['a'] * 10 ** 10 }}",
    "list of long texts": "{{ ['a' * 1000000] * 100000 }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "power of powers": "{% set n = namespace(x=10) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "number from text": "{% set x = ('f' * 9000000) | int(base=16) %}{{ x // (x + 1) }}",
    "doubled by plus": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled by tilde": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled lists": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "lists of lists": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "tuples of tuples": "{% set n = namespace(s=(1,)) %}{% for i in range(99) %}{% set n.s = (n.s, n.s) %}{% endfor %}"
    "{{ {n.s: 1} }}",
    "dicts of dicts": "{% set n = namespace(s={}) %}{% for i in range(99) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}",
    "dicts by call": "{% set n = namespace(s={}) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}",
    "dict of long texts": "{{ dict.fromkeys(range(100000), 'x' * 100000) }}",
    "many texts": "{% set n = namespace(l=[]) %}{% for i in range(100000) %}{% set n.l = n.l + ['x' * 99999 ~ i] %}{% endfor %}",
    "many namespaces": "{% set n = namespace(l=[]) %}{% for i in range(100000) %}"
    "{% set n.l = n.l + [namespace(s='x' * 100000)] %}{% endfor %}",
    "many slices": "{% set big = 'a' * 9000000 %}{% set n = namespace(l=[]) %}{% for i in range(100000) %}"
    "{% set n.l = n.l + [namespace(s=big[1:])] %}{% endfor %}",
    "much output": "{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}",
    "much output of constants": "{% for i in range(100000) %}" + "a" * 10_000 + "{% endfor %}",
    "much output in a macro": "{% macro m() %}{% for i in range(100000) %}"
    + "a" * 10_000
    + "{% endfor %}{% endmacro %}{{ m() }}",
    "much output in a block": "{% set x %}{% for i in range(100000) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
    "center filter": "{{ 'a' | center(10 ** 10) }}",
    "center": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "zfill": "{{ 'a'.zfill(width=10 ** 10) if false else 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "expandtabs with many tabs": "{{ ('\t' * 1000000).expandtabs(100000) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "percent width": "{{ '%010000000000d' % 1 }}",
    "percent width of a key": "{{ '%(a)10000000000d' % {'a': 1} }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent of bytes": "{{ '%10000000000d'.encode() % 1 }}",
    "percent many times": "{{ '%s' * 100000 % (('a' * 100000,) * 100000) }}",
    "format filter": "{{ '%010000000000d' | format(1) }}",
    "format width": "{{ '{:>10000000000}'.format('a') }}",
    "format width from an argument": "{{ '{:{}}'.format('a', '>10000000000') }}",
    "format map width": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "format many times": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('a' * 1000000).join(['b'] * 1000000) }}",
    "join filter": "{{ (['b'] * 100000) | join('a' * 1000000) }}",
    "join of mapped texts": "{{ (['x' * 1000] * 10000) | map('replace', 'x', 'y' * 100) | join }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "round": "{{ 1 | round(10 ** 9) }}",
    "sum of lists": "{{ ([[1]] * 200000) | sum(start=[]) | length }}",
    "json indent": "{{ (range(100000) | list) | tojson(indent=100000) }}",
    "json indent text": "{{ [[1]] | tojson(indent='x' * 300000000) }}",
    "json separators": "{{ ([1] * 1000000) | tojson(separators=('a' * 100000, ':')) }}",
    "strip": "{{ ('z' * 8000000).strip('a' * 4000000 ~ 'z') }}",
    "trim": "{{ ('z' * 8000000) | trim('a' * 4000000 ~ 'z') }}",
    "rfind": "{{ ('a' * 8000000).rfind('ab' ~ 'a' * 4000000) }}",
    "rsplit": "{{ ('a' * 8000000).rsplit('ab' ~ 'a' * 4000000) }}",
    "striptags": "{{ ('<!--' * 1000000) | striptags }}",
    "urlize": "{{ ('http://a' * 1000000) | urlize }}",
    "wordwrap": "{{ ('a ' * 1000000) | wordwrap(1) }}",
    "split": "{{ ('ab ' * 20000000).split() }}",
    "word count": "{{ ('ab ' * 20000000) | wordcount }}",
    "url encoding": "{{ ('é' * 30000000) | urlencode }}",
    "keys with equal hashes": "{{ dict.fromkeys(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)) }}",
    "pairs with equal hashes": "{{ dict(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | batch(2) | list) }}",
    "needles": "{% for i in range(100000) %}{{ ('a' * 400000).find('a' * 200000 ~ 'b') }}{% endfor %}",
    "sorting by a path": "{{ (range(100000) | list) | sort(attribute='real.' * 1000 ~ 'real') }}",
    "attribute path": "{{ ([1] * 100000) | map(attribute='real.' * 1000 ~ 'real') | list }}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.2)
    start = time.thread_time()
    message = refused(template)
    assert "was stopped: " in message  # by a bound, and not because memory or stack gave out
    assert time.thread_time() - start < 5


def test_a_range_is_short() -> None:
    assert "Range too big" in refused("{% for i in range(10**12) %}{% endfor %}")


def test_random_filler_is_not_there() -> None:
    assert "'lipsum' is undefined" in refused("{{ lipsum(n=10**9) }}")


NESTED = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "signs": "{{ " + "-" * 5000 + "1 }}",
    "a sum": "{{ " + "+".join(["1"] * 5000) + " }}",
    "attributes": "{{ a" + ".b" * 5000 + " }}",
    "loops": "{% for a in b %}" * 200 + "{% endfor %}" * 200,
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "a number": "{{ " + "9" * 100_000 + " }}",
}


@pytest.mark.parametrize("template", NESTED.values(), ids=NESTED.keys())
def test_nesting_that_cannot_be_compiled(template: str) -> None:
    assert refused(template).startswith("the chat template")


def test_an_enormous_template() -> None:
    assert "at most 131072 are accepted" in refused("a" * 131_073)


def test_self_reference_is_no_endless_loop() -> None:
    assert "{...}" in render_chat("{% set n = namespace() %}{% set n.a = [n] %}{{ n }}", [USER])


def test_time_is_processor_time_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that blocks stands for a busy machine: the render takes long and works little."""
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.2)

    def slow_clock() -> Any:
        import datetime

        time.sleep(0.4)
        return datetime.datetime(2025, 1, 1)

    loop = "{% for i in range(1000) %}{{ i }}{% endfor %}"
    assert render_chat("{{ strftime_now('%Y') }}" + loop, [USER], clock=slow_clock).startswith("20250123")


def test_a_bound_that_was_hit_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.05)
    template = "{% if messages[0].content == 'bad' %}{% for i in range(100000) %}{{ i }}{{ i }}{% endfor %}{% endif %}ok"
    with pytest.raises(ChatTemplateError, match="was stopped"):
        render_chat(template * 20, [{**USER, "content": "bad"}])
    assert render_chat(template, [USER]) == "ok"


def test_a_long_conversation_may_make_much_text() -> None:
    """Templates that gather all output in one string copy it with each message."""
    template = "{% set n = namespace(o='') %}{% for m in messages %}{% set n.o = n.o ~ m.content %}{% endfor %}{{ n.o }}"
    messages = [{"role": "user", "content": "x" * 2000}] * 1000
    assert render_chat(template, messages) == "x" * 2_000_000  # a gigabyte of copies


def test_threads_share_the_environment() -> None:
    template = "{% for i in range(200) %}{{ messages[0].content }}{% endfor %}"
    texts: dict[str, str] = {}

    def render(name: str) -> None:
        texts[name] = render_chat(template, [{"role": "user", "content": name}])

    threads = [threading.Thread(target=render, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {str(number): str(number) * 200 for number in range(8)}

"""What a hostile template may try. Refused or harmless; the work is counted, so no test measures
time: a template that ran on would meet the timeout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from jinja2 import Template

from engine.errors import TemplateError
from engine.text.template_budget import Budget
from engine.text.template_sandbox import TemplateSandbox
from tests.unit.engine.text.watched_templates import MESSAGES

_ROOT = Path(__file__).parents[4]

pytestmark = pytest.mark.timeout(30)

# Grows what it names to 2 ** 60 of its kind.
DOUBLED = (
    "{{% set n = namespace(v={}) %}}{{% for i in range(60) %}}{{% set n.v = {} %}}{{% endfor %}}"
)
LIST = DOUBLED.format("[1]", "[n.v, n.v]")
TUPLE = DOUBLED.format("(1,)", "(n.v, n.v)")
DICT = DOUBLED.format("{}", "{'a': n.v, 'b': n.v}").replace("v={}", "v=dict()")

RUNAWAYS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{% for i in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for c in 'x' * 400000 %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 10**10000 }}",
    DOUBLED.format("9", "n.v * n.v"),
    DOUBLED.format("'ab'", "n.v + n.v"),
    DOUBLED.format("'ab'", "n.v ~ n.v"),
    DOUBLED.format("'ab'", "[n.v, n.v] | join"),
    DOUBLED.format("'ab'", "''.join([n.v, n.v])"),
    DOUBLED.format("'ab'", "n.v.replace('a', 'aa')"),
    DOUBLED.format("'ab'", "n.v | replace('a', 'aa')"),
    DOUBLED.format("'ab'", "'%s%s' % (n.v, n.v)"),
    DOUBLED.format("'ab'", "'{}{}'.format(n.v, n.v)"),
    DOUBLED.format("[1]", "n.v + n.v"),
    "{% set n = namespace(v='ab') %}{% for i in range(60) %}{% set s %}{{ n.v }}{{ n.v }}"
    "{% endset %}{% set n.v = s %}{% endfor %}",
    LIST + "{{ n.v }}",
    LIST + "{{ n.v | tojson }}",
    LIST + "{{ n.v ~ '' }}",
    LIST + "{{ n.v | string }}",
    LIST + "{{ [n.v] | map('string') | list }}",
    LIST + "{{ '%s' % n.v }}",
    LIST + "{{ '%s' | format(n.v) }}",
    LIST + "{{ '{}'.format(n.v) }}",
    LIST + "{{ raise_exception(n.v) }}",
    LIST + "{% if n.v == [n.v] %}{% endif %}",
    LIST + "{% if n.v is in [[n.v]] %}{% endif %}",
    LIST + "{{ [n.v, [n.v]] | sort }}",
    LIST + "{{ [n.v].index([n.v]) }}",
    TUPLE + "{{ {n.v: 1} }}",
    TUPLE + "{{ {}[n.v] }}",
    TUPLE + "{{ {}.get(n.v) }}",
    TUPLE + "{{ [n.v] | unique | list }}",
    "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}",
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if s == s[1:] %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s.find('b') }}{% endfor %}",
    "{{ ('a ' * 900000).split() }}",
    "{% for i in range(9999) %}" + "static text " * 100 + "{% endfor %}",
]

TOO_WIDE = [
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ {} | tojson(indent=1000000000) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ 5 | round(-1000000000) }}",
]

UNAVAILABLE = [
    "{{ 'a'.ljust(9) }}",
    "{{ 'a'.zfill(9) }}",
    "{{ 'a'.expandtabs(9) }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({}) }}",
    "{{ '{a}'.format_map({'a': 1}) }}",
    "{{ 'a' | center(9) }}",
    "{{ 'a' | wordwrap(9) }}",
    "{{ 'a' | attr('upper') }}",
    "{{ lipsum() }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ messages.extend([1]) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].setdefault('a', 1) }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import path %}",
    "{% autoescape true %}x{% endautoescape %}",
    "{{ [[1], [2]] | sum(start=[]) }}",
]

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception._function.__globals__ }}",
    "{{ range.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__base__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ (range(3) | map('string')).gi_frame }}",
    "{{ missing._undefined_message }}",
    "{{ missing.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ [''] | sort(attribute='__class__') | map(attribute='__class__') | list }}",
    "{{ '{a.__class__}'.format(a='') }}",
    "{{ '{0.__init__.__globals__}'.format(range) }}",
    "{{ '%(__class__)s' % {'a': 1} }}",
    "{{ ''.format.__self__.__class__ }}",
    "{{ messages.append.__self__.__class__ }}",
    "{{ (1).real.__class__ }}",
    "{{ namespace(a=1).__class__ }}",
    "{{ namespace().__init__.__globals__['__builtins__'] }}",
    "{% set a = ''.__class__ %}{% for k in a.__mro__ %}{{ k.__subclasses__() }}{% endfor %}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ self.__dict__ }}",
    "{{ config.__class__.from_envvar.__globals__ }}",
    "{{ url_for.__globals__.__builtins__['__import__']('os').system('id') }}",
]

# What a request brings is data, and counted: see `watched_templates.EXTRA`.
OF_REQUESTS: dict[str, str | None] = {
    "{% for i in range(n) %}{% endfor %}": None,
    "{{ messages[0].content * n }}": None,
    "{{ messages[0][name] }}": "",
    "{{ messages[0] | map(attribute=name) | list }}": "[Undefined, Undefined]",
    "{{ namespace.__init__ }}": "",
    "{{ __builtins__ | tojson }}": '{"open": "a"}',
    "{{ messages[0].content }}": MESSAGES[0]["content"],
}


def fail(message: object) -> None:
    raise TemplateError(str(message))


SANDBOX = TemplateSandbox({"raise_exception": fail})


def _write_template(path: Path, source: str) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_chat_template(source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def render(source: str, **variables: Any) -> str:
    return run(SANDBOX.compile(source), {"messages": [{"role": "user"}], **variables})


def run(template: Template, variables: dict[str, Any]) -> str:
    return SANDBOX.run(template, variables, Budget(variables.values()))


class TestBounds:
    @pytest.mark.parametrize("source", RUNAWAYS)
    def test_a_runaway_ends(self, source: str) -> None:
        with pytest.raises(TemplateError):
            render(source)

    @pytest.mark.parametrize("source", TOO_WIDE)
    def test_numbers_that_would_ask_for_text_of_their_size(self, source: str) -> None:
        with pytest.raises(TemplateError):
            render(source)

    @pytest.mark.parametrize(
        "source",
        [
            "x" * 70_000,
            "{{ a }}" * 9_000,
            "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
            "{{ " + "-" * 50_000 + "1 }}",
            "{{ " + "not " * 10_000 + "1 }}",
            "{{ a" + ".b" * 20_000 + " }}",
            "{{ 1" + "+1" * 20_000 + " }}",
            "{{ " + "[" * 30_000 + " }}",
            "{{ " + "9" * 50_000 + " }}",
            "{% if a %}" * 3_000 + "{% endif %}" * 3_000,
            "{% for a in b %}" * 40 + "{% endfor %}" * 40,
            "{{ ",
            "{% unknown %}",
        ],
    )
    def test_a_source_that_no_template_needs(self, source: str) -> None:
        with pytest.raises(TemplateError):
            SANDBOX.compile(source)

    def test_the_input_earns_its_own_work(self) -> None:
        messages = [{"role": "user", "content": "word " * 200} for _ in range(5_000)]
        source = "{% for m in messages %}{{ m.role + ': ' ~ m['content'] | trim }}\n{% endfor %}"
        assert len(render(source, messages=messages)) == 5_000 * (6 + 999 + 1)

    def test_deep_input_is_refused(self) -> None:
        deep: list[Any] = []
        for _ in range(200):
            deep = [deep]
        with pytest.raises(TemplateError, match="nested more than 128 deep"):
            render("{{ deep }}", deep=deep)

    def test_a_rendering_leaves_the_next_one_its_whole_budget(self) -> None:
        template = SANDBOX.compile("{% for i in range(60000) %}x{% endfor %}")
        for _ in range(4):
            assert len(run(template, {})) == 60_000


class TestEscapes:
    @pytest.mark.parametrize("source", UNAVAILABLE)
    def test_what_templates_do_not_need_is_not_there(self, source: str) -> None:
        with pytest.raises(TemplateError):
            render(source)

    @pytest.mark.parametrize("source", ESCAPES)
    def test_nothing_of_python_is_reached(self, source: str) -> None:
        try:
            text = render(source)
        except TemplateError:
            return
        assert text in ("", "[]", "[Undefined]")

    @pytest.mark.parametrize("value", ["messages.append", "raise_exception", "namespace()", "self"])
    def test_only_data_is_printed(self, value: str) -> None:
        with pytest.raises(TemplateError, match="no data to show"):
            render(f"{{{{ {value} }}}}")

    def test_rendering_opens_runs_and_connects_nothing(self) -> None:
        # Also where templates fail: Jinja would compile code to show their lines.
        templates = [SANDBOX.compile(s) for s in ("{{ 1 / 0 }}", "{{ messages | tojson }}")]
        seen: list[str] = []
        thread = threading.get_ident()
        watching = True

        def audit(event: str, _: tuple[Any, ...]) -> None:
            if watching and threading.get_ident() == thread:
                seen.append(event)

        sys.addaudithook(audit)  # There is no way to remove it again: `watching` silences it.
        run(templates[1], {"messages": [1]})
        with pytest.raises(TemplateError, match="division by zero"):
            run(templates[0], {})
        watching = False
        assert not {"open", "exec", "compile", "import"} & set(seen)
        assert not any(event.startswith(("socket", "os.", "subprocess")) for event in seen)

    @pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
    @pytest.mark.timeout(240)
    def test_templates_of_files_touch_nothing_and_cost_little(
        self, tmp_path: Path, every: int
    ) -> None:
        escapes, others = ESCAPES[::every], (*UNAVAILABLE, *RUNAWAYS, *TOO_WIDE)[::every]
        assert len(escapes) >= 40 // every
        sources = [*escapes, *others, *OF_REQUESTS]
        for i, source in enumerate(sources):
            _write_template(tmp_path / f"{i:03d}.gguf", source)
        module = "tests.unit.engine.text.watched_templates"
        run = subprocess.run(
            [sys.executable, "-m", module, str(tmp_path)],
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        told = [json.loads(line) for line in run.stdout.splitlines()]
        assert len(told) == len(sources)
        for source, one in zip(sources, told, strict=True):
            assert not one["events"], source
            # Seconds of a processor, which no other process can take away.
            assert one["used_s"] <= 1, source
            assert one["grown"] <= 64 << 20, source
        for source, one in zip(escapes, told, strict=False):
            assert not re.search(r"class|<|module|uid=", one["shown"] or ""), source
        assert [one["shown"] for one in told[-len(OF_REQUESTS) :]] == list(OF_REQUESTS.values())

    def test_threads_spend_their_own_budgets(self) -> None:
        long = SANDBOX.compile("{% for i in range(60000) %}x{% endfor %}")
        endless = SANDBOX.compile("{% for i in range(10**9) %}x{% endfor %}")

        def work(number: int) -> int:
            if number % 2:
                return len(run(long, {}))
            with pytest.raises(TemplateError):
                run(endless, {})
            return 60_000

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(work, range(12))) == {60_000}


class TestLanguage:
    """Where Jinja and the two engines that templates are written for differ, or are easily broken."""

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("{{ {'a': [1, none, true, '<é>']} | tojson }}", '{"a": [1, null, true, "<é>"]}'),
            ("{{ [1, {'a': 2}] | tojson(indent=1) }}", '[\n 1,\n {\n  "a": 2\n }\n]'),
            ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}", '{"b":1,"a":2}'),
            ("{{ 'a' + missing + none }}", "a"),
            ("{{ 'a' + 1 }}", "a1"),
            ("{{ none ~ 'a' ~ missing ~ 1 }}", "a1"),
            ("{{ missing.a.b }}", ""),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}"
                "{% break %}{% endif %}{{ i }}{% endfor %}",
                "013",
            ),
            ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
            ("{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}", "a1"),
            (
                "{% for i in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
                "1/2False 2/2True ",
            ),
            (
                "{% for i in [1, [2, [3]]] recursive %}{% if i is iterable %}{{ loop(i) }}"
                "{% else %}{{ i }}{% endif %}{% endfor %}",
                "123",
            ),
            (
                "{% set n = namespace(a=1) %}{% for i in [1] %}{% set n.a = 2 %}{% endfor %}{{ n.a }}",
                "2",
            ),
            (
                "{% macro m(a, b='x') %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}"
                "{% call m(1) %}!{% endcall %}",
                "1x!",
            ),
            ("{{ [1, 2, 3] | select('odd') | length }}", "2"),
            ("{{ [{'a': 1}, {'b': 2}] | selectattr('a', 'defined') | list }}", "[{'a': 1}]"),
            ("{{ [{'a': 'x'}, {'a': 'y'}] | map(attribute='a') | join('-') }}", "x-y"),
            ("{{ [{'a': 1}, {'a': 2}] | sum('a') }}", "3"),
            ("{{ 'abc'[1:] }}{{ [1, 2, 3][::-1] }}", "bc[3, 2, 1]"),
            ("{{ '<&>' | safe }}{{ '<&>' }}", "<&><&>"),
            ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
            ("{{ '%03d|%s' % (7, 'x') }}{{ '{:>3}'.format('y') }}", "007|x  y"),
            ("{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}", "102433"),
            ("{% set l = [1] %}{% set _ = l.append(2) %}{{ l.pop(0) }}{{ l }}", "1[2]"),
            ("{% generation %}kept{% endgeneration %}", "kept"),
            ("{% if true %}\n  a\n{% endif %}\nb\n", "  a\nb"),
            ("{{ 'x' is string }}{{ {} is mapping }}{{ 1 is in [1] }}", "TrueTrueTrue"),
            ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
            ("{{ {'a': 1}.get('b', 2) }}{{ 'b' in {'a': 1} }}{{ 1 in missing }}", "2FalseFalse"),
        ],
    )
    def test_it_renders(self, source: str, expected: str) -> None:
        assert render(source) == expected

    def test_its_failures_carry_their_cause(self) -> None:
        with pytest.raises(TemplateError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(TemplateError, match="'nothing' is undefined"):
            render("{{ nothing() }}")

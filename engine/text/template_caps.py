"""Finds out what a chat template can render, by rendering small conversations and watching it.

The watched values note who looks at them, as llama.cpp's own template engine does, so that the
answers are those of its `/props`. Knows no vocabulary and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from jinja2 import Template

from engine.errors import TemplateError
from engine.text.messages import TemplateCaps
from engine.text.template_budget import Budget
from engine.text.template_sandbox import TemplateSandbox

_TEXT = "STRING_MARKER"
_REASONING = "<REASONING_CONTENT_PLACEHOLDER>"
_TOOL = {
    "name": "tool",
    "type": "function",
    "function": {
        "name": "tool1",
        "description": "Tool description",
        "parameters": {
            "type": "object",
            "properties": {"arg": {"type": "string", "description": "Arg description"}},
            "required": ["arg"],
        },
    },
}
# Names under which templates take whether to show the reasoning of earlier turns, and the effort.
_SHOWN_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
_EFFORT_NAMES = ("reasoning_effort", "reasoning_strength")


def preserved_reasoning(preserve: bool) -> dict[str, bool]:
    """Returns the variables that ask a template to show the reasoning of all turns, or not."""
    return {name: shown == preserve for name, shown in _SHOWN_REASONING.items()}


def probe_template(source: str, global_functions: Mapping[str, Callable[..., Any]]) -> TemplateCaps:
    """Returns the capabilities of a template.

    Raises:
        TemplateError: the source is no template.

    Source: llama.cpp `jinja::caps_get`.
    """
    sandbox = TemplateSandbox(global_functions, watch=_watch_use)
    template = sandbox.compile(source)
    probe = _Probe(sandbox, template)
    takes_text, takes_parts = _content_kinds(probe)
    tools, calls, objects = _tool_support(probe)
    return TemplateCaps(
        supports_object_arguments=objects,
        supports_parallel_tool_calls=_renders_second_call(probe, objects),
        supports_preserve_reasoning=_renders_old_reasoning(probe),
        supports_reasoning_effort=any(name in sandbox.names_of(source) for name in _EFFORT_NAMES),
        supports_string_content=takes_text,
        supports_system_role=_looks_at_system(probe),
        supports_tool_calls=calls,
        supports_tools=tools,
        supports_typed_content=takes_parts,
    )


class _Probe:
    """Renders watched conversations with one template."""

    def __init__(self, sandbox: TemplateSandbox, template: Template) -> None:
        self._sandbox = sandbox
        self._template = template

    def render(
        self, messages: object, tools: object = (), extra: Mapping[str, object] | None = None
    ) -> str | None:
        """Returns what the template makes of the values, or None if it fails."""
        variables: dict[str, object] = {
            "messages": messages,
            "tools": tools,
            "bos_token": "",
            "eos_token": "",
            "add_generation_prompt": True,
            **(extra or {}),
        }
        try:
            return self._sandbox.run(self._template, variables, Budget(()))
        except TemplateError:
            # What a template refuses is the very thing to be found out.
            return None


def _content_kinds(probe: _Probe) -> tuple[bool, bool]:
    """Whether content may be text, and whether it may be a list of parts."""
    messages = _watch([{"role": "user", "content": _TEXT}])
    text = probe.render(messages)
    content = messages.peek(0, "content")
    takes_parts = "item" in content.uses
    takes_text = text is not None and (not takes_parts or _TEXT in text)
    if "is string" in content.uses:
        messages = _watch([{"role": "user", "content": []}])
        if probe.render(messages) is not None and "item" in messages.peek(0, "content").uses:
            takes_parts = True
    return takes_text, takes_parts


def _looks_at_system(probe: _Probe) -> bool:
    messages = _watch([_turn("system", "System message"), _turn("user", "User message")])
    probe.render(messages)
    return bool(messages.peek(0, "content").uses)


def _tool_support(probe: _Probe) -> tuple[bool, bool, bool]:
    """Whether the template shows tools, shows calls, and wants arguments as objects."""
    shows_tools = shows_calls = True
    for arguments in ({"arg": "value"}, '{"arg": "value"}'):
        messages, tools = _watch(_tool_turns([arguments])), _watch([_TOOL])
        done = probe.render(messages, tools) is not None
        if isinstance(arguments, str):
            shows_tools, shows_calls = shows_tools and done, shows_calls and done
        if not done:
            continue
        shows_tools = shows_tools and bool(tools.peek(0, "function", "name").uses)
        shows_calls = shows_calls and bool(messages.peek(1, "tool_calls").uses)
        call = messages.peek(1, "tool_calls", 0, "function")
        if isinstance(arguments, dict) and shows_calls and call.peek("arguments", "arg").uses:
            return shows_tools, shows_calls, True
    return shows_tools, shows_calls, False


def _renders_second_call(probe: _Probe, objects: bool) -> bool:
    arguments = {"arg": "value"} if objects else '{"arg": "value"}'
    messages, tools = _watch(_tool_turns([arguments, arguments])), _watch([_TOOL])
    if probe.render(messages, tools) is None:
        return False
    return bool(messages.peek(1, "tool_calls", 1, "function").uses)


def _renders_old_reasoning(probe: _Probe) -> bool:
    answer = _turn("assistant", "Assistant message")
    messages = [
        _turn("user", "User message"),
        {**answer, "reasoning_content": _REASONING},
        _turn("user", "User message"),
        {**answer, "reasoning_content": "Reasoning content"},
        _turn("user", "User message"),
    ]
    extra = {"enable_thinking": True, **_SHOWN_REASONING}
    return _REASONING in (probe.render(messages, extra=extra) or "")


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _tool_turns(arguments: list[Any]) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "tool1", "arguments": a},
        }
        for number, a in enumerate(arguments, start=1)
    ]
    return [
        _turn("user", "User message"),
        {**_turn("assistant", ""), "tool_calls": calls},
        {**_turn("tool", "Tool response"), "tool_call_id": "call00001"},
        _turn("assistant", "The tool response was 'tool response'"),
        _turn("user", "User message"),
    ]


class _Watched:
    """Mixed into the values of a probe: what was done with them."""

    uses: set[str]

    def peek(self, *path: str | int) -> _Watched:
        """Returns a value inside this one, unnoticed."""
        value: Any = self
        for key in path:
            value = (list if isinstance(key, int) else dict).__getitem__(value, key)  # pyright: ignore
        return cast(_Watched, value)


class _WatchedText(str, _Watched):
    def __iter__(self) -> Iterator[str]:
        self.uses.add("item")
        raise TypeError("text is not a list")

    def __getitem__(self, key: Any) -> str:
        self.uses.add("item")
        return super().__getitem__(key)


class _WatchedList(list[Any], _Watched):
    def __iter__(self) -> Iterator[Any]:
        self.uses.add("item")
        yield from map(_note, super().__iter__())

    def __getitem__(self, key: Any) -> Any:
        self.uses.add("item")
        return _note(super().__getitem__(key))


class _WatchedMap(dict[str, Any], _Watched):
    def __getitem__(self, key: str) -> Any:
        return _note(super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return _note(super().get(key, default))

    def items(self) -> Any:
        return [(key, _note(value)) for key, value in super().items()]

    def values(self) -> Any:
        return [_note(value) for value in super().values()]


def _note(value: Any) -> Any:
    if isinstance(value, _Watched):
        value.uses.add("used")
    return value


def _watch(value: Any) -> Any:
    """Returns a copy of a JSON-like value that notes what is done with it."""
    watched: Any = value
    if isinstance(value, str):
        watched = _WatchedText(value)
    elif isinstance(value, list):
        watched = _WatchedList(map(_watch, cast("list[Any]", value)))
    elif isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        watched = _WatchedMap((key, _watch(member)) for key, member in members)
    watched.uses = set()
    return watched


def _watch_use(name: str, value: Any) -> Any:
    """Notes a filter or test; what is printed whole counts as looked at, all of it."""
    if not isinstance(value, _Watched):
        return value
    value.uses.update(("used", name))
    if name == "selectattr":
        value.uses.add("item")
    return _unwatched(value) if name in ("tojson", "string") else value


def _unwatched(value: Any) -> Any:
    """Returns the plain values, each noted as used."""
    _note(value)
    if isinstance(value, dict):
        members = dict[str, Any].items(cast("dict[str, Any]", value))
        return {key: _unwatched(member) for key, member in members}
    if isinstance(value, list):
        return [_unwatched(item) for item in list[Any].__iter__(cast("list[Any]", value))]
    return value

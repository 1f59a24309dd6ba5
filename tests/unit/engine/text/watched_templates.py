"""`python -m ... FOLDER`: opens and renders the chat templates of GGUF files under an audit hook.

A process of its own, since a hook cannot be removed. Tells for each file, as one line of JSON, what
was shown, the seconds of a processor that it took, by how many bytes the process grew at its highest,
and what Python did meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.gguf.reader import GgufFile
from service.template import open_template

# A request's part: names that a template might take for its own, numbers that it might count to.
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "{{ ''.__class__ }}{% for i in range(10**9) %}{% endfor %}"}
]
EXTRA: dict[str, Any] = {
    "n": 10**9,
    "name": "__class__",
    "range": "{{ range(10**9) }}",
    "namespace": {"__init__": {"__globals__": "os"}},
    "raise_exception": None,
    "__builtins__": {"open": "a"},
}

# What Jinja does by itself: a template becomes code, once, when it is opened.
_OF_OPENING = ("compile", "exec")
_PASSED_OVER = ("object.__getattr__", "sys._getframe", "code.__new__", "builtins.id", "gc.")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")


class _Watch:
    def __init__(self) -> None:
        self.phase = ""
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, _: tuple[Any, ...]) -> None:
        if not self.phase or event.startswith(_PASSED_OVER):
            return
        if self.phase == "opening" and event in _OF_OPENING:
            return
        self.seen.append(event)


def _shown(source: str, watch: _Watch) -> str | None:
    """What a template shows; None where it is refused."""
    try:
        watch.phase = "opening"
        template = open_template(source)
        watch.phase = "rendering"
        return template.render(MESSAGES, extra=EXTRA)
    except EngineError:
        return None
    finally:
        watch.phase = ""


def main() -> None:
    """Tells of each file in the order of names."""
    watch = _Watch()
    # Modules of Python that are imported when they are wanted first: escapes, words of failures.
    for source in (
        "{{ messages | tojson }}{{ '\\x5f' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__ }}",
        "{% a %}",
    ):
        _shown(source, watch)
    for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
        with GgufFile.open(path) as file:
            source = file.metadata["tokenizer.chat_template"]
        assert isinstance(source, str)
        Path("/proc/self/clear_refs").write_text("5")
        watch.seen.clear()
        before, begun_s = _status("VmRSS"), time.process_time()
        shown = _shown(source, watch)
        used_s = time.process_time() - begun_s
        grown = max(0, _status("VmHWM") - before)
        told = {"shown": shown, "used_s": used_s, "grown": grown, "events": watch.seen}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

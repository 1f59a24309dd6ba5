"""The page at `/` in a headless Chromium: what a person does with it, by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.e2e.browser import ENTER, ESCAPE, TAB, Browser, browsing
from tests.e2e.conftest import Start

pytestmark = pytest.mark.slow

_IS_IDLE = "return !document.querySelector('#send').disabled"
_IS_BUSY = "return document.querySelector('#send').disabled"
_LAST = "#log .turn:last-child"


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with browsing() as window:
        yield window


@pytest.fixture(scope="module")
def url(start: Start) -> Generator[str]:
    with start() as program:
        yield program.ready().http_url()


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    browser.open(url)
    browser.wait(lambda: "kv" in browser.text("#pool-list"), "the pools")
    return browser


def _set(page: Browser, **values: float) -> None:
    for name, value in values.items():
        page.run("document.querySelector('#' + arguments[0]).value = arguments[1]", name, value)


def test_an_answer_streams_and_the_lists_follow(page: Browser):
    _set(page, limit=8, temperature=0)
    page.type("#prompt", "Hi" + ENTER)
    page.wait(lambda: page.run(_IS_IDLE) and page.text(_LAST).startswith("Model"), "the answer")
    assert len(page.text(_LAST)) > len("Model")
    assert "tokens/s" in page.text("#rates")
    page.wait(lambda: " of " in page.text("#slot-list"), "a slot that holds the chat")
    assert "The answer is complete" in page.text("#said")


def test_escape_stops_an_answer(page: Browser):
    # The most likely token never ends an answer of this model.
    _set(page, limit=100_000, temperature=0)
    page.type("#prompt", "Hi" + ENTER)
    page.wait(lambda: page.run(_IS_BUSY), "the start")
    page.keys(ESCAPE)
    page.wait(lambda: page.run(_IS_IDLE), "the end")
    assert page.text(_LAST).endswith("stopped")
    assert page.text("#said") == "Stopped."


def test_everything_is_reached_by_tab(page: Browser):
    seen: set[str] = set()
    page.run("document.querySelector('#prompt').focus()")
    for _ in range(40):
        page.keys(TAB)
        seen.add(page.focused())
    assert {
        "send",
        "clear",
        "slot-file",
        "save-0",
        "restore-0",
        "erase-0",
        "pool-kv",
        "plan",
    } <= seen


def test_what_a_model_writes_is_text(page: Browser):
    script = "const t = { role: 'assistant', content: arguments[0] }; show(t); return t.box.children.length"
    assert page.run(script, "<img src=x onerror=alert(1)><b>bold</b>") == 3
    assert page.text(_LAST).endswith("<b>bold</b>")


def test_nothing_is_fetched_from_anywhere_else(page: Browser, url: str):
    names = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert names
    assert all(name.startswith(url) for name in names)


def test_a_key_is_asked_for_and_kept_for_the_session(browser: Browser, start: Start):
    with start("--api-key", "secret-key") as program:
        browser.open(program.ready().http_url())
        browser.wait(lambda: "Invalid API Key" in browser.text("#model"), "the refusal")
        browser.run("document.querySelector('#settings').open = true")
        browser.type("#key", "secret-key" + TAB)
        browser.wait(lambda: " of " in browser.text("#slot-list"), "the slots")
        assert "secret-key" not in browser.run("return document.body.innerText")
        browser.run("sessionStorage.clear()")


def test_a_lost_server_is_told_and_found_again(browser: Browser, start: Start):
    with start() as program:
        browser.open(program.ready().http_url())
        browser.wait(lambda: browser.run("return document.querySelector('#lost').hidden"), "it")
    browser.wait(
        lambda: not browser.run("return document.querySelector('#lost').hidden"), "the loss"
    )
    assert browser.text("#said") == "The server does not answer."

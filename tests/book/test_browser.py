"""Every page of the book in a real browser: nothing fetched from elsewhere, nothing broken, legible on a phone, accessible."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import axe_playwright_python
import pytest
import yaml
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    reason = "NO PAGE OF THE BOOK WAS LOOKED AT: none of chromium, chromium-browser, google-chrome is on the PATH"
    if os.environ.get("CI"):
        raise RuntimeError(reason)
    pytest.skip(reason, allow_module_level=True)

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    # Nothing but this machine has an address: a page that needs another origin fails instead of fetching.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
TOC = yaml.safe_load((Path(__file__).parents[2] / "_toc.yml").read_text(encoding="utf-8"))
PAGES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]

RAW_MATH = re.compile(r"\\\(|\\\[|\$\$|\\(?:frac|sqrt|sum|cdot|times|mathrm|text|begin)\b")
PROSE = """[...document.querySelectorAll('article.bd-article')].map(article => {
    const copy = article.cloneNode(true);
    copy.querySelectorAll('pre, code, mjx-container, script').forEach(node => node.remove());
    return copy.textContent;
}).join(' ')"""
HEADINGS = "[...document.querySelectorAll('article.bd-article :is(h1,h2,h3,h4,h5,h6)')].map(h => Number(h.tagName[1]))"
IMAGES = "[...document.querySelectorAll('article.bd-article img')].map(image => image.getAttribute('alt') || '')"
SERIOUS = """axe.run(document, {preload: false, resultTypes: ['violations']}).then(found => found.violations
    .filter(one => ['serious', 'critical'].includes(one.impact))
    .map(one => `${one.id}: ${one.nodes.map(node => node.html.slice(0, 120)).slice(0, 3).join(' | ')}`))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve files without a line per request."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(book: Path) -> Iterator[str]:
    """Serve the book and return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(book)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start one browser with an empty profile."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


class Reader:
    """A browser window of one width and colour scheme, with what went wrong on the page it shows."""

    def __init__(self, browser: Browser, site: str, width: int, scheme: str) -> None:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.add_init_script(f"localStorage.setItem('mode', '{scheme}'); localStorage.setItem('theme', '{scheme}')")
        self.site, self.page = site, context.new_page()
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.note_request(request.url))
        self.page.on("response", lambda answer: self.note_error(answer.status >= 400, f"{answer.status} {answer.url}"))
        self.page.on("console", lambda message: self.note_error(message.type == "error", message.text))
        self.page.on("pageerror", lambda error: self.note_error(True, str(error)))

    def note_request(self, url: str) -> None:
        """Keep a request that leaves the book."""
        if not url.startswith((self.site, "data:", "blob:")):
            self.foreign.append(url)

    def note_error(self, wrong: bool, text: str) -> None:
        """Keep an error."""
        if wrong:
            self.errors.append(text)

    def open(self, address: str) -> Page:
        """Show a page, mathematics set, and forget what was wrong with the one before."""
        self.foreign.clear()
        self.errors.clear()
        self.page.goto(self.site + address, wait_until="load")
        self.page.evaluate("window.MathJax?.startup?.promise")
        return self.page

    def axe(self) -> list[str]:
        """Return the serious and critical faults that axe finds on the page."""
        self.page.add_script_tag(path=AXE)
        found: list[str] = self.page.evaluate(SERIOUS)
        return found


@pytest.fixture(scope="module")
def desk(browser: Browser, site: str) -> Reader:
    """Return a reader at a desk, light colours."""
    return Reader(browser, site, 1280, "light")


@pytest.fixture(scope="module")
def dark(browser: Browser, site: str) -> Reader:
    """Return a reader at a desk, dark colours."""
    return Reader(browser, site, 1280, "dark")


@pytest.fixture(scope="module")
def phone(browser: Browser, site: str) -> Reader:
    """Return a reader on a phone."""
    return Reader(browser, site, 360, "light")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_and_asks_no_other_origin(desk, name):
    page = desk.open(f"{name}.html")
    assert desk.foreign == [], "the page asks another origin"
    assert desk.errors == []
    if page.evaluate("document.querySelectorAll('article.bd-article .math').length"):
        assert page.evaluate("document.querySelectorAll('article.bd-article mjx-container').length") > 0
    assert page.evaluate("document.querySelectorAll('mjx-merror').length") == 0
    assert not RAW_MATH.search(page.evaluate(PROSE)), "raw LaTeX shows"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_accessible_in_light_and_dark(desk, dark, name):
    page = desk.open(f"{name}.html")
    headings = page.evaluate(HEADINGS)
    assert headings[0] == 1, "the first heading is the title"
    assert headings.count(1) == 1, "one title a page"
    assert all(after <= before + 1 for before, after in pairwise(headings)), f"a level is skipped: {headings}"
    for alt in page.evaluate(IMAGES):
        assert " " in alt.strip(), f"alt text {alt!r} says nothing"
        assert not alt.startswith(("<", "_images", "../")), f"alt text {alt!r} is not written for people"
    assert desk.axe() == []
    dark.open(f"{name}.html")
    assert dark.axe() == []


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_phone(phone, name):
    page = phone.open(f"{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "the page scrolls sideways"
    assert phone.foreign == []
    assert phone.errors == []


def test_search_finds_a_page_without_a_network(desk):
    page = desk.open("search.html?q=memory")
    page.wait_for_selector("#search-results ul.search li a", timeout=10_000)
    assert desk.foreign == []
    assert desk.errors == []


def test_code_can_be_copied(desk):
    page = desk.open(next(page for page in PAGES if page.startswith("notebooks/")) + ".html")
    assert page.locator("button.copybtn").count() > 0


def test_contents_open_on_a_phone(phone):
    page = phone.open(f"{TOC['root']}.html")
    page.locator("button.primary-toggle:visible").first.click()
    link = page.locator(".bd-sidebar-primary a", has_text="ledger").first
    link.wait_for(state="visible")
    link.click()
    page.wait_for_url("**/ledger.html")

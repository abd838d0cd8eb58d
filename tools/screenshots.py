"""Looks at the built site in a browser: screenshots, pages too wide for a phone, search.

``python -m tools.screenshots`` needs ``pip install playwright`` and Debian's ``chromium``. It
writes pictures for reviewers into ``docs/_build/screenshots``. It exits with 1 if a page of the
site can be scrolled sideways on a phone, or if the site's search does not find the page of one of
the `QUESTIONS` readers ask, or does not show that of one of `WORDS` first.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tools.site import BUILT, QUESTIONS, WORDS

HTML, SHOTS = BUILT / "html", BUILT / "screenshots"
SCREENS = {"desktop": (1280, 800), "phone": (390, 844)}
PAGES = {
    "start": "index.html",
    "concept": "concepts/batch.html",
    "api": "reference/collectors/Collector.html",
    "benchmarks": "benchmarks.html",
}
SHOWN = 3
"""Answers that a reader looks at."""


def main() -> int:
    """Take the pictures; return 1 if something is wrong with the site."""
    SHOTS.mkdir(exist_ok=True)
    with _served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for name, path in PAGES.items():
            for screen in SCREENS:
                _shoot(browser, f"{address}/{path}", screen, SHOTS / f"{name}-{screen}.png")
        _shoot(
            browser, f"{address}/{PAGES['concept']}", "desktop", SHOTS / "concept-dark.png", "dark"
        )
        problems = [*_too_wide(browser, address), *_not_found(browser, address)]
        browser.close()
    print("\n".join(problems))
    return bool(problems)


@contextlib.contextmanager
def _served() -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    handler = functools.partial(Quiet, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _page(browser: Any, screen: str, colours: str = "light") -> Any:
    width, height = SCREENS[screen]
    return browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)


def _shoot(browser: Any, address: str, screen: str, path: Path, colours: str = "light") -> None:
    page = _page(browser, screen, colours)
    page.goto(address)
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)
    page.close()


def _too_wide(browser: Any, address: str) -> Iterator[str]:
    page = _page(browser, "phone")
    for file in sorted(HTML.rglob("*.html")):
        name = str(file.relative_to(HTML))
        if not name.startswith(("_modules", "_static", "search", "genindex")):
            page.goto(f"{address}/{name}", wait_until="domcontentloaded")
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > SCREENS["phone"][0]:
                yield f"{name}: {width} pixels wide on a phone"
    page.close()


def _not_found(browser: Any, address: str) -> Iterator[str]:
    page = _page(browser, "desktop")
    for question, wanted in (QUESTIONS | WORDS).items():
        page.goto(f"{address}/search.html?q={urllib.parse.quote_plus(question)}")
        page.wait_for_function("document.querySelector('#search-results p.search-summary')")
        page.wait_for_function(
            "!document.querySelector('#search-progress')?.textContent.includes('.')"
        )
        links = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
        found = [link.removeprefix(f"{address}/").partition(".html")[0] for link in links]
        best = list(dict.fromkeys(found))[: 1 if question in WORDS else SHOWN]
        if wanted not in best:
            yield f"search for {question!r} finds {best}, not {wanted}"
    page.close()


if __name__ == "__main__":
    sys.exit(main())

"""Opens pages in a real browser and watches them: an error on the console, an exception and a
request that leaves the file make the test fail."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    Page = Browser = Any
    sync_playwright = None

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, HIGH = 1280, 900


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Opener:
    """Opens a file or an address, with a fragment, and waits until it is drawn."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self._forgiven: list[str] = []
        self.wrong: list[str] = []

    def __call__(
        self, target: Path | str, fragment: str = "", *, theme: str = "light", width: int = WIDE,
        height: int = HIGH, is_served: bool = False, **options: Any,
    ) -> Page:  # fmt: skip
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme,
            accept_downloads=True, permissions=["clipboard-read", "clipboard-write"], **options,
        )  # fmt: skip
        self._contexts.append(context)
        page = context.new_page()
        address = target.as_uri() if isinstance(target, Path) else target
        watch(page, self.wrong, "http://127.0.0.1" if is_served else "file:")
        page.goto(f"{address}#{fragment}" if fragment else address)
        page.wait_for_selector("#verdict, .runs, .banner")
        settle(page)
        return page

    def forgive(self, words: str) -> None:
        """What a test provokes is no mistake of the page."""
        self._forgiven.append(words)

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        left = [one for one in self.wrong if not any(words in one for words in self._forgiven)]
        assert not left, "\n".join(left)


def watch(page: Page, wrong: list[str], allowed: str) -> None:
    page.set_default_timeout(60_000)  # beside load
    page.on("pageerror", lambda error: wrong.append(f"exception: {error}"))
    page.on(
        "console",
        lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None,
    )
    page.on("dialog", lambda dialog: wrong.append(f"a dialog opened: {dialog.message}"))
    page.on("request", lambda asked: check_request(asked.url, wrong, allowed))


def check_request(url: str, wrong: list[str], allowed: str) -> None:
    if not url.startswith((allowed, "data:", "blob:")):
        wrong.append(f"asked for {url[:100]}")


def settle(page: Page) -> None:
    """What is below the verdict is there, matrices are unpacked, canvases drawn."""
    deadline = time.monotonic() + 20
    # Not wait_for_function: that evaluates text, which the page's policy forbids.
    while page.evaluate(
        """() => document.querySelector('main[aria-busy="true"]') !== null
            || /unpacking…|reading…/.test(document.body.innerText)"""
    ):
        assert time.monotonic() < deadline, "a view is still unpacking"
        time.sleep(0.05)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")


def count_colours(page: Page, section: str) -> int:
    """Of the canvases of a section: a picture that was not drawn has one."""
    return page.evaluate(
        """(id) => {
          const seen = new Set();
          for (const canvas of document.querySelectorAll(`#${id} canvas:not(.over)`)) {
            if (!canvas.width || !canvas.height) continue;
            const ctx = canvas.getContext("2d");
            const { data } = ctx.getImageData(0, 0, canvas.width, canvas.height);
            for (let i = 0; i < data.length; i += 4 * 7)
              seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
          }
          return seen.size;
        }""",
        section,
    )


def fragment_of(page: Page) -> dict[str, str]:
    """What the address says."""
    text = page.evaluate("location.hash.slice(1)")
    return dict(part.split("=", 1) for part in text.split("&") if part)


def text_of(page: Page, selector: str) -> str:
    return " ".join(page.locator(selector).first.inner_text().split())


def read_data(path: Path) -> dict[str, Any]:
    """The document that a page carries."""
    text = path.read_text(encoding="utf-8")
    start = text.index('id="meshscope-data">') + len('id="meshscope-data">')
    return json.loads(text[start : text.index("</script>", start)])

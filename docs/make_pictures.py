"""Takes the pictures of docs/page.md from real runs, in Debian's Chromium.

    make pictures                                                # records the runs first
    .venv-browser/bin/python docs/make_pictures.py FOLDER        # pages that are there already
    .venv-browser/bin/python docs/make_pictures.py FOLDER demo   # one of them

Pictures have a palette of 256 colours, chosen so that small marks keep theirs:
all together stay below 1.5 MB.
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser_pages import Browser, Page, find_browser, settle, sync_playwright

TARGET = Path(__file__).parent / "pictures"
NUM_COLOURS, NUM_EXACT = 256, 128
MAX_CONSIDERED = 6000
MAX_BYTES = 1_500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A part of a page, in a state."""

    page: str
    selector: str = ""
    """Empty: the window."""
    fragment: str = ""
    width: int = 1180
    height: int = 900
    theme: str = "light"


PICTURES = {
    "demo": Picture(page="demo", width=1280, height=860),
    "overview": Picture(page="slow", width=1280, height=1010),
    "overview_dark": Picture(page="slow", width=1280, height=1010, theme="dark"),
    "verdict": Picture(page="slow", selector="#verdict"),
    "lamps": Picture(page="slow", selector=".lamps"),
    "budget": Picture(page="slow", selector="#budget"),
    "findings": Picture(page="slow", selector="#findings"),
    "heat": Picture(page="slow", selector="#heat"),
    "mesh": Picture(page="slow", selector="#mesh"),
    "rank_budget": Picture(page="slow", selector="#rank-budget"),
    "timeline": Picture(page="slow", selector="#timeline"),
    "bubble": Picture(page="slow", selector="#pipeline"),
    "communication": Picture(page="slow", selector="#communication"),
    "bandwidth": Picture(page="slow", selector="#bandwidth"),
    "pairs": Picture(page="slow", selector="#pairs"),
    "training": Picture(page="diverged", selector="#training"),
    "memory": Picture(page="slow", selector="#memory"),
    "trust": Picture(page="slow", selector="#trust"),
    "ranks": Picture(page="slow", selector="#ranks"),
    "waits": Picture(page="stuck", width=1280, height=560),
    "compare": Picture(page="compare", width=1280, height=900),
    "selection": Picture(page="slow", fragment="v=heat&s=15-29&r=5", width=1280, height=720),
}


def take(browser: Browser, folder: Path, picture: Picture) -> bytes:
    size = {"width": picture.width, "height": picture.height}
    context = browser.new_context(viewport=size, color_scheme=picture.theme)
    page: Page = context.new_page()
    address = (folder / f"{picture.page}.html").resolve().as_uri()
    page.goto(f"{address}#{picture.fragment}" if picture.fragment else address)
    page.wait_for_selector("#verdict")
    settle(page)
    page.wait_for_timeout(400)
    found = (
        page.locator(picture.selector).first.screenshot() if picture.selector else page.screenshot()
    )
    context.close()
    return found


def quantise(picture: bytes) -> bytes:
    """With a small palette, which is a third of the size and looks the same."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    palette = choose_palette(image)
    # Not Image.quantize: it rounds before it looks for the nearest colour.
    pixels = np.asarray(image, dtype=np.int64) @ (1 << 16, 1 << 8, 1)
    packed, place = np.unique(pixels, return_inverse=True)
    colours = np.stack((packed >> 16, packed >> 8 & 255, packed & 255), axis=1)
    nearest = np.argmin(((colours[:, None] - palette[None]) ** 2).sum(2), axis=1)
    small = Image.fromarray(nearest[place].reshape(pixels.shape).astype(np.uint8), "P")
    small.putpalette(palette.astype(np.uint8).tobytes())
    written = io.BytesIO()
    small.save(written, "PNG", optimize=True)
    return written.getvalue()


def choose_palette(image: Image.Image) -> np.ndarray:
    """The most frequent colours as they are, surfaces and marks; then those that are farthest from
    what is there, by distance and count, for the edges of letters."""
    counted = sorted(image.getcolors(1 << 24), reverse=True)[:MAX_CONSIDERED]
    count = np.array([one[0] for one in counted], dtype=np.float64)
    colour = np.array([one[1] for one in counted], dtype=np.float64)
    chosen = list(range(min(NUM_EXACT, len(colour))))
    apart = np.min([((colour - colour[one]) ** 2).sum(1) for one in chosen], axis=0)
    while len(chosen) < min(NUM_COLOURS, len(colour)):
        chosen.append(int(np.argmax(apart * np.sqrt(count))))
        apart = np.minimum(apart, ((colour - colour[chosen[-1]]) ** 2).sum(1))
    return colour[chosen]


def main() -> int:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(PICTURES)
    TARGET.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox"], timeout=60_000
        )
        for name in names:
            (TARGET / f"{name}.png").write_bytes(quantise(take(browser, folder, PICTURES[name])))
        browser.close()
    total = sum(path.stat().st_size for path in TARGET.glob("*.png"))
    sys.stdout.write(f"{len(names)} pictures taken; {TARGET} has {total / 1e6:.2f} MB\n")
    return 0 if total <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())

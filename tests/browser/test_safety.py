"""Names are text, whatever they are; a page to be shared names no machine; nothing is fetched."""

import pytest
from click.testing import CliRunner

from browser_pages import settle, text_of
from builders import make_run
from meshscope.cli import main
from meshscope.core.layout import Layout

SCRIPT = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
NAMES = {
    "script": SCRIPT,
    "markup": "<b onmouseover=window.hurt=1>bold</b><svg onload='window.hurt=1'>&lt;&#x41;",
    "bidi": "ab\u202e\u2066dc\u0000\u001b[31m\u009b\u2028\u200f",
    "long": "x" * 100_000,
    "formula": "=HYPERLINK(1)+@SUM(1)",
}
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f"


def make_page(folder, name, *flags):
    path = folder / "page.html"
    done = CliRunner().invoke(main, ["report", str(folder / name), "-o", str(path), *flags])
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(params=list(NAMES))
def hostile(request, tmp_path):
    name = NAMES[request.param]
    make_run(
        tmp_path / "run",
        layout=Layout(dp=2, pp=2),
        num_steps=12,
        phases=(("forward", 4_000_000), (name[:60_000], 2_000_000), ("backward", 5_000_000)),
        scalars={"loss": lambda rank, step: 4.0 - step / 10, name[:200]: lambda rank, step: step},
        host=lambda rank: name[:250],
        header={"provenance": {"argv": [name], "hostname": name}},
    )
    return tmp_path


def test_hostile_names_are_inert_and_visible(hostile, opened):
    page = opened(make_page(hostile, "run"))
    for step in ("m", "m", "o", "o", "j", "t"):
        page.keyboard.press(step)
    for canvas in page.locator(".canvas").all()[:12]:
        if canvas.is_visible():
            canvas.hover(force=True)
    page.locator("#heat .menu > button").last.click()
    page.locator("#heat .menu").get_by_text("As table").click()
    settle(page)
    assert page.evaluate("window.hurt") is None
    assert page.locator("img").count() == 0
    body = page.evaluate("document.body.innerText")
    assert not set(BIDI) & set(body)
    widest = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert widest <= 0
    assert page.evaluate("document.documentElement.scrollHeight") < 20_000


def test_a_redacted_page_names_no_machine(tmp_path, opened):
    make_run(
        tmp_path / "secret_place" / "run",
        layout=Layout(dp=2),
        num_steps=12,
        host=lambda rank: "node-17.corp",
        header={"provenance": {"argv": ["/home/someone/train.py", "--key", "hunter2"]}},
    )
    words = ("node-17.corp", "secret_place", "someone", "hunter2", str(tmp_path))
    folder = tmp_path / "secret_place"
    whole = make_page(folder, "run").read_text(encoding="utf-8")
    assert all(word in whole for word in words[:4])
    path = make_page(folder, "run", "--redact")
    text = path.read_text(encoding="utf-8")
    assert not [word for word in words if word in text]
    page = opened(path)
    assert "are left out" in text_of(page, "header.top")
    assert "host 1" in text_of(page, "#ranks")


def test_the_policy_of_the_page_stops_what_is_put_into_it(pages, opened):
    page = opened(pages / "slow.html")
    ran = page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.hurt = 1";
          document.body.append(script);
          return window.hurt ?? null;
        }"""
    )
    assert ran is None
    opened.forgive("Content Security Policy")

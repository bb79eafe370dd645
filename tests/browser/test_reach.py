"""Everybody can use it: axe-core, 200 % zoom, narrow windows, forced colours, paper."""

import pytest

from browser_pages import ROOT, count_colours, settle

AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = ("slow", "dp", "diverged", "traces", "stuck", "compare")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_violation(pages, opened, name, theme):
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: make web/node_modules/.installed")
    page = opened(pages / f"{name}.html", theme=theme, bypass_csp=True)
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes']][:4]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not serious, "\n".join(serious)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scale"), [(640, 2), (420, 1), (1920, 1)])
def test_nothing_is_cut_off_at_any_width(pages, opened, name, width, scale):
    """640 px with two device pixels each is a window of 1280 at 200 %."""
    page = opened(pages / f"{name}.html", width=width, device_scale_factor=scale)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    cut = page.evaluate(
        """() => [...document.querySelectorAll("section.card, .lamp")].filter((one) => {
          const box = one.getBoundingClientRect();
          return box.width > 0 && (box.left < -1 || box.right > innerWidth + 1);
        }).map((one) => one.id)"""
    )
    assert cut == []


def test_targets_are_large_enough(pages, opened):
    page = opened(pages / "slow.html")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, select, summary, input")].filter((one) => {
          const box = one.getBoundingClientRect();
          return box.height > 0 && (box.height < 23.5 || box.width < 20);
        }).map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert small == []


def test_forced_colours_and_paper_keep_the_pictures(pages, opened):
    page = opened(pages / "slow.html", forced_colors="active")
    assert count_colours(page, "timeline") >= 4
    page = opened(pages / "slow.html", theme="dark")
    page.emulate_media(media="print")
    settle(page)
    assert not page.locator(".strip").is_visible()


def test_every_picture_has_a_sentence(pages, opened):
    for name in PAGES:
        page = opened(pages / f"{name}.html")
        silent = page.evaluate(
            """() => [...document.querySelectorAll("canvas:not(.over), [role=img]")]
                .filter((one) => !one.closest("[aria-hidden=true]") && !one.closest(".uplot")
                    && !(one.getAttribute("aria-label") ?? "").trim())
                .map((one) => one.outerHTML.slice(0, 80))"""
        )
        assert silent == [], name

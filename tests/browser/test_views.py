"""Every view has its data: of a 2×2×2 run, a data-parallel run, traces, a hang and a comparison."""

import pytest

from browser_pages import count_colours, read_data, settle, text_of

SECTIONS = {
    "slow": (
        "verdict", "budget", "findings", "heat", "mesh", "rank-budget", "timeline", "pipeline",
        "communication", "bandwidth", "pairs", "training", "memory", "prediction", "trust", "ranks",
    ),
    "dp": (
        "verdict", "budget", "findings", "heat", "mesh", "rank-budget", "timeline",
        "communication", "bandwidth", "training", "memory", "trust", "ranks",
    ),
    "diverged": ("verdict", "budget", "findings", "heat", "timeline", "training", "trust"),
    "oom": ("verdict", "budget", "findings", "heat", "timeline", "training", "memory", "trust",
        "ranks"),
    "traces": (
        "verdict", "budget", "findings", "heat", "rank-budget", "timeline", "communication",
        "bandwidth", "memory", "trust", "ranks",
    ),
    "stuck": ("verdict", "waits", "findings", "trust", "ranks"),
    "compare": ("verdict", "waterfall", "metrics", "difference", "provenance"),
}  # fmt: skip
NOT_DRAWN = {"traces": ("memory",)}
"""Views that say why they have no picture."""
DRAWN = ("heat", "mesh", "rank-budget", "timeline", "pipeline", "bandwidth", "pairs", "training",
    "memory", "waterfall", "difference")  # fmt: skip
MIN_COLOURS = 4


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", list(SECTIONS))
def test_every_view_is_there_and_drawn(pages, opened, name, theme):
    page = opened(pages / f"{name}.html", theme=theme)
    for section in SECTIONS[name]:
        assert page.locator(f"#{section}").count() == 1, section
        if section in DRAWN and section not in NOT_DRAWN.get(name, ()):
            assert count_colours(page, section) >= MIN_COLOURS, section
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 246, 243)", "dark": "rgb(14, 17, 20)"}[theme]


@pytest.mark.parametrize("name", ["slow", "dp", "diverged", "oom", "traces", "stuck"])
def test_five_lamps_always_and_unknown_is_never_ok(pages, opened, name):
    page = opened(pages / f"{name}.html")
    lamps = page.locator("button.lamp")
    assert lamps.count() == 5
    for lamp in lamps.all():
        if "not known" in lamp.inner_text():
            assert lamp.get_attribute("data-state") != "ok", lamp.inner_text()


def test_the_verdict_names_rank_phase_and_price(pages, opened):
    page = opened(pages / "slow.html")
    verdict = text_of(page, "#verdict")
    assert "Rank 5" in verdict
    assert "forward" in verdict
    assert "ms" in text_of(page, "#verdict .price")
    assert "dp0.tp1.pp1" in text_of(page, "#ranks") or "5" in text_of(page, "#ranks")


def test_the_parts_of_a_step_add_up(pages, opened):
    page = opened(pages / "slow.html")
    widths = page.locator("#budget .parts > div").evaluate_all(
        "(parts) => parts.map((one) => one.getBoundingClientRect().width)"
    )
    whole = page.locator("#budget .parts").first.bounding_box()
    assert whole is not None
    assert sum(widths) == pytest.approx(whole["width"], abs=2)


def test_what_was_measured_is_what_the_document_says(pages, opened):
    """The number of the page is that of `report --json`, not one of its own."""
    data = read_data(pages / "slow.html")
    page = opened(pages / "slow.html")
    saved = data["report"]["diagnosis"]["findings"][0]["saved_ns"]
    shown = page.evaluate("document.querySelector('#verdict .price strong').textContent")
    digits = shown.replace("−", "").split()[0]
    assert float(digits) == pytest.approx(saved / 1e6, rel=0.01)


def test_a_diverging_run_says_since_when(pages, opened):
    page = opened(pages / "diverged.html")
    assert "NaN" in text_of(page, "#verdict h2")
    assert "8" in text_of(page, "#verdict h2")
    assert page.locator('button.lamp[data-lamp="learn"]').get_attribute("data-state") == "bad"


def test_a_nan_names_the_rank_it_came_from(pages, opened):
    page = opened(pages / "diverged.html")
    assert "by rank 1" in text_of(page, "#verdict h2")
    assert "Rank 1 (dp1), since step 8 (" in text_of(page, "#verdict")
    assert "loss NaN" in text_of(page, 'button.lamp[data-lamp="learn"]')


def test_a_run_that_ran_out_of_memory_says_who_when_and_what_grew(pages, opened):
    page = opened(pages / "oom.html")
    assert "Rank 1 ran out of memory after step" in text_of(page, "#verdict h2")
    assert "MemoryError" in text_of(page, "#verdict")
    assert "more with every step" in text_of(page, "#verdict")
    for lamp in ("move", "fit"):
        assert page.locator(f'button.lamp[data-lamp="{lamp}"]').get_attribute("data-state") == "bad"
    first = page.locator("#findings article").first.inner_text()
    assert "ran out of memory" in first
    assert "Find what is kept from step to step" in first
    assert "more steps" not in text_of(page, "#memory"), "a forecast of what has happened"
    assert "failed" in text_of(page, "#ranks")


def test_traces_have_data_in_every_view(pages, opened):
    """Each view shows numbers of the traces; the slow rank stands out in those about ranks."""
    data = read_data(pages / "traces.html")
    page = opened(pages / "traces.html")
    assert "4 ranks" in text_of(page, "header.top")
    assert "from traces" in text_of(page, "header.top")
    assert "compute" in text_of(page, "#budget")
    assert "world" in text_of(page, "#communication")
    assert page.locator("#communication tbody tr").count() > 0
    assert page.locator("#ranks tbody tr").count() == 4
    assert "traces have no memory profile" in text_of(page, "#memory")
    assert {one["rank"] for one in data["ranks"]} == {0, 1, 2, 3}
    assert len(data["timelines"]) > 0
    # As tables: what each picture shows, with rows.
    for section in ("budget", "heat", "rank-budget", "timeline", "communication", "bandwidth"):
        page.locator(f"#{section} .menu > button").last.click()
        page.locator(f"#{section} .menu").get_by_text("As table").click()
        assert page.locator(f"#{section} table tbody tr").count() > 0, section
    rows = page.locator("#heat table tbody tr")
    means = {rows.nth(i).locator("td, th").first.inner_text(): i for i in range(rows.count())}
    assert len(means) == 4


def test_a_stuck_run_says_what_to_do_before_what_its_steps_cost(pages, opened):
    page = opened(pages / "stuck.html")
    first = page.locator("#findings article").first.inner_text()
    assert "ank 3" in first
    assert "Look at the stack of rank 3" in first
    assert "step 4" in text_of(page, "#verdict").lower()


def test_what_was_predicted_stands_beside_what_was_measured(pages, opened):
    """Memory is predicted of every run of the engine, and measured of one that was profiled."""
    for name in ("slow", "dp"):
        check = read_data(pages / f"{name}.html")["report"]["prediction"]
        page = opened(pages / f"{name}.html")
        said = text_of(page, "#prediction")
        has_step = "unavailable" not in check["step"]
        assert ("Step time was not predicted" in said) != has_step
        num_times = len(check["lines"]) + 1 if has_step else 0
        assert page.locator("#prediction tbody tr").count() == len(check["memory"]) + num_times
        assert ("not known" in said) == ("unavailable" in str(check["memory"]))


def test_a_stuck_run_leads_with_who_is_waited_for(pages, opened):
    page = opened(pages / "stuck.html")
    banner = page.locator(".banner").first.bounding_box()
    assert banner["y"] > page.locator("#waits").bounding_box()["y"], "nothing stands above the hang"
    assert "ank 3" in text_of(page, "#verdict h2")
    assert text_of(page, ".pill.bad").startswith("stuck")
    assert page.locator("#waits").bounding_box()["y"] < page.locator(".lamps").bounding_box()["y"]
    assert "rank 3" in text_of(page, "#waits").lower()


def test_a_comparison_is_from_a_to_b_and_can_be_swapped(pages, opened):
    page = opened(pages / "compare.html")
    assert "even" in text_of(page, "header.top")
    before = text_of(page, "#metrics")
    page.get_by_role("button", name="swap").click()
    settle(page)
    assert text_of(page, "#metrics") != before


def test_every_view_says_what_its_number_is_not(pages, opened):
    page = opened(pages / "slow.html")
    silent = page.evaluate(
        """() => [...document.querySelectorAll("section.card:not(.verdict)")]
            .filter((card) => !card.querySelector(".not")).map((card) => card.id)"""
    )
    assert silent == []


def test_each_view_has_a_table_and_its_rows_are_what_is_shown(pages, opened):
    page = opened(pages / "slow.html")
    for section in ("heat", "budget", "communication", "memory", "training", "timeline"):
        page.locator(f"#{section} .menu > button").last.click()
        page.locator(f"#{section} .menu").get_by_text("As table").click()
        assert page.locator(f"#{section} table tbody tr").count() > 0, section
    assert page.locator("#heat table tbody tr").count() > 0

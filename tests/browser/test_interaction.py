"""Keys, brush, cross-filter, links that lead back, files and copies."""

import csv
import io
import json

import pytest

from browser_pages import fragment_of, read_data, settle, text_of


@pytest.fixture
def slow(pages, opened):
    return opened(pages / "slow.html")


def drag(page, selector, from_ratio, to_ratio, *, y_ratio=0.5):
    target = page.locator(selector).first
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    y = box["y"] + y_ratio * box["height"]
    page.mouse.move(box["x"] + from_ratio * box["width"], y)
    page.mouse.down()
    for part in (0.3, 0.6, 1.0):
        page.mouse.move(box["x"] + (from_ratio + part * (to_ratio - from_ratio)) * box["width"], y)
    page.mouse.up()
    settle(page)


def test_findings_by_keys_and_back_by_history(slow):
    slow.keyboard.press("j")
    first = fragment_of(slow)["f"]
    slow.keyboard.press("j")
    second = fragment_of(slow)["f"]
    assert first != second
    slow.keyboard.press("k")
    assert fragment_of(slow)["f"] == first
    slow.keyboard.press("Enter")
    settle(slow)
    shown = fragment_of(slow)
    assert shown["v"] == "heat"
    assert "5" in shown["r"]
    assert "rank 5" in text_of(slow, ".chips")
    top = slow.locator("#heat").bounding_box()["y"]
    assert 0 <= top < 200
    slow.go_back()
    settle(slow)
    assert "r" not in fragment_of(slow)


def test_sections_by_number(slow):
    for key, section in (("4", "communication"), ("7", "trust"), ("1", "verdict")):
        slow.keyboard.press(key)
        settle(slow)
        assert fragment_of(slow)["v"] == section
        box = slow.locator(f"#{section}").bounding_box()
        assert box["y"] < 900
        assert box["y"] + box["height"] > 0


def test_steps_of_the_timeline_by_keys(slow):
    slow.keyboard.press("]")
    slowest = fragment_of(slow)["st"]
    slow.keyboard.press("[")
    fastest = fragment_of(slow)["st"]
    assert slowest != fastest
    assert f"step {fastest}" in text_of(slow, "#timeline header")
    slow.keyboard.press("ArrowRight")
    slow.keyboard.press("ArrowLeft")
    slow.locator("#timeline").scroll_into_view_if_needed()
    slow.keyboard.press("w")
    begin, end = map(float, fragment_of(slow)["z"].split("-"))
    assert 0 < end - begin < 1
    slow.keyboard.press("d")
    assert float(fragment_of(slow)["z"].split("-")[0]) > begin
    slow.keyboard.press("0")
    assert "z" not in fragment_of(slow)


def test_keys_act_in_the_frame_in_which_the_help_closes(slow):
    slow.keyboard.press("?")
    slow.wait_for_selector("dialog[open]")
    focused = slow.evaluate(
        """() => {
          document.querySelector("dialog[open]").close();
          const key = new KeyboardEvent("keydown", { key: "/", bubbles: true });
          document.activeElement.dispatchEvent(key);
          return document.activeElement.id;
        }"""
    )
    assert focused == "rank-filter"


def test_metric_order_theme_and_help_by_keys(slow):
    slow.keyboard.press("m")
    assert fragment_of(slow)["m"] != "excess"
    slow.keyboard.press("o")
    assert fragment_of(slow)["o"] == "worst"
    slow.keyboard.press("t")
    assert fragment_of(slow)["t"] == "dark"
    assert slow.evaluate("document.documentElement.dataset.theme") == "dark"
    slow.keyboard.press("?")
    slow.wait_for_selector("dialog[open]")
    slow.keyboard.press("Escape")
    slow.wait_for_selector("dialog[open]", state="detached")
    slow.keyboard.press("/")
    assert slow.evaluate("document.activeElement.id") == "rank-filter"
    slow.keyboard.type("pp=1")
    assert "4 ranks of 8" in text_of(slow, "#ranks header")
    slow.keyboard.press("Enter")
    assert fragment_of(slow)["r"] == "4-7"


def test_keys_do_nothing_while_somebody_types(slow):
    slow.locator("#rank-filter").focus()
    slow.keyboard.type("t")
    assert "t" not in fragment_of(slow)


def test_brushing_the_strip_filters_every_view_but_not_the_verdict(pages, slow):
    verdict = text_of(slow, "#verdict")
    budget, ranks = text_of(slow, "#budget .sub"), text_of(slow, "#ranks table")
    drag(slow, ".strip .canvas", 0.5, 0.95)
    begin, end = map(int, fragment_of(slow)["s"].split("-"))
    assert 0 < begin < end <= 29
    assert f"steps {begin}–{end}" in text_of(slow, ".chips")
    assert f"steps {begin}–{end}" in text_of(slow, "#budget .sub")
    assert text_of(slow, "#budget .sub") != budget
    assert text_of(slow, "#ranks table") != ranks
    assert text_of(slow, "#verdict") == verdict
    slow.keyboard.press("Escape")
    settle(slow)
    assert text_of(slow, "#budget .sub") == budget


@pytest.mark.parametrize("selector", ["#heat .canvas", "#budget .canvas", "#training .u-over"])
def test_brushing_any_axis_of_steps_sets_them(slow, selector):
    drag(slow, selector, 0.4, 0.7)
    begin, end = map(int, fragment_of(slow)["s"].split("-"))
    assert 0 <= begin < end <= 29


def test_a_rank_is_selected_wherever_it_is_clicked(slow):
    mesh = slow.locator("#mesh .canvas").first
    mesh.scroll_into_view_if_needed()
    box = mesh.bounding_box()
    slow.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    settle(slow)
    chosen = fragment_of(slow)["r"]
    assert f"rank {chosen}" in text_of(slow, "#budget .sub")
    row = slow.locator("#ranks tbody tr", has=slow.get_by_role("button", name="6", exact=True))
    row.get_by_role("button").click(modifiers=["Shift"])
    assert set(fragment_of(slow)["r"].replace("-", ",").split(",")) >= {chosen, "6"}


def test_the_budget_of_one_rank_is_that_of_the_document(pages, slow, opened):
    data = read_data(pages / "slow.html")
    budget = data["report"]["budget"]
    page = opened(pages / "slow.html", "r=5")
    index = next(i for i, line in enumerate(budget["lines"]) if line["share"] == "compute")
    row = next(one for one in budget["ranks"] if one["rank"] == 5)
    expected = row["time_ns"][index] / budget["num_steps"] / 1e6
    shown = page.locator("#budget tbody tr").first.locator("td").nth(1).inner_text()
    assert float(shown.split()[0]) == pytest.approx(expected, rel=0.01)


def test_an_axis_is_selected_by_its_header(slow):
    slow.locator("#budget th button", has_text="tp").click()
    assert fragment_of(slow)["ax"] == "tp"
    assert "tp" in text_of(slow, ".chips")


def test_a_lamp_filters_the_findings(slow):
    all_findings = slow.locator("#findings article").count()
    slow.locator('button.lamp[data-lamp="learn"]').click()
    assert slow.locator("#findings article").count() < all_findings
    slow.locator('button.lamp[data-lamp="learn"]').click()
    assert slow.locator("#findings article").count() == all_findings


def test_a_link_leads_to_what_was_seen(pages, opened):
    link = "v=heat&m=work&o=worst&r=5,6&s=8-15&ax=tp&t=dark&st=10"
    page = opened(pages / "slow.html", link)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#heat-metric").input_value() == "work"
    assert page.locator("#heat-order").input_value() == "worst"
    assert "steps 8–15, ranks 5–6" in text_of(page, "#heat .sub").replace("5, 6", "5–6")
    assert 0 <= page.locator("#heat").bounding_box()["y"] < 200
    page.keyboard.press("y")
    assert page.evaluate("navigator.clipboard.readText()").startswith("slow.html#v=heat&m=work")


def test_a_wrong_link_is_as_good_as_none(pages, opened):
    page = opened(pages / "slow.html", "v=%3Cscript%3E&r=1e9,-4,x&s=90-2&st=abc&z=3-4&t=pink")
    assert "all 30 steps" in text_of(page, ".chips")


def test_hover_says_what_is_under_the_pointer(slow):
    heat = slow.locator("#heat .canvas").first
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    slow.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.72 * box["height"])
    tip = text_of(slow, ".tip")
    assert "rank" in tip
    assert "step" in tip
    slow.mouse.move(5, 5)
    assert slow.locator(".tip").count() == 0


def test_the_cell_cursor_is_read_out(slow):
    heat = slow.locator("#heat .canvas").first
    heat.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        slow.keyboard.press(key)
    said = heat.locator('[role="status"]').inner_text()
    assert "rank" in said
    assert "step" in said
    slow.keyboard.press("Enter")
    assert "st" in fragment_of(slow)


def save_from(page, section, name):
    page.locator(f"#{section} .menu > button").last.click()
    with page.expect_download() as waiting:
        page.locator(f"#{section} .menu").get_by_text(name, exact=True).click()
    return waiting.value


def test_a_view_is_saved_as_it_is_shown(pages, opened, tmp_path):
    page = opened(pages / "slow.html", "s=16-29")
    table = save_from(page, "ranks", "CSV")
    lines = table.path().read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert "steps 16–29" in lines[0]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[1:]))))
    assert len(rows) == 8
    worst = max(rows, key=lambda row: float(row["excess_ns"]))
    assert worst["rank"] == "5"
    document = json.loads(save_from(page, "heat", "JSON").path().read_text(encoding="utf-8"))
    assert "steps 16–29" in document["scope"]
    assert document["rows"]
    picture = save_from(page, "heat", "PNG").path().read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20]) > 2 * 1000  # twice the size on the screen
    colours = page.evaluate(
        """async (bytes) => {
          const image = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
          const canvas = new OffscreenCanvas(image.width, image.height);
          const ctx = canvas.getContext("2d");
          ctx.drawImage(image, 0, 0);
          const { data } = ctx.getImageData(0, 0, image.width, image.height);
          const seen = new Set();
          for (let i = 0; i < data.length; i += 44)
            seen.add(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
          return seen.size;
        }""",
        list(picture),
    )
    assert colours > 20


def test_the_page_saves_its_report_and_itself(pages, slow):
    def take(name):
        slow.locator("#export").click()
        with slow.expect_download() as waiting:
            slow.get_by_text(name, exact=True).click()
        return waiting.value.path().read_text(encoding="utf-8")

    # Times in ns since 1970 are beyond what a browser's numbers hold: both as floats.
    report = json.loads(take("Report, JSON"), parse_int=float)
    assert report == json.loads(
        json.dumps(read_data(pages / "slow.html")["report"]), parse_int=float
    )
    again = take("This page, HTML")
    assert '<script type="application/json" id="meshscope-data">' in again
    assert "section" not in again.split("</style>")[1].split("<noscript>")[0]


def test_a_finding_is_copied_as_markdown(slow):
    slow.get_by_role("button", name="Copy as Markdown").click()
    text = slow.evaluate("navigator.clipboard.readText()")
    for part in (
        "### ",
        "**Saves:**",
        "**Sure:**",
        "**Change:**",
        "| evidence | value |",
        "slow.html",
    ):
        assert part in text
    assert "argv" not in text

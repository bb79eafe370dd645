"""The page's document: it fits its schema, says what the report says, and links what it finds."""

import json

import jsonschema
import numpy as np
import pytest

from builders import MS, make_run
from late_runs import STEADY, LateRun, noisy
from meshscope.core.layout import Layout
from meshscope.page.document import DOCUMENT, SHAPES, compare_pages, describe_page, render_schema
from meshscope.page.file import encode_page
from meshscope.report.encode import encode
from meshscope.report.run_study import study


@pytest.fixture(scope="module")
def schema():
    return json.loads(render_schema()["meshscope-page.schema.json"])


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Six peers; rank 5 forwards 8 ms longer from step 20 on."""
    path = tmp_path_factory.mktemp("slow") / "run"
    usual = noisy(3, num_ranks=6, num_steps=45)

    def work(rank, step):
        own = dict(usual(rank, step))
        own["forward"] += 8 * MS if rank == 5 and step >= 20 else 0
        return own

    LateRun(layout=Layout(dp=6), work=work, num_steps=45).record(path)
    return study(path)


@pytest.fixture(scope="module")
def page(slow):
    return json.loads(encode(*DOCUMENT, describe_page(slow.report().content), SHAPES))


def test_it_fits_its_schema(page, schema):
    jsonschema.validate(page, schema)


def test_the_report_is_the_one_of_report_json(slow, page):
    report = json.loads(slow.report().to_json())
    envelope = {key: report.pop(key) for key in ("document", "document_version")}
    assert envelope["document"] == "meshscope-report"
    assert page["report"] == report


def test_the_verdict_is_the_first_finding_and_links_to_its_evidence(page):
    assert page["verdict"]["title"].startswith("Rank 5 became slow at step 20")
    (first, *_) = page["findings"]
    assert page["verdict"]["finding"] == first["id"] == "ST003.1"
    heat = first["links"][0]
    assert (heat["view"], heat["metric"], heat["phase"]) == ("heat", "excess", "forward")
    assert (heat["ranks"], heat["steps"][0]) == ([5], 20)
    (step,) = [link["step"] for link in first["links"] if link["view"] == "timeline"]
    shown = {one["step"]: one["picked"] for one in page["timelines"]}
    assert first["id"] in shown[step]
    assert any(event["finding"] == first["id"] for event in page["events"])


def test_five_lamps_always(page):
    states = {lamp["key"]: lamp["state"] for lamp in page["lamps"]}
    assert list(states) == ["fast", "move", "fit", "learn", "trust"]
    assert states["fast"] == "bad"
    assert states["move"] == "ok"
    fit = next(lamp for lamp in page["lamps"] if lamp["key"] == "fit")
    assert fit["state"] in ("not known", "ok")


def test_budget_over_steps_is_the_reports_budget(page):
    budget, spread = page["report"]["budget"], page["budget_steps"]
    assert spread["lines"] == [line["name"] for line in budget["lines"]]
    count = np.array(spread["num_steps"])
    means = (np.array(spread["mean_ns"]) * count).sum(axis=1) / count.sum()
    assert means == pytest.approx([line["mean_ns"] for line in budget["lines"]])
    assert len(spread["cells"]) == len(spread["lines"])


def test_rules_that_could_not_look_say_why(page):
    reasons = {rule["code"]: rule["reason"] for rule in page["rules"]}
    assert "device" in reasons["CP004"]
    assert reasons["ST001"] is None
    lamp = next(one for one in page["lamps"] if one["key"] == "fast")
    assert "CP004" in lamp["not_run"]
    assert "ST001" in lamp["rules"]


def test_ranks_have_their_coordinates_as_numbers(page):
    assert page["ranks"][5]["coordinates"] == {"dp": 5, "tp": 0, "pp": 0, "cp": 0, "ep": 0}
    assert {rank["num_peers"] for rank in page["ranks"]} == {5}


def test_left_out_steps_have_their_reason(page):
    (warmup,) = page["matrices"]["left_out"]
    assert warmup == {"first_step": 0, "last_step": 0, "reason": "warm-up"}


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_run_of_hardly_any_step(tmp_path, schema, num_steps):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=num_steps)
    page = encode_page(describe_page(study(tmp_path).report().content))
    jsonschema.validate(page, schema)
    assert page["verdict"]["tone"] == "not known"


def test_without_a_diagnosis(tmp_path, schema):
    make_run(tmp_path, num_steps=6)
    page = encode_page(describe_page(study(tmp_path).report(with_diagnosis=False).content))
    jsonschema.validate(page, schema)
    assert {lamp["state"] for lamp in page["lamps"]} <= {"not known", "ok"}
    assert page["lamps"][0]["state"] == "not known"


def test_a_comparison(tmp_path, schema):
    from meshscope.analyze.compare.compare import compare_studies
    from meshscope.core.unavailable import Unavailable
    from meshscope.report.sections.compare import Compared

    for name, forward in (("a", 10), ("b", 15)):
        work = {**STEADY, "forward": forward * MS}
        LateRun(layout=Layout(dp=2), work=lambda rank, step, own=work: own).record(tmp_path / name)
    a, b = study(tmp_path / "a"), study(tmp_path / "b")
    compared = Compared(
        a="a",
        b="b",
        comparison=compare_studies(a.study, b.study),
        limit_ratio=None,
        verdict=None,
        ledger=Unavailable("not asked"),
        findings=(),
    )
    page = encode_page(compare_pages(compared, a.report().content, b.report().content))
    jsonschema.validate(page, schema)
    assert page["verdict"]["tone"] == "bad"
    assert page["compare"]["a"]["report"]["run"]["path"].endswith("a")
    assert page["report"] is None

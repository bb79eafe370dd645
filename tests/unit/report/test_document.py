import json
import math
import tracemalloc

from builders import MS, Faults, make_run, make_writer, put_scalar, put_span, put_step
from meshscope.core.layout import Layout
from meshscope.report.run.document import encode_report
from report_builders import document_of, render_report, report_of


def test_the_document_names_itself(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2, tp=2), num_steps=6, device_ratio=0.9)
    document = document_of(report_of(tmp_path))
    assert (document["document"], document["document_version"]) == ("meshscope-report", 4)


def test_parts_add_up_in_the_document_too(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=6, faults=Faults(slow={1: 1.3}))
    document = document_of(report_of(tmp_path))
    for place in (document["time"], *document["ranks"]):
        parts = [place[name] for name in ("before_first", "steps", "between", "after_last")]
        assert sum(part["wall_ns"] for part in parts) == place["wall_ns"]
        for part in parts:
            total = sum(part["phase_ns"].values()) + part["unattributed_ns"]
            assert total == part["wall_ns"]
    assert sum(phase["ratio"] for phase in document["phases"]) == 1


def test_what_is_missing_is_an_object_with_the_reason(tmp_path):
    make_run(tmp_path, num_steps=0)
    document = document_of(report_of(tmp_path))
    assert document["steps"]["time"] == {"unavailable": "no step finished"}
    assert document["steps_per_s"] == {"unavailable": "no step finished"}
    assert document["phases"] == []
    assert document["ranks"][0]["peak_rss_bytes"] == {"unavailable": "memory was not sampled"}


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    make_run(
        tmp_path,
        num_steps=3,
        scalars={
            "loss": lambda rank, step: math.nan,
            "tokens": lambda rank, step: 1.7e308,  # the sum overflows
        },
    )
    document = document_of(report_of(tmp_path))
    loss = document["signals"]["loss"]
    assert loss["last"] == {"unavailable": "none of its 3 values is finite"}
    assert loss["num_nonfinite"] == 3
    assert document["tokens"]["tokens_per_s"] == {"unavailable": "not a finite number (inf)"}


def test_names_that_are_not_valid_unicode_become_valid(tmp_path):
    writer = make_writer(tmp_path, host="a\ud800b", provenance={"argv": ["\udfff"]})
    put_span(writer, "\ud800", 1000, 500)
    put_step(writer, 0, 1000, 2000)
    put_scalar(writer, "loss", 0, 1500, 1.0)
    writer.close(end_host_mono_ns=2000)
    document = document_of(report_of(tmp_path))
    assert document["phases"][0]["phase"] == "?"
    assert document["run"]["hosts"] == [{"host": "a?b", "num_ranks": 1}]


def test_a_phase_called_unattributed_is_not_taken_for_what_no_phase_claimed(tmp_path):
    make_run(tmp_path, num_steps=2, phases=(("unattributed", 10 * MS),), unattributed_ns=5 * MS)
    shares = [
        (p["phase"], p["is_unattributed"]) for p in document_of(report_of(tmp_path))["phases"]
    ]
    assert shares == [("unattributed", False), ("unattributed", True)]


def test_a_long_run_is_binned(tmp_path):
    writer = make_writer(tmp_path)
    for step in range(1000):
        put_step(writer, step, step * 100, step * 100 + (90 if step == 500 else 50))
    writer.close(end_host_mono_ns=200_000)
    series = document_of(report_of(tmp_path))["steps"]["series"]
    assert len(series) == 240
    assert sum(bin_["num_steps"] for bin_ in series) == 1000
    assert max(bin_["max_ns"] for bin_ in series) == 90


def test_problems_name_files_relative_to_the_run(tmp_path):
    make_run(tmp_path, faults=Faults(damaged={0: "steps"}))
    problem = document_of(report_of(tmp_path))["health"]["problems"][0]
    place = "rank00000/attempt000/tables.pack/steps.tbl"
    assert (problem["kind"], problem["file"]) == ("damaged", place)
    assert problem["num_records"] == 1


def test_a_million_missing_ranks_make_a_small_report(tmp_path):
    """A header can claim them; what it costs must depend on the ranks that are there."""
    layouts = {"nolayout": None, "dp": Layout(dp=1 << 20), "tp": Layout(dp=1 << 17, tp=8)}
    for name, layout in layouts.items():
        header = {"world_size": 1 << 20, "layout": layout.to_dict() if layout else None}
        for restart in range(10):
            make_run(
                tmp_path / name,
                world_size=3,
                header=header,
                input_tokens=10,
                restart_count=restart,
                num_steps=2,
            )
        tracemalloc.start()
        report = report_of(tmp_path / name)
        document = encode_report(report)
        text = render_report(report)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 << 20
        assert len(document) < 40_000
        assert "! The recording is not complete: 1,048,573 ranks missing." in text
        assert "1048573 of 1048576 ranks recorded nothing: 3-1048575" in text
    health = json.loads(document)["health"]
    assert health["num_missing_ranks"] == (1 << 20) - 3
    assert health["missing_ranks"] == [{"first": 3, "last": (1 << 20) - 1}]

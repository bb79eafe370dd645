"""The section on traces: which steps of which ranks, and where."""

from pathlib import Path

from builders import make_writer, put_step
from meshscope.report.screen import Screen
from report_builders import document_of, render_report, report_of

WINDOW = {
    "number": 0,
    "reason": "the schedule",
    "disturbed_from_step": 3,
    "first_step": 4,
    "last_step": 5,
    "disturbed_to_step": 6,
    "begin_host_mono_ns": 1000,
    "path": "traces/rank0/host_1.2.pt.trace.json.gz",
    "bytes": 2048,
}
FAILED = {**WINDOW, "number": 1, "path": None, "problem": "RuntimeError: \x1b[31mno", "reason": "x"}


def make_report(path: Path, *windows: dict):
    writer = make_writer(path)
    for step in range(10):
        put_step(writer, step, 100 * step + 10, 100 * step + 90)
    for window in windows:
        writer.journal.write("update", trace_window=window)
    writer.close(end_host_mono_ns=2000)
    return report_of(path)


def render(report) -> str:
    return render_report(report, Screen(width=160))


def test_windows_are_listed_with_their_steps_and_files(tmp_path):
    text = render(make_report(tmp_path / "run", WINDOW, FAILED))
    section = text[text.index("Traces") :].splitlines()
    assert section[0] == "Traces  2 windows on 1 rank; 4 profiled steps left out of statistics"
    assert section[2].split() == [
        "4-5",
        "0",
        "2.00",
        "KiB",
        "rank0/host_1.2.pt.trace.json.gz",
        "the",
        "schedule",
    ]
    assert "n/a: RuntimeError" in section[3]
    assert "\x1b" not in text
    assert any("meshscope trace" in line for line in section)


def test_without_windows_there_is_no_section(tmp_path):
    report = make_report(tmp_path / "run")
    assert "Traces" not in render(report)
    assert document_of(report)["traces"] == []


def test_the_document_holds_every_window(tmp_path):
    document = document_of(make_report(tmp_path / "run", WINDOW, FAILED))
    first, second = document["traces"]
    assert (first["first_step"], first["last_step"], first["num_bytes"]) == (4, 5, 2048)
    assert second["path"]["unavailable"].startswith("RuntimeError")
    assert document["steps"]["num_profiled"] == 4


def test_every_section_of_statistics_says_what_is_left_out(tmp_path):
    text = render(make_report(tmp_path / "run", WINDOW))
    for title in ("Where a step's time goes", "Step time", "Ranks"):
        (line,) = (line for line in text.splitlines() if line.startswith(title))
        assert line.endswith("without the first step and 4 profiled steps"), line
    assert "steps 1 to 9, a mark is one step" in text
    assert "profiled ones included" in text

"""The text of traces: fits the screen, keeps to the number of rows, says what is left out."""

import json

import pytest

from meshscope.analyze.communication.rank_comparison import compare_ranks
from meshscope.analyze.compare.trace_diff import compare_traces
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_recording import record_trace
from meshscope.ingest.traces.trace_run import make_run
from meshscope.report.screen import Screen
from meshscope.report.trace_diff_text import render_difference
from meshscope.report.trace_text import render_traces
from screens import find_widest

NUM_KINDS = 12


def made(path, rank, length=10):
    """Twelve collectives along axes of their own, and the job's three; rank 1 begins 4 late."""
    events = []
    late = 4 * rank

    def add(begin, group, description, ranks):
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": f"ncclDevKernel_AllReduce_{group}_{'x' * 90}",
                "ts": begin + late,
                "dur": length - late,
                "args": {
                    "device": 0,
                    "stream": 20,
                    "Collective name": "allreduce",
                    "Process Group Name": group,
                    "Process Group Description": description,
                    "Process Group Ranks": json.dumps(ranks),
                    "In msg nelems": 256,
                    "Out msg nelems": 256,
                    "dtype": "Float",
                },
            }
        )

    for at in range(NUM_KINDS):
        add(100 * at, f"g{at}", f"mesh_axis{at}", [0, 1])
    path.write_text(
        json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}),
        encoding="utf-8",
    )
    return summarize_trace(read_trace(path))


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_tables_keep_to_their_rows(tmp_path, width) -> None:
    summaries = [made(tmp_path / f"{rank}.json", rank) for rank in range(2)]
    screen = Screen(width=width)
    recordings = [
        record_trace(read_trace(tmp_path / f"{rank}.json"), max_spans=1000) for rank in range(2)
    ]
    study = Study(make_run(recordings, tmp_path).run.last_attempt)
    comparison = compare_ranks(study.communication)
    text = render_traces(summaries, comparison, screen, layout=Layout(dp=2), num_rows=3)
    lines = text.splitlines()
    assert find_widest(text, but=tmp_path) <= width
    assert lines[0] == "Layout dp2"
    assert sum("all_reduce" in line for line in lines) == 2 * 3
    assert text.count(f"and {NUM_KINDS - 3} kinds more") == 2
    assert "12.0 KiB" not in text  # 1 KiB each
    (waiting,) = (line for line in lines if line.split()[:2] == ["0", "120"])
    assert waiting.split() == ["0", "120", "µs", "48.0", "µs", "72.0", "µs", "0", "ns"]


def test_a_difference_says_what_is_new_and_what_is_gone(tmp_path) -> None:
    before, after = made(tmp_path / "a.json", 0), made(tmp_path / "b.json", 0, length=30)
    text = render_difference(compare_traces([before], [after]), Screen(width=80), num_rows=2)
    assert max(map(len, text.splitlines())) <= 80
    part, category = (
        line.split() for line in text.splitlines() if line.split()[:1] == ["communication"]
    )
    assert part == ["communication", "+240", "µs", "3", "120", "µs", "360", "µs"]
    assert category == [*part, "12", "12"]  # kernels before and now
    assert sum("all_reduce" in line for line in text.splitlines()) == 2

"""Whatever stands in a run with valid checksums, the report is written and is valid JSON."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import make_writer
from meshscope.analyze.study import Study
from meshscope.report.run.report import Report
from meshscope.report.screen import Screen
from meshscope.store.read.run import open_run
from meshscope.store.schema import TABLES
from report_builders import document_of, render_report

INT64 = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-3, 100),
    st.sampled_from([-(1 << 63), (1 << 63) - 1, 0, 1 << 32, 0x7FF8 << 48, 0x7FF0 << 48]),
)
RECORDS = st.lists(st.tuples(st.sampled_from(sorted(TABLES)), st.tuples(*[INT64] * 7)), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
HEADER_FIELDS = ["host", "start_host_mono_ns", "start_unix_ns", "layout", "layout_source",
                 "provenance", "launch_id"]  # fmt: skip
CLOSING_FIELDS = ["end_host_mono_ns", "errors", "opening_cost_ns", "num_device_steps_given_up"]


@settings(max_examples=200, deadline=None)
@example(  # steps between the two may have been thinned away
    records=[("steps", (0,) * 7), ("steps", (-2, -1, -1, 0, 0, 0, 0))],
    header={},
    closing=None,
    names=[],
    width=1,
)
@given(
    records=RECORDS,
    header=st.dictionaries(st.sampled_from(HEADER_FIELDS), JSON),
    closing=st.none() | st.dictionaries(st.sampled_from(CLOSING_FIELDS), JSON),
    names=st.lists(st.text(max_size=6), max_size=3),
    width=st.integers(1, 250),
)
def test_any_recorded_values_make_a_report(
    tmp_path_factory, records, header, closing, names, width
):
    path = tmp_path_factory.mktemp("run")
    writer = make_writer(path, **{"world_size": 1, **header})
    for name in ("tokens", "loss", *names):
        writer.name_id(name)
    for table, words in records:
        writer.table(table).put(*words)
    if closing is None:
        writer.flush()
        writer.journal.close()
    else:
        writer.close(**closing)
    run = open_run(path)
    for attempt in run.attempts:
        summary = Study(attempt)
        for rank in summary.ranks:
            time = rank.time
            parts = (time.before_first, time.steps, time.between, time.after_last)
            assert sum(part.wall_ns for part in parts) + time.thinned_ns == time.wall_ns
        report = Report(run=run, study=summary)
        document_of(report)
        assert "\x1b" not in render_report(report, Screen(width=width, is_unicode=width % 2 == 0))

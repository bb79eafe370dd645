"""Traces of runs with known times, read back by rules of the format alone."""

import io
import json

import pytest

from builders import MS, START_MONO_NS
from late_runs import LateRun, noisy
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.errors import UsageError
from meshscope.export.chrome_trace import ChromeSink
from meshscope.export.lanes import MAX_LANES, Lanes
from meshscope.export.pftrace import PerfettoSink, varint
from meshscope.export.run_trace import export_trace
from meshscope.export.step_windows import choose_range, cut_windows, parse_steps
from meshscope.report.run_study import RunStudy
from meshscope.store.read.run import open_run
from protobuf_reading import read_trace, read_varint
from timeline_builders import TimedJob

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 100_000


RANK_0, RANK_1 = "rank 0 dp0.tp0.pp0 node0", "rank 1 dp1.tp0.pp0 node1"
USUAL = noisy(1)


def make_slow(rank, step):
    """Rank 2 takes 20 ms longer in forward."""
    own = USUAL(rank, step)
    return own | {"forward": own["forward"] + (20 * MS if rank == 2 else 0)}


def write(study, findings=(), sink_type=PerfettoSink, **chosen):
    file = io.BytesIO()
    done = export_trace(study, tuple(findings), sink_type(file), **chosen)
    return done, file.getvalue()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two hosts whose clocks differ by 3 s; rank 1 works 20 ms longer; a message in each step."""
    path = tmp_path_factory.mktemp("two") / "run"
    job = TimedJob(
        path,
        num_ranks=2,
        layout=Layout(dp=2),
        host=lambda rank: f"node{rank}",
        clocks={"node1": (3_000 * MS, 0.0)},
    )
    group = job.group(range(2), description="mesh_dp")
    work = {0: {"forward": 10, "backward": 20}, 1: {"forward": 30, "backward": 20}}
    now = 0
    for step in range(6):
        job.message(
            group, 0, 1, sent_ns=now + MS, asked_ns=now + 2 * MS, latency_ns=MS // 10, step=step
        )
        now = job.train(
            num_steps=1, work_ms=work, transfer_ms=5, group=group, first_step=step, start_ns=now
        )
    job.close()
    return Study(open_run(path).last_attempt)


def test_steps_and_phases_of_all_ranks_are_on_one_clock(two):
    done, data = write(two)
    trace = read_trace(data)
    assert [name for name in map(trace.path, trace.tracks) if len(name) == 1][1:] == [
        ("job",),
        (RANK_0,),
        (RANK_1,),
    ]
    for rank, ms in ((0, 10), (1, 30)):
        own = trace.of((RANK_0, RANK_1)[rank])
        steps = [one for one in own if one["category"] == "step"]
        assert [one["name"] for one in steps] == [f"step {step}" for step in range(6)]
        forward = [one for one in own if one["name"] == "forward"]
        assert [one["end"] - one["start"] for one in forward] == [ms * MS] * 6
        assert {one["depth"] for one in forward} == {1}
        # Both clocks became that of rank 0, whose job began here.
        assert abs(steps[0]["start"] - START_MONO_NS) < 3 * MS
    assert done.written.slices == len(trace.slices)


def test_time_is_filled_by_lines_of_the_budget(two):
    trace = read_trace(write(two)[1])
    lines = trace.of(RANK_0, "where the time goes")
    second = [one for one in lines if one["args"]["step"] == 3]
    ms = {}
    for one in second:
        ms[one["name"]] = ms.get(one["name"], 0) + (one["end"] - one["start"]) / MS
    assert ms["exposed wait dp"] == pytest.approx(21, abs=0.2)  # 1 of them for the message
    assert ms["exposed transfer dp"] == pytest.approx(5.1, abs=0.2)
    assert sum(ms.values()) == pytest.approx(55, abs=0.2)


def test_arrows_lead_to_the_rank_that_came_last(two):
    done, data = write(two)
    trace = read_trace(data)
    operations = [one for one in trace.slices if one["category"] == "operation"]
    assert len(operations) == 6 * 4
    assert done.written.arrows == len(trace.arrows) == 6 * 2
    for (source, begin), (target, end) in trace.arrows:
        assert (source, target) == (RANK_0, RANK_1)
        assert begin <= end
    reduce = next(one for one in operations if one["name"] == "all_reduce dp")
    assert reduce["args"] | {"kind": "all_reduce", "axis": "dp", "bytes": 4096} == reduce["args"]


def test_windows_give_what_the_whole_gives(two):
    def content(trace):
        return sorted(
            (trace.path(one["track"]), one["name"], one["start"], one["end"])
            for one in trace.slices
        )

    whole = read_trace(write(two)[1])
    steps = choose_range(two.attempt, None, 10**9)
    for rows in (1, 20):
        windows = list(cut_windows(two.attempt, steps, rows_per_window=rows))
        assert len(windows) > 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshscope.export.run_trace.cut_windows", lambda *_, w=windows: iter(w))
            parts = read_trace(write(two)[1])
        assert content(parts) == content(whole)
        assert parts.arrows == whole.arrows


def test_steps_and_ranks_are_chosen(two):
    done, data = write(two, ranks=[1], steps=(2, 3))
    trace = read_trace(data)
    roots = {trace.path(uuid)[0] for uuid in trace.tracks}
    assert roots == {"", "job", RANK_1}
    steps = {one["args"]["step"] for one in trace.slices if "step" in one["args"]}
    assert steps == {2, 3}
    assert done.written.arrows == 0
    assert {one["category"] for one in trace.slices} == {"step", "phase", "time", "operation"}
    both = read_trace(write(two, steps=(2, 3))[1])
    assert len(both.arrows) == 2 * 2


def test_a_large_run_gives_its_last_steps(two):
    done, _ = write(two, max_rows=20)
    assert (done.steps.first > 0, done.steps.last, done.steps.is_whole) == (True, 5, False)


@pytest.mark.parametrize("text", ["", "x", "5-2", "-3", "1-2-3", "٣", "1.5"])
def test_a_bad_range_of_steps_is_one_sentence(text):
    with pytest.raises(UsageError, match="is no range of steps"):
        parse_steps(text)


def test_ranges_of_steps():
    assert [parse_steps(text) for text in ("7", "2-9", "4-")] == [(7, 7), (2, 9), (4, None)]


def test_steps_beyond_the_run_are_refused(two):
    with pytest.raises(UsageError, match="steps 0 to 5"):
        write(two, steps=(10, 12))


def test_counters_and_findings(tmp_path):
    LateRun(layout=Layout(dp=4), work=make_slow, num_steps=30).record(tmp_path / "run")
    run = open_run(tmp_path / "run")
    study = RunStudy(run, run.last_attempt)
    done, data = write(study.study, study.findings)
    trace = read_trace(data)
    assert study.findings
    assert [one["name"] for one in trace.marks] == [one.label for one in study.findings]
    named = [one for one in trace.slices if one["category"] == "finding"]
    assert {trace.path(one["track"])[0].split()[1] for one in named} == {
        str(rank) for one in study.findings for rank in one.ranks
    }
    counters = {trace.path(uuid)[-1]: points for uuid, points in trace.values.items()}
    assert "steps per second" in counters
    assert done.written.values == sum(len(points) for points in trace.values.values())


def test_hostile_names_are_short_and_inert(tmp_path):
    job = TimedJob(tmp_path / "run", num_ranks=1, host=lambda rank: HOSTILE)
    for step in range(4):
        job.phase(0, HOSTILE[:2000], step * 10 * MS, (step * 10 + 5) * MS)
        job.own_step(0, step, step * 10 * MS, (step * 10 + 9) * MS)
    job.close()
    study = Study(open_run(tmp_path / "run").last_attempt)
    shown = [write(study)[1], write(study, sink_type=ChromeSink)[1]]
    trace = read_trace(shown[0])
    names = [one["name"] for one in (*trace.tracks.values(), *trace.slices)]
    names += [
        one["args"]["name"] for one in json.loads(shown[1])["traceEvents"] if "name" in one["args"]
    ]
    assert sum("<script>" in name for name in names) == 6
    assert all(name.isprintable() and len(name) <= 80 for name in names)
    assert max(map(len, shown)) < 100_000


def test_an_operation_that_never_ended_is_open(tmp_path):
    job = TimedJob(tmp_path / "run", num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    end = job.train(num_steps=4, work_ms={0: {"forward": 5}, 1: {"forward": 5}}, group=group)
    job.collective(group, {0: end + MS}, step=4, overrides={0: {"end_ns": -1, "outcome": 0}})
    study = Study(job.close())
    trace = read_trace(write(study)[1])
    (open_,) = [one for one in trace.slices if one["end"] is None]
    assert (open_["name"], open_["args"]["outcome"]) == ("all_reduce dp", "unfinished")


def test_chrome_trace_is_json_with_the_same_slices(two):
    done, data = write(two, sink_type=ChromeSink)
    events = json.loads(data)["traceEvents"]
    kinds = [event["ph"] for event in events]
    assert kinds.count("X") == done.written.slices == write(two)[0].written.slices
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert len(begins) == done.written.arrows
    assert begins.keys() == ends.keys()
    assert all(begins[one] <= ends[one] for one in begins)


def test_lanes_keep_apart_what_does_not_nest():
    nested, apart = Lanes(nests=True), Lanes(nests=False)
    spans = [(0, 10), (2, 5), (4, 8), (5, 10), (10, 12)]
    assert [nested.place(*span) for span in spans] == [0, 0, 1, 0, 0]
    assert [apart.place(*span) for span in spans] == [0, 1, 2, 1, 0]
    crowded = Lanes(nests=False)
    assert [crowded.place(0, 1) for _ in range(MAX_LANES + 2)][-2:] == [-1, -1]
    assert crowded.num_crowded == 2


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63, -1])
def test_varints_read_back(value):
    assert read_varint(varint(value), 0)[0] == value % 2**64

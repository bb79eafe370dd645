"""Runs made of traces: the closed forms of a made-up job, through the readers of recorded runs."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.job.clocks import TRACE_CLOCK_NS
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.runner import diagnose
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_phases import NAMES, find_phases
from meshscope.ingest.traces.trace_recording import record_trace
from meshscope.ingest.traces.trace_run import make_run
from meshscope.ingest.traces.trace_steps import find_steps
from meshscope.numerics.chance import LEAD_FLOOR
from meshscope.simulate.critical_path import PathKind, find_critical_path
from trace_builders import (
    BACKWARD_NS,
    FORWARD_NS,
    MS,
    TRANSFER_NS,
    UPDATE_NS,
    US,
    RankTrace,
    write_traces,
)

NCCL = Path(__file__).parents[4] / "shared/data/nccl/pp4"
EXTRA_NS = 5 * MS
STEP_NS = FORWARD_NS + EXTRA_NS + BACKWARD_NS + TRANSFER_NS + UPDATE_NS


def examine(folder, paths, **options):
    recordings = [record_trace(read_trace(path), max_spans=10_000) for path in paths]
    made = make_run(recordings, folder / "traces", **options)
    return Context(Study(made.run.last_attempt)), made


def job(tmp_path, **options):
    options = {"num_ranks": 4, "num_steps": 12, **options}
    return write_traces(tmp_path / "traces", **options)


def findings(context):
    return {found.code: found for found in diagnose(context).findings}


def test_the_budget_of_a_job_is_its_closed_form(tmp_path):
    paths = job(tmp_path, extra_ns={2: EXTRA_NS}, skew_ns=lambda rank: 3 * MS * rank + 17)
    context, _ = examine(tmp_path, paths)
    budget = context.study.budget
    assert not isinstance(budget, Unavailable)
    assert int(np.abs(budget.residual_ns).max()) == 0
    lines = {line.name: place for place, line in enumerate(budget.lines)}
    own = FORWARD_NS + BACKWARD_NS + UPDATE_NS
    for place, rank in enumerate(budget.ranks):
        is_slow = rank == 2
        of_rank = budget.of_ranks_ns()[place] / 12
        assert of_rank[lines["compute"]] == own + (EXTRA_NS if is_slow else 0)
        assert of_rank[lines["exposed transfer world"]] == pytest.approx(TRANSFER_NS, abs=2 * US)
        wait = 0 if is_slow else EXTRA_NS
        assert of_rank[lines["exposed wait world"]] == pytest.approx(wait, abs=2 * US)


def test_a_slow_rank_is_named_and_priced(tmp_path):
    context, _ = examine(tmp_path, job(tmp_path, extra_ns={2: EXTRA_NS}))
    found = findings(context)["ST001"]
    assert found.ranks == (2,)
    assert found.severity >= Severity.MEDIUM
    assert found.saved_ns == pytest.approx(EXTRA_NS, rel=0.01)


def test_a_healthy_job_has_its_exposed_transfer_and_no_culprit(tmp_path):
    context, _ = examine(tmp_path, job(tmp_path))
    (found,) = (one for one in diagnose(context).findings if one.severity > Severity.LOW)
    assert found.code == "CO001"
    assert found.saved_ns == pytest.approx(TRANSFER_NS, rel=0.01)


def test_the_critical_path_goes_through_the_slow_rank(tmp_path):
    context, _ = examine(tmp_path, job(tmp_path, extra_ns={2: EXTRA_NS}))
    assert not isinstance(context.replay, Unavailable)
    path = find_critical_path(context.replay)
    assert path.total_ns == 12 * STEP_NS
    work = {
        (share.rank, share.phase): share.total_ns
        for share in path.shares
        if share.kind is PathKind.WORK
    }
    assert work[2, "backward"] == 12 * BACKWARD_NS
    assert work[2, "forward"] == 12 * (FORWARD_NS + EXTRA_NS)
    assert {rank.rank: rank.slack_ns for rank in path.ranks}[0] == pytest.approx(EXTRA_NS, rel=1e-3)


def test_clocks_of_ranks_are_brought_together(tmp_path):
    skew = {0: 0, 1: 700 * MS, 2: -40 * MS, 3: 13}
    context, _ = examine(tmp_path, job(tmp_path, skew_ns=lambda rank: skew[rank]))
    timeline = context.study.timeline
    assert not isinstance(timeline, Unavailable)
    begins = timeline.period_start_ns
    assert int(np.abs(begins - begins[0]).max()) <= 1 * US


@pytest.mark.parametrize(
    ("process", "skew_ns", "num_clocks"),
    [(100, 0, 1), (101, 0, 3), (100, 700 * MS, 3)],
    ids=["one host", "another process's name", "one host, clocks apart"],
)
def test_traces_named_for_one_host_share_its_clock(tmp_path, process, skew_ns, num_clocks):
    paths = job(tmp_path, num_ranks=3, skew_ns=lambda rank: rank * skew_ns)
    named = [
        path.rename(tmp_path / f"node7_{process}.17672256000000000{rank:02}.pt.trace.json.gz")
        for rank, path in enumerate(paths)
    ]
    timeline = examine(tmp_path, named)[0].study.timeline
    assert not isinstance(timeline, Unavailable)
    assert len(timeline.alignment.clocks) == num_clocks
    if num_clocks == 1:
        ranks = np.array([0, 1], dtype=np.int32)
        between = timeline.alignment.uncertainty_between(ranks, np.array([2, 1], dtype=np.int32))
        assert between.tolist() == [TRACE_CLOCK_NS, 0]


@pytest.mark.parametrize(
    ("num_slow_steps", "is_found"), [(4, True), (3, False)], ids=["all steps", "all but one"]
)
def test_few_steps_give_a_hint(tmp_path, num_slow_steps, is_found):
    paths = job(
        tmp_path,
        num_ranks=8,
        num_steps=4,
        extra_ns=lambda rank, step: EXTRA_NS if rank == 5 and step < num_slow_steps else 0,
    )
    found = findings(examine(tmp_path, paths)[0]).get("ST005")
    assert (found is not None) is is_found
    if found is not None:
        assert found.ranks == (5,)
        assert found.severity is Severity.MEDIUM
        assert found.saved_ns == pytest.approx(EXTRA_NS, rel=0.01)
        assert found.confidence.p_value == pytest.approx(8 * (LEAD_FLOOR / 8) ** 4)


def test_few_steps_of_two_ranks_tell_nothing(tmp_path):
    paths = job(tmp_path, num_ranks=2, num_steps=4, extra_ns={1: EXTRA_NS})
    assert "ST005" not in findings(examine(tmp_path, paths)[0])


def test_a_part_of_the_ranks_leaves_waits_unsplit(tmp_path):
    paths = job(tmp_path, extra_ns={2: EXTRA_NS})
    context, made = examine(tmp_path, [paths[0], paths[3]])
    assert made.run.last_attempt.world_size == 4
    assert tuple(made.run.last_attempt.ranks) == (0, 3)
    assert "traces of only 2 of 4 ranks" in made.notes[0]
    budget = context.study.budget
    assert not isinstance(budget, Unavailable)
    assert budget.share_of(Share.UNSPLIT) > 0
    assert budget.share_of(Share.WAIT) == 0
    assert findings(context)["HE002"].severity is Severity.LOW


def test_steps_that_the_profiler_did_not_mark_are_found_by_the_optimizer(tmp_path):
    context, made = examine(
        tmp_path, job(tmp_path, extra_ns={2: EXTRA_NS}, num_steps=3, has_steps=False)
    )
    assert any(note.startswith("steps are found from the ends of optimizer") for note in made.notes)
    timeline = context.study.timeline
    assert not isinstance(timeline, Unavailable)
    assert timeline.steps.tolist() == [0, 1, 2]
    assert any("optimizer steps" in note.text for note in context.study.health.notes)


def keep_steps(path, first, last, *, num_steps):
    """Takes the events of other steps away; every step has as many, in the file's order."""
    with gzip.open(path, "rt") as file:
        document = json.load(file)
    events = document["traceEvents"]
    size = len(events) // num_steps
    document["traceEvents"] = events[first * size : last * size]
    with gzip.open(path, "wt") as file:
        json.dump(document, file)


def number_operations_of(path):
    with gzip.open(path, "rt") as file:
        document = json.load(file)
    count = iter(range(100, 200))
    for event in document["traceEvents"]:
        if event["name"].startswith("nccl"):
            event["args"]["Seq"] = next(count)
    with gzip.open(path, "wt") as file:
        json.dump(document, file)


def test_found_steps_of_ranks_that_begin_at_other_steps_are_numbered_alike(tmp_path):
    paths = job(tmp_path, num_steps=5, has_steps=False)
    for path in paths:
        number_operations_of(path)
    for rank, (first, last) in {1: (1, 5), 2: (0, 4), 3: (2, 5)}.items():
        keep_steps(paths[rank], first, last, num_steps=5)
    _, made = examine(tmp_path, paths)
    steps = {r.rank: r.columns["steps"]["step"].tolist() for r in made.run.last_attempt}
    assert steps == {0: [0, 1, 2, 3, 4], 1: [1, 2, 3, 4], 2: [0, 1, 2, 3], 3: [2, 3, 4]}


def test_a_trace_in_which_nothing_repeats_is_one_step(tmp_path):
    context, made = examine(tmp_path, job(tmp_path, num_steps=1, has_steps=False))
    assert any(note.startswith("steps are not found") for note in made.notes)
    timeline = context.study.timeline
    assert not isinstance(timeline, Unavailable)
    assert timeline.steps.tolist() == [0]


def test_two_windows_of_a_rank_are_put_together(tmp_path):
    early = write_traces(tmp_path / "a", num_ranks=2, num_steps=3, first_step=5)
    late = write_traces(
        tmp_path / "b", num_ranks=2, num_steps=3, first_step=50, skew_ns=lambda rank: 10_000 * MS
    )
    context, _ = examine(tmp_path, [*late, *early])
    timeline = context.study.timeline
    assert not isinstance(timeline, Unavailable)
    assert timeline.steps.tolist() == [5, 6, 7, 50, 51, 52]
    assert timeline.starts_window.tolist() == [True, False, False, True, False, False]


def test_the_same_step_twice_is_an_error(tmp_path):
    one = write_traces(tmp_path / "a", num_ranks=2, num_steps=3)
    other = write_traces(tmp_path / "b", num_ranks=2, num_steps=3)
    with pytest.raises(TraceError, match="are both of step 5 of rank 0"):
        examine(tmp_path, [one[0], other[0]])


def test_jobs_of_different_sizes_are_an_error(tmp_path):
    one = write_traces(tmp_path / "a", num_ranks=2, num_steps=1)
    other = write_traces(tmp_path / "b", num_ranks=3, num_steps=1)
    with pytest.raises(TraceError, match="of jobs with 2 and 3 ranks"):
        examine(tmp_path, [one[0], other[1]])


def test_a_layout_must_fit(tmp_path):
    paths = job(tmp_path, num_steps=1)
    with pytest.raises(TraceError, match="has 8 ranks, the traces are of a job with 4"):
        examine(tmp_path, paths, layout=Layout(dp=8))
    context, _ = examine(tmp_path / "fits", paths, layout=Layout(dp=4))
    assert context.study.layout == Layout(dp=4)


def trace_with_gap(tmp_path, *, synchronises, copies=False, gap_ns=10 * MS):
    """One rank, four steps of 20 ms of kernels with a gap before the second half."""
    trace = RankTrace(0, 1)
    for step in range(4):
        begin = 100 * MS + step * (20 * MS + gap_ns)
        trace.add("user_annotation", f"ProfilerStep#{step}", begin - MS, begin + 19 * MS + gap_ns)
        trace.launch("gemm", begin - 500 * US, begin, begin + 10 * MS)
        again = begin + 10 * MS + gap_ns
        if synchronises:
            trace.add(
                "cuda_runtime", "cudaStreamSynchronize", begin, again - 100 * US,
                args={"correlation": 0},
            )  # fmt: skip
        if copies:
            trace.launch(
                "Memcpy HtoD (Pageable -> Device)", begin - 400 * US, begin + 10 * MS, again,
                category="gpu_memcpy",
            )  # fmt: skip
        trace.launch("gemm", again - 10 * US, again, again + 10 * MS)
    return trace.write(tmp_path / "trace.json.gz")


def test_a_host_that_is_late_is_a_gap(tmp_path):
    context, _ = examine(tmp_path, [trace_with_gap(tmp_path, synchronises=False)])
    found = findings(context)
    assert found["CP004"].saved_ns == pytest.approx(10 * MS, rel=0.01)
    assert "CP005" not in found
    causes = {one.name: one.value for one in found["CP004"].evidence}
    assert causes["idle, the host was at something else"] == pytest.approx(10 * MS, rel=0.01)


def test_a_host_that_synchronises_is_told_from_one_that_is_late(tmp_path):
    context, _ = examine(tmp_path, [trace_with_gap(tmp_path, synchronises=True)])
    found = findings(context)
    assert found["CP005"].saved_ns == pytest.approx(10 * MS, rel=0.01)
    assert found["CP005"].severity >= Severity.MEDIUM
    assert "CP004" not in found  # one cause, one finding


def test_a_short_synchronisation_is_not_told_of(tmp_path):
    path = trace_with_gap(tmp_path, synchronises=True, gap_ns=500 * US)
    assert "CP005" not in findings(examine(tmp_path, [path])[0])


def test_exposed_copies_are_a_line_and_a_finding(tmp_path):
    context, _ = examine(tmp_path, [trace_with_gap(tmp_path, synchronises=False, copies=True)])
    budget = context.study.budget
    assert not isinstance(budget, Unavailable)
    assert budget.share_of(Share.COPY) == pytest.approx(1 / 3, rel=0.02)
    found = findings(context)
    assert found["CP006"].saved_ns == pytest.approx(10 * MS, rel=0.01)
    assert "CP004" not in found


def test_a_copy_is_of_the_range_that_launched_it_not_of_the_one_before(tmp_path):
    trace = RankTrace(0, 1)
    for step in range(3):
        begin = 100 * MS + step * 50 * MS
        trace.add("user_annotation", f"ProfilerStep#{step}", begin, begin + 50 * MS)
        trace.add("user_annotation", "optimizer", begin, begin + 10 * MS)
        trace.add("user_annotation", "forward", begin + 10 * MS, begin + 30 * MS)
        trace.launch(
            "Memcpy HtoD (Pageable -> Device)", begin + 11 * MS, begin + 12 * MS, begin + 13 * MS,
            category="gpu_memcpy",
        )  # fmt: skip
        trace.launch("gemm", begin + 12 * MS, begin + 14 * MS, begin + 20 * MS)
    context, _ = examine(tmp_path, [trace.write(tmp_path / "trace.json.gz")])
    found = context.study.time.device_phase_ns
    assert not isinstance(found, Unavailable)
    assert {name: ns for name, ns in found.items() if ns < 0} == {}
    assert found["forward"] == 3 * 6 * MS


def test_copies_behind_kernels_are_no_finding(tmp_path):
    trace = RankTrace(0, 1)
    for step in range(4):
        begin = 100 * MS + step * 20 * MS
        trace.add("user_annotation", f"ProfilerStep#{step}", begin - MS, begin + 19 * MS)
        trace.launch("gemm", begin - 500 * US, begin, begin + 20 * MS)
        trace.launch(
            "Memcpy HtoD (Pinned -> Device)", begin - 400 * US, begin, begin + 15 * MS,
            stream=9, category="gpu_memcpy",
        )  # fmt: skip
    context, _ = examine(tmp_path, [trace.write(tmp_path / "trace.json.gz")])
    assert diagnose(context).worst in (None, Severity.LOW)


def test_communication_beside_an_idle_device_is_a_hold_up_only_if_work_was_queued(tmp_path):
    """A late host: the all-reduce is exposed, and without it the step would take as long."""
    trace = RankTrace(0, 2)
    for step in range(3):
        begin = 100 * MS + step * 40 * MS
        trace.add("user_annotation", f"ProfilerStep#{step}", begin - MS, begin + 39 * MS)
        trace.launch("gemm", begin - 500 * US, begin, begin + 10 * MS)
        trace.all_reduce(begin - 400 * US, begin + 10 * MS, begin + 20 * MS)
        trace.launch("gemm", begin + 25 * MS, begin + 25 * MS + 10 * US, begin + 40 * MS)
    context, _ = examine(tmp_path, [trace.write(tmp_path / "trace.json.gz")])
    budget = context.study.budget
    assert not isinstance(budget, Unavailable)
    assert budget.share_of(Share.UNSPLIT) == 0
    step_ns = (40 + 40 + 30.01) / 3 * MS
    assert budget.share_of(Share.UNQUEUED) == pytest.approx(10 * MS / step_ns, rel=0.1)
    assert budget.share_of(Share.IDLE_HOST) == pytest.approx(5 * MS / step_ns, rel=0.1)


def test_phases_cover_every_step_once(tmp_path):
    (path,) = write_traces(tmp_path, num_ranks=1, num_steps=3)
    trace = read_trace(path)
    steps = find_steps(trace)
    phases = find_phases(trace, steps)
    assert [NAMES[name] for name in phases.name.tolist()] == 3 * [
        "forward", "backward", "rest", "optimizer", "rest",
    ]  # fmt: skip
    assert (phases.begin_ns[1:] == phases.end_ns[:-1]).all()
    total = int((phases.end_ns - phases.begin_ns).sum())
    assert total == int((steps.end_ns - steps.begin_ns).sum())


def test_many_gaps_are_merged_and_it_is_said(tmp_path):
    trace = RankTrace(0, 1)
    trace.add("user_annotation", "ProfilerStep#0", 99 * MS, 200 * MS)
    for place in range(2_000):
        begin = 100 * MS + place * 40 * US
        trace.launch("short", begin - 50 * US, begin, begin + 38_500)
    path = trace.write(tmp_path / "trace.json.gz")
    exact = record_trace(read_trace(path), max_spans=2_000).work
    assert exact is not None
    assert (len(exact.spans), exact.merged_gap_ns) == (2_000, 0)
    merged = record_trace(read_trace(path), max_spans=1_000)
    assert merged.work is not None
    assert (len(merged.work.spans), merged.work.merged_gap_ns) == (1, 2_000)
    made = make_run([merged], path)
    assert "device gaps of up to 2 µs count as the work around them" in made.notes


def test_a_trace_without_events_is_an_error_of_its_own(tmp_path):
    path = RankTrace(0, 1).write(tmp_path / "trace.json.gz")
    with pytest.raises(TraceError):
        examine(tmp_path, [path])


def test_collectives_of_no_known_group_are_of_all_ranks_where_all_have_them(tmp_path):
    def forget(path):
        with gzip.open(path, "rt") as file:
            document = json.load(file)
        document["distributedInfo"].pop("pg_config", None)
        for event in document["traceEvents"]:
            for key in [key for key in event.get("args", {}) if "Group" in key or key == "Seq"]:
                del event["args"][key]
        with gzip.open(path, "wt") as file:
            json.dump(document, file)
        return path

    paths = [forget(path) for path in job(tmp_path, extra_ns={2: EXTRA_NS})]
    context, made = examine(tmp_path, paths)
    assert any("name no group for 12 collectives of each rank" in note for note in made.notes)
    lines = {line.name: place for place, line in enumerate(context.study.budget.lines)}
    of_ranks = context.study.budget.of_ranks_ns() / 12
    waits = of_ranks[:, lines["exposed wait world"]].tolist()
    assert waits == pytest.approx([EXTRA_NS, EXTRA_NS, 0, EXTRA_NS], abs=2 * US)
    # Without one of the ranks nobody knows whom the others waited for.
    (tmp_path / "part").mkdir()
    _, part = examine(tmp_path / "part", paths[:3])
    assert not any("name no group" in note for note in part.notes)


def test_a_cut_trace_is_a_note_of_the_run(tmp_path):
    paths = job(tmp_path, num_ranks=2)
    with gzip.open(paths[1], "rb") as file:
        content = file.read()
    cut = tmp_path / "traces" / "rank1.json"
    cut.write_bytes(content[: content.rindex(b"ProfilerStep") + 200])
    context, _ = examine(tmp_path, [paths[0], cut])
    (note,) = context.study.health.notes
    assert note.text.startswith("rank1.json: the JSON is cut off at byte")
    assert note.ranks == (1,)


def test_a_trace_that_is_cut_off_gives_no_verdict(tmp_path):
    paths = job(tmp_path, extra_ns={2: EXTRA_NS})
    whole = gzip.decompress(paths[1].read_bytes())
    paths[1] = paths[1].with_name("rank1.json")
    paths[1].write_bytes(whole[: len(whole) * 3 // 4])
    found = findings(examine(tmp_path, paths)[0])
    above = [code for code, one in found.items() if one.severity > Severity.LOW]
    assert all(code.startswith("HE") for code in above)
    assert "cut off" in found["HE003"].summary


@pytest.mark.skipif(not NCCL.exists(), reason="no traces in ../shared/data/nccl")
def test_a_real_pipelines_layout_and_bubble_come_from_its_messages(tmp_path):
    context, made = examine(tmp_path, [NCCL / f"rank{rank}.json.gz" for rank in range(4)])
    assert made.run.last_attempt.ranks[0].header["layout_source"] == "from who sends to whom"
    budget = context.study.budget
    assert not isinstance(budget, Unavailable)
    lines = {line.name: place for place, line in enumerate(budget.lines)}
    of_ranks = budget.of_ranks_ns() / 3 / MS
    bubble = of_ranks[:, lines["pipeline bubble"]]
    told = [lines[name] for name in lines if name == "pipeline bubble" or "exposed" in name]
    # docs/NCCL.md of the shared data: communication that nothing hides, ms a step, by rank.
    assert of_ranks[:, told].sum(axis=1).tolist() == pytest.approx(
        [23.4, 28.1, 41.8, 23.7], rel=0.05
    )
    assert bubble.min() > 5

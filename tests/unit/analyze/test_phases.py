import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS, START_MONO_NS, make_writer, put_span, put_step
from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.study import Study
from meshscope.store.read.columns import ProblemKind
from meshscope.store.read.run import open_run

T0 = START_MONO_NS


def summarize(path, **options):
    return Study(open_run(path).last_attempt, **options)


def test_a_phase_belongs_to_the_interval_that_wholly_contains_it(tmp_path):
    writer = make_writer(tmp_path)
    put_span(writer, "data", T0 + 100, 10)  # start-up
    put_span(writer, "data", T0 + 1000, 200)  # at the very start of step 0
    put_span(writer, "optimizer", T0 + 1500, 500)  # to the very end of step 0
    put_step(writer, 0, T0 + 1000, T0 + 2000)
    put_span(writer, "checkpoint", T0 + 2000, 300)  # the gap, from its start
    put_span(writer, "eval", T0 + 2500, 500)  # the gap, to its end
    put_span(writer, "forward", T0 + 3000, 400)
    put_step(writer, 1, T0 + 3000, T0 + 4000)
    put_span(writer, "logging", T0 + 4100, 50)  # after the last
    writer.close(end_host_mono_ns=T0 + 5000)

    time = summarize(tmp_path).ranks[0].time
    assert time.before_first.phase_ns == {"data": 10}
    assert time.steps.phase_ns == {"data": 200, "optimizer": 500, "forward": 400}
    assert time.between.phase_ns == {"checkpoint": 300, "eval": 500}
    assert time.after_last.phase_ns == {"logging": 50}
    walls = [
        part.wall_ns for part in (time.before_first, time.steps, time.between, time.after_last)
    ]
    assert walls == [1000, 2000, 1000, 1000]
    assert time.wall_ns == sum(walls) == 5000
    assert time.steps.unattributed_ns == 900
    assert time.between.unattributed_ns == 200


def test_a_phase_across_a_step_boundary_is_a_container_and_is_counted(tmp_path):
    writer = make_writer(tmp_path)
    put_span(writer, "forward", T0 + 1100, 100, depth=1)
    put_step(writer, 0, T0 + 1000, T0 + 2000)
    put_span(writer, "epoch", T0 + 500, 2000, self_ns=1900)
    writer.close(end_host_mono_ns=T0 + 3000)

    summary = summarize(tmp_path)
    assert summary.time.containers == {"epoch": 1}
    assert summary.time.steps.phase_ns == {"forward": 100}
    assert summary.time.steps.unattributed_ns == 900


def test_detail_spans_and_other_threads_take_nothing_from_the_partition(tmp_path):
    writer = make_writer(tmp_path)
    put_span(writer, "attention", T0 + 1100, 50, flags=2, depth=1)
    put_span(writer, "forward", T0 + 1100, 100)
    put_span(writer, "prefetch", T0 + 1000, 900, thread=1)
    put_step(writer, 0, T0 + 1000, T0 + 2000)
    writer.close(end_host_mono_ns=T0 + 2000)

    summary = summarize(tmp_path)
    assert summary.time.steps.phase_ns == {"forward": 100}
    assert summary.time.num_other_threads == 1


def test_recorded_time_begins_with_the_first_step_when_the_header_came_later(tmp_path):
    writer = make_writer(tmp_path)  # the header is written when the first phase ends
    put_span(writer, "data", T0 - 300, 300)
    put_step(writer, 0, T0 - 300, T0 + 700)
    writer.close(end_host_mono_ns=T0 + 1000)

    time = summarize(tmp_path).ranks[0].time
    assert time.before_first.wall_ns == 0
    assert time.wall_ns == 1300
    assert time.after_last.wall_ns == 300


def test_without_a_closing_line_time_runs_to_the_last_record(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, T0 + 1000, T0 + 2000)
    put_span(writer, "data", T0 + 2100, 400)
    writer.journal.close()

    rank = summarize(tmp_path).ranks[0]
    assert rank.time.after_last.wall_ns == 500
    assert rank.state == "still running or killed"


def test_custom_phases_are_matched_by_name_not_by_id(tmp_path):
    for rank, names in enumerate((("augment", "pack"), ("pack", "augment"))):
        writer = make_writer(tmp_path, rank, 2)
        for name in names:
            duration = 100 if name == "augment" else 7
            put_span(writer, name, T0 + 1000 + (0 if name == names[0] else 200), duration)
        put_step(writer, 0, T0 + 1000, T0 + 2000)
        writer.close(end_host_mono_ns=T0 + 2000)

    summary = summarize(tmp_path)
    assert summary.time.steps.phase_ns == {"augment": 200, "pack": 14}


def test_packed_phases_of_a_step_are_split_like_spans(tmp_path):
    writer = make_writer(tmp_path)
    put_span(writer, "checkpoint", T0 + 400, 600)  # before the step, in a record of its own
    data, forward = (T0 + 1000, T0 + 1200), (T0 + 1300, T0 + 1400)
    writer.table("phases").put(*data, *forward, 0, 0, 0)
    put_step(writer, 0, T0 + 1000, T0 + 2000)
    writer.close(end_host_mono_ns=T0 + 2000)

    time = summarize(tmp_path).ranks[0].time
    assert time.steps.phase_ns == {"data": 200, "forward": 100}
    assert time.before_first.phase_ns == {"checkpoint": 600}


def test_a_run_without_steps_is_all_start_up(tmp_path):
    writer = make_writer(tmp_path)
    put_span(writer, "forward", T0 + 10, 90)
    writer.close(end_host_mono_ns=T0 + 100)

    time = summarize(tmp_path).ranks[0].time
    assert (time.before_first.wall_ns, time.after_last.wall_ns) == (100, 0)
    assert time.before_first.phase_ns == {"forward": 90}
    assert time.after_last.phase_ns == {}


def test_steps_that_overlap_an_earlier_one_are_left_out_and_reported(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, T0, T0 + 100)
    put_step(writer, 1, T0 + 50, T0 + 150)
    put_step(writer, 2, T0 + 100, T0 + 300)
    writer.close(end_host_mono_ns=T0 + 300)

    summary = summarize(tmp_path)
    assert summary.ranks[0].num_steps == 2
    (problem,) = summary.health.problems
    assert problem.kind is ProblemKind.OVERLAPPING_STEPS
    assert "1 step(s) of rank 0 overlap" in problem.text
    assert summary.ranks[0].num_problems == 1
    assert summary.ranks[0].time.steps.wall_ns == 300


def test_a_step_that_ends_before_it_starts_is_damage():
    columns = {
        "step": np.array([0, 1, 2, 3]),
        "start_host_mono_ns": np.array([100, 200, 300, 350]),
        "end_host_mono_ns": np.array([200, 150, 400, 450]),
    }
    steps = order_steps(columns)
    assert steps.step.tolist() == [0, 2]
    assert (steps.num_overlapping, steps.num_reversed) == (1, 1)


def test_steps_numbered_backwards_are_still_cut_in_order_of_time():
    columns = {
        "step": np.array([10, 3]),
        "start_host_mono_ns": np.array([200, 100]),
        "end_host_mono_ns": np.array([300, 200]),
    }
    steps = order_steps(columns)
    assert steps.step.tolist() == [3, 10]
    assert steps.num_overlapping == 0


@st.composite
def timelines(draw):
    """Random steps, gaps and properly nested phases: lists of (kind, …) in order of time."""
    now = T0 + draw(st.integers(0, 10**12))
    spans: list[tuple[str, int, int, int, int]] = []  # name, start, duration, self, depth
    steps: list[tuple[int, int]] = []

    def phases(start: int, end: int, depth: int) -> int:
        """Fills an interval with phases; the time they take together."""
        taken = 0
        for _ in range(draw(st.integers(0, 3 if depth < 3 else 0))):
            if start > end:
                break
            begin = draw(st.integers(start, end))
            finish = draw(st.integers(begin, end))
            inner = phases(begin, finish, depth + 1)
            name = draw(st.sampled_from(["data", "forward", "backward", "mine", "[red]"]))
            spans.append((name, begin, finish - begin, finish - begin - inner, depth))
            taken += finish - begin
            start = finish
        return taken

    for _ in range(draw(st.integers(0, 6))):
        gap_end = now + draw(st.integers(0, 5 * MS))
        phases(now, gap_end, 0)
        step_end = gap_end + draw(st.integers(0, 50 * MS))
        phases(gap_end, step_end, 0)
        steps.append((gap_end, step_end))
        now = step_end
    after = now + draw(st.integers(0, MS))
    phases(now, after, 0)
    return spans, steps, after


@settings(max_examples=150, deadline=None)
@given(timelines(), st.integers(0, 3))
def test_any_nested_phases_and_gaps_sum_to_the_wall_clock_exactly(tmp_path_factory, line, warmup):
    spans, steps, end = line
    path = tmp_path_factory.mktemp("run")
    writer = make_writer(path)
    for name, start, duration, self_ns, depth in spans:
        put_span(writer, name, start, duration, self_ns=self_ns, depth=depth)
    for index, (begin, finish) in enumerate(steps):
        put_step(writer, index, begin, finish)
    writer.close(end_host_mono_ns=end)

    rank = summarize(path, warmup_steps=warmup).ranks[0]
    time = rank.time
    parts = (time.before_first, time.steps, time.between, time.after_last)
    assert time.containers == {}
    assert sum(part.wall_ns for part in parts) == time.wall_ns == end - T0
    assert time.steps.wall_ns == sum(finish - begin for begin, finish in steps)
    for part in (*parts, time.steady_steps):
        assert part.unattributed_ns >= 0
        assert sum(part.phase_ns.values()) + part.unattributed_ns == part.wall_ns
    # A phase of no length may sit on a cut; all others are found exactly once.
    found = sum(sum(part.phase_ns.values()) for part in parts)
    assert found == sum(self_ns for _, _, _, self_ns, _ in spans)

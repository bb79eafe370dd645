import pytest

from builders import MS, START_MONO_NS, START_UNIX_NS, Faults, make_run, make_writer, put_step
from meshscope.analyze.health import Note
from meshscope.analyze.rank.caught_errors import CaughtErrors
from meshscope.analyze.rank.rank_summary import RankState
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.columns import ProblemKind
from meshscope.store.read.run import open_run
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import (
    FIRST_STAMP_WORD,
    PHASE_ORDER,
    STAMP_FACTOR,
    OpenStepWriter,
)


def summarize(path):
    return Study(open_run(path).last_attempt)


def test_a_good_run_is_complete(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2))
    health = summarize(tmp_path).health
    assert health.is_complete
    assert (health.overhead.num_steps, health.overhead.median_ns) == (2, 20_000)
    assert health.overhead.is_warmup_only  # 5 steps, of which only the first was measured
    assert health.overhead.max_ratio == 20_000 / (100 * MS)
    assert health.opening_cost_ns == 4 * MS


def test_the_recorders_cost_is_that_of_steps_after_the_warm_up(tmp_path):
    writer = make_writer(tmp_path)
    for step, cost in enumerate((9_000_000, -1, 10, -1, 30)):
        start = START_MONO_NS + step * 1000
        put_step(writer, step, start, start + 1000, recorder_ns=cost)
    writer.close(end_host_mono_ns=START_MONO_NS + 5000)
    overhead = summarize(tmp_path).health.overhead
    assert (overhead.num_steps, overhead.median_ns, overhead.max_ns) == (2, 20, 30)
    assert overhead.p95_ns == pytest.approx(29)
    assert (overhead.median_ratio, overhead.p95_ratio, overhead.max_ratio) == pytest.approx(
        (0.02, 0.029, 0.03)
    )
    assert not overhead.is_warmup_only


def test_killed_missing_and_damaged_ranks_are_named(tmp_path):
    faults = Faults(killed={1: 2}, missing=frozenset({3}), damaged={0: "spans"})
    make_run(tmp_path, layout=Layout(dp=4), num_steps=6, faults=faults)
    summary = summarize(tmp_path)
    health = summary.health
    assert not health.is_complete
    assert list(health.missing_ranks) == [3]
    assert (health.short_ranks, health.unfinished_ranks) == ((1,), (1,))
    kinds = [problem.kind for problem in health.problems]
    assert kinds == [ProblemKind.MISSING_RANK, ProblemKind.DAMAGED, ProblemKind.SHORT_RANK]
    assert health.problems[-1].text == "recorded 2 of 6 steps"
    killed = summary.ranks[1]
    assert killed.state is RankState.OPEN
    assert killed.last_record_unix_ns == START_UNIX_NS + 500 * MS + 201 * MS
    assert summary.steps.num_partial == 4


def test_one_step_less_is_no_short_rank(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=6, faults=Faults(killed={1: 5}))
    assert summarize(tmp_path).health.short_ranks == ()


def test_a_rank_of_which_more_was_thinned_away_is_no_short_rank(tmp_path):
    kept = {0: range(40), 1: [*range(8), *range(24, 40)], 2: range(30)}
    for rank, steps in kept.items():
        writer = make_writer(tmp_path, rank, 3, max_bytes=4 << 20)
        for step in steps:
            begin = START_MONO_NS + step * 100 * MS
            put_step(writer, step, begin, begin + 90 * MS)
        writer.close(end_host_mono_ns=START_MONO_NS + 4000 * MS, num_errors=0, errors={})
    health = summarize(tmp_path).health
    assert health.short_ranks == (2,)
    assert [problem.text for problem in health.problems] == ["recorded 30 of 40 steps"]


def test_errors_are_added_up_per_site(tmp_path):
    faults = Faults(errors={0: {"scalar": 3}, 1: {"scalar": 4, "memory sample": 1}})
    make_run(tmp_path, layout=Layout(dp=2), faults=faults)
    summary = summarize(tmp_path)
    assert summary.health.errors[0] == CaughtErrors(
        site="scalar", count=7, is_at_least=False, ranks=(0, 1), first_message="ValueError: made up"
    )
    assert summary.health.num_errors == 8
    assert [rank.num_errors for rank in summary.ranks] == [3, 5]


def test_a_killed_ranks_errors_come_from_its_journal(tmp_path):
    writer = make_writer(tmp_path)
    writer.journal.write("health", cause="recorder", where="scalar", count=1, text="ValueError: x")
    writer.journal.write("health", cause="gap", where="tap", text="backward is not timed")
    writer.journal.close()
    health = summarize(tmp_path).health
    assert health.errors == (
        CaughtErrors(
            site="scalar", count=1, is_at_least=True, ranks=(0,), first_message="ValueError: x"
        ),
    )
    assert health.notes == (Note(where="tap", text="backward is not timed", ranks=(0,)),)
    assert health.opening_cost_ns == Unavailable("no rank wrote its closing line")
    assert health.overhead == Unavailable("the recorder timed itself in no undisturbed step")


def test_records_without_space_are_counted(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, START_MONO_NS, START_MONO_NS + 10)
    writer.table("steps").num_dropped = 12
    writer.close(end_host_mono_ns=START_MONO_NS + 20)
    health = summarize(tmp_path).health
    assert health.num_dropped == 12
    assert not health.is_complete


def test_odd_journal_values_do_not_stop_the_summary(tmp_path):
    writer = make_writer(tmp_path, host=7, start_host_mono_ns="x", provenance=[1])
    put_step(writer, 0, 100, 200)
    writer.close(end_host_mono_ns=None, errors={"scalar": 3}, opening_cost_ns=True)
    summary = summarize(tmp_path)
    assert summary.ranks[0].host == Unavailable("the rank's journal does not say")
    assert summary.ranks[0].time.wall_ns == 100
    assert summary.health.errors[0].count == 1


def test_an_unfinished_rank_is_said_to_be_in_the_phase_it_was_in(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, START_MONO_NS, START_MONO_NS + 10)
    stamps = OpenStepWriter(NowFile(writer.directory / NOW_NAME, mapped=True), START_MONO_NS)
    at = PHASE_ORDER.index("forward")
    stamps.words[FIRST_STAMP_WORD + 2 * at] = 50 * STAMP_FACTOR
    writer.journal.close()
    assert summarize(tmp_path).ranks[0].open_phase == "forward"


def test_a_closing_line_that_does_not_say_is_told_from_none_at_all(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, START_MONO_NS, START_MONO_NS + 10)
    writer.close(end_host_mono_ns=START_MONO_NS + 20)
    health = summarize(tmp_path).health
    assert health.opening_cost_ns == Unavailable("no rank's closing line says")
    assert health.unfinished_ranks == ()


def test_a_rank_without_steps_that_ended_with_the_others_did_not_stop_before_them(tmp_path):
    """As ranks that evaluate or wait, and those whose gradients another rank's optimizer takes."""
    ends_ns = {0: 4000 * MS, 1: 3990 * MS, 2: 2000 * MS, 3: None}
    for rank, end_ns in ends_ns.items():
        writer = make_writer(tmp_path, rank, len(ends_ns))
        for step in range(40) if not rank else ():
            begin = START_MONO_NS + step * 100 * MS
            put_step(writer, step, begin, begin + 90 * MS)
        if end_ns is not None:
            end = START_MONO_NS + end_ns
            writer.close(end_host_mono_ns=end, num_errors=0, errors={})
    health = summarize(tmp_path).health
    assert health.short_ranks == (2, 3)  # one left in mid-training, one never ended

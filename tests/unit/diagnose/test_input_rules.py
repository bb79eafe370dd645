"""Rules about waiting for data: what they must find, and what they must leave alone."""

from pathlib import Path

import numpy as np
import pytest

from builders import MS
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.rules.input_stalls import InputBound, SlowLoader, WorkBetweenSteps
from timeline_builders import TimedJob, make_dp_run


def _work(data_ms: dict[int, float], num_ranks: int = 4) -> dict[int, dict[str, float]]:
    return {
        rank: {"data": data_ms.get(rank, 0.5), "forward": 20, "backward": 40}
        for rank in range(num_ranks)
    }


def _find(rule: type, context: Context) -> list[Finding]:
    return list(rule().run(context))


def test_one_slow_loader(tmp_path: Path) -> None:
    context = Context(Study(make_dp_run(tmp_path, _work({2: 15.5}), num_steps=20)))
    (finding,) = _find(SlowLoader, context)

    assert finding.ranks == (2,)
    assert finding.severity is Severity.HIGH
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(15 * MS, rel=0.02)
    assert _find(InputBound, context) == []


def test_two_slow_loaders_of_four(tmp_path: Path) -> None:
    context = Context(Study(make_dp_run(tmp_path, _work({1: 15.5, 2: 12.5}), num_steps=20)))
    (finding,) = _find(SlowLoader, context)
    assert finding.ranks == (1, 2)


def test_slow_loader_in_the_gap_between_steps(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    for step in range(20):
        at = 100 * step * MS
        for rank, data in ((0, 1), (1, 21)):
            job.phase(rank, "data", at, at + data * MS)
            job.own_step(rank, step, at + data * MS, at + 100 * MS)
        job.collective(group, {0: at + 61 * MS, 1: at + 81 * MS}, transfer_ns=19 * MS, step=step)
    (finding,) = _find(SlowLoader, Context(Study(job.close())))
    assert finding.ranks == (1,)
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(20 * MS, rel=0.02)


def test_all_loaders_slow(tmp_path: Path) -> None:
    context = Context(
        Study(make_dp_run(tmp_path, _work(dict.fromkeys(range(4), 15.0)), num_steps=20))
    )
    (finding,) = _find(InputBound, context)

    assert finding.ranks == (0, 1, 2, 3)
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(15 * MS, rel=0.02)
    assert _find(SlowLoader, context) == []


@pytest.mark.parametrize("data_ms", [{}, {2: 1.5}, dict.fromkeys(range(4), 2.0)])
def test_usual_loaders_are_left_alone(tmp_path: Path, data_ms: dict[int, float]) -> None:
    context = Context(Study(make_dp_run(tmp_path, _work(data_ms), num_steps=20)))
    assert _find(SlowLoader, context) == []
    assert _find(InputBound, context) == []


@pytest.mark.parametrize("num_waits", [1, 3])
def test_one_long_wait_is_a_start_and_several_are_a_stall(tmp_path: Path, num_waits: int) -> None:
    """Workers of a loader that start once, 366 ms; or at each of three epochs."""
    job = TimedJob(tmp_path, num_ranks=1)
    at = 0
    for step in range(42):
        data = 366 if step in range(1, 14 * num_waits, 14) else 0.2
        end = at + int((data + 10) * MS)
        job.phase(0, "data", at, at + int(data * MS))
        job.phase(0, "forward", at + int(data * MS), end)
        job.own_step(0, step, at, end)
        at = end
    found = _find(InputBound, Context(Study(job.close())))
    assert bool(found) == (num_waits > 1)


def test_ranks_that_take_turns_are_left_alone(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=4, layout=Layout(dp=4))
    group = job.group(range(4), description="mesh_dp")
    rng = np.random.default_rng(0)
    at = 0
    for step in range(40):
        slow = int(rng.integers(4))
        at = job.train(
            num_steps=1,
            work_ms=_work({slow: 12.0}),
            transfer_ms=2,
            group=group,
            first_step=step,
            start_ns=at,
        )
    assert _find(SlowLoader, Context(Study(job.close()))) == []


def test_one_of_some_tensor_parallel_ranks_is_slow_to_fetch(tmp_path: Path) -> None:
    """They read the same data: one that takes longer is slow, training as such is not."""
    layout = Layout(tp=4)
    run = make_dp_run(tmp_path, _work({1: 15.5}), num_steps=20, layout=layout)
    context = Context(Study(run))
    (finding,) = _find(SlowLoader, context)
    assert finding.ranks == (1,)
    assert _find(InputBound, context) == []


def test_one_tensor_parallel_rank_fetches_for_all(tmp_path: Path) -> None:
    """The others fetch nothing, and are no peers: training waits for the loader."""
    work = _work({0: 15.0})
    for rank in (1, 2, 3):
        del work[rank]["data"]
    context = Context(Study(make_dp_run(tmp_path, work, num_steps=20, layout=Layout(tp=4))))
    assert _find(SlowLoader, context) == []
    (finding,) = _find(InputBound, context)
    assert finding.ranks == (0,)


def test_first_stage_of_a_pipeline_loads_for_all(tmp_path: Path) -> None:
    """Other stages load nothing, and are no peers."""
    work: dict[int, dict[str, float]] = {0: {"data": 3.0, "forward": 40}, 1: {"forward": 43}}
    context = Context(Study(make_dp_run(tmp_path, work, num_steps=20, layout=Layout(pp=2))))
    assert _find(SlowLoader, context) == []


@pytest.mark.parametrize(("data_ms", "ranks"), [(30.0, (0,)), (3.0, None)])
def test_one_stage_of_a_pipeline_is_slow_to_fetch(
    tmp_path: Path, data_ms: float, ranks: tuple[int, ...] | None
) -> None:
    """Every stage fetches; what the first one fetches more by plan is left alone."""
    work: dict[int, dict[str, float]] = {
        rank: {"data": 0.5 if rank else data_ms, "forward": 60 + rank} for rank in range(3)
    }
    context = Context(Study(make_dp_run(tmp_path, work, num_steps=20, layout=Layout(pp=3))))
    assert [one.ranks for one in _find(SlowLoader, context)] == ([] if ranks is None else [ranks])
    assert _find(InputBound, context) == []


def test_few_steps_say_nothing(tmp_path: Path) -> None:
    context = Context(Study(make_dp_run(tmp_path, _work({2: 15.5}), num_steps=6)))
    assert _find(SlowLoader, context) == []


def test_program_without_loader_phases(tmp_path: Path) -> None:
    work: dict[int, dict[str, float]] = {0: {"forward": 10}, 1: {"forward": 30}}
    context = Context(Study(make_dp_run(tmp_path, work, num_steps=20)))
    assert _find(SlowLoader, context) == []
    assert _find(InputBound, context) == []
    assert context.study.failures == []


def make_unnamed_run(folder: Path, gap_ms: tuple[float, ...], *, saves_every: int = 0) -> Context:
    """No rank has the phase `data`; each spends time between steps that nothing names."""
    job = TimedJob(folder, num_ranks=len(gap_ms), layout=Layout(dp=len(gap_ms)))
    group = job.group(range(len(gap_ms)), description="mesh_dp")
    at = 0
    for step in range(20):
        is_saving = saves_every > 0 and step % saves_every == 0
        begin = {
            rank: at + round((gap + (80 if is_saving else 0)) * MS)
            for rank, gap in enumerate(gap_ms)
        }
        arrivals = {rank: begin[rank] + 40 * MS for rank in begin}
        end = max(arrivals.values()) + 2 * MS
        for rank in begin:
            job.own_step(rank, step, begin[rank], end)
        job.collective(group, arrivals, transfer_ns=2 * MS, step=step)
        at = end
    return Context(Study(job.close()))


def test_a_plain_iterator_that_is_slow_on_one_rank(tmp_path: Path) -> None:
    context = make_unnamed_run(tmp_path, (0.5, 20.5, 0.5))
    assert _find(SlowLoader, context) == []  # nobody saw a loader
    (finding,) = _find(WorkBetweenSteps, context)
    assert finding.ranks == (1,)
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "rank 1 spends time between steps"
    assert "workers" not in finding.change
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(20 * MS, rel=0.02)
    assert _find(InputBound, context) == []


def test_a_plain_iterator_that_is_slow_on_all_ranks(tmp_path: Path) -> None:
    context = make_unnamed_run(tmp_path, (20.0, 20.0, 20.0))
    assert _find(InputBound, context) == []  # nobody saw a loader: "more workers" is a guess
    (finding,) = _find(WorkBetweenSteps, context)
    assert finding.title == "ranks 0-2 spend time between steps"
    assert finding.severity is Severity.LOW
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(20 * MS, rel=0.02)
    assert _find(SlowLoader, context) == []


@pytest.mark.parametrize("saves_every", [0, 5])
def test_what_is_short_or_rare_between_steps_is_left_alone(
    tmp_path: Path, saves_every: int
) -> None:
    context = make_unnamed_run(tmp_path, (1.5, 1.5, 1.5), saves_every=saves_every)
    assert _find(SlowLoader, context) == []
    assert _find(InputBound, context) == []

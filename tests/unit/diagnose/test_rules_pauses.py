import numpy as np
import pytest
from diagnosed import context_of

from builders import MS
from late_runs import LateRun, noisy
from made_programs import ProgramRun, reduce, replay_of, work
from meshscope.analyze.timeline.gc_collections import Collections
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.collected import remove_collections
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.relief import remove_pauses
from meshscope.diagnose.runner import diagnose
from meshscope.simulate.what_if import build_replay
from timeline_builders import TimedJob

OWN = {
    code: RULES[code] for code in ("ST001", "ST002", "ST003", "ST004", "IM001", "PA001", "PA002")
}
LAYOUT = Layout(dp=4)


def paused(seed, is_paused, pause_ns):
    plain = noisy(seed)

    def work(rank, step):
        extra = pause_ns if is_paused(rank, step) else 0
        own = plain(rank, step)
        return {**own, "forward": own["forward"] + extra}

    return work


def every_fifth(rank, step):
    return rank == 1 and step % 5 == 4


def record(path, work, **fields):
    return LateRun(layout=LAYOUT, work=work, num_steps=41, **fields).record(path)


def diagnose_run(path):
    return diagnose(context_of(path), rules=OWN).findings


def test_recorded_collections_are_named_and_priced_as_removing_them_is(tmp_path):
    slow_ns = record(
        tmp_path / "slow",
        paused(1, every_fifth, 60 * MS),
        collections=lambda rank, step: 60 * MS if every_fifth(rank, step) else 0,
    )
    fast_ns = record(tmp_path / "fast", noisy(1))
    (finding,) = diagnose_run(tmp_path / "slow")
    assert (finding.code, finding.ranks) == ("PA001", (1,))
    assert finding.title == "garbage collection stops rank 1"
    assert finding.saved_ns == pytest.approx(slow_ns - fast_ns, rel=0.1)
    assert finding.severity is Severity.HIGH


@pytest.mark.parametrize(("steps", "severity"), [({12}, Severity.LOW), ({12, 15}, Severity.HIGH)])
def test_collections_of_a_single_step_do_not_tell_how_often_they_come(tmp_path, steps, severity):
    record(
        tmp_path,
        paused(1, lambda rank, step: rank == 1 and step in steps, 200 * MS),
        collections=lambda rank, step: 200 * MS if rank == 1 and step in steps else 0,
    )
    (finding,) = [one for one in diagnose_run(tmp_path) if one.code == "PA001"]
    assert finding.severity is severity


def test_what_makes_the_garbage_is_part_of_the_pause(tmp_path):
    """25 ms of a pause of 60 ms are a collection: all of it is told as one."""
    slow_ns = record(
        tmp_path / "slow",
        paused(2, every_fifth, 60 * MS),
        collections=lambda rank, step: 25 * MS if every_fifth(rank, step) else 0,
    )
    fast_ns = record(tmp_path / "fast", noisy(2))
    (finding,) = diagnose_run(tmp_path / "slow")
    assert finding.code == "PA001"
    assert finding.saved_ns == pytest.approx(slow_ns - fast_ns, rel=0.1)


def longer_beside(seed, is_longer):
    """Rank 1 collects 30 ms in every fifth step; rank 3 takes 50 ms longer in some steps."""
    plain = paused(seed, every_fifth, 30 * MS)

    def work(rank, step):
        own = plain(rank, step)
        extra = 50 * MS if rank == 3 and is_longer(step) else 0
        return {**own, "backward": own["backward"] + extra}

    return work


def test_what_other_ranks_lose_in_the_same_steps_comes_with_the_collections(tmp_path):
    """As if two ranks wanted one core."""
    slow_ns = record(
        tmp_path / "slow",
        longer_beside(7, lambda step: step % 5 == 4),
        collections=lambda rank, step: 30 * MS if every_fifth(rank, step) else 0,
    )
    fast_ns = record(tmp_path / "fast", noisy(7))
    (finding,) = [one for one in diagnose_run(tmp_path / "slow") if one.code == "PA001"]
    assert finding.saved_ns == pytest.approx(slow_ns - fast_ns, rel=0.1)


def test_what_other_ranks_lose_in_other_steps_as_well_does_not(tmp_path):
    record(
        tmp_path,
        longer_beside(8, lambda step: step % 2 == 0),
        collections=lambda rank, step: 30 * MS if every_fifth(rank, step) else 0,
    )
    (finding,) = [one for one in diagnose_run(tmp_path) if one.code == "PA001"]
    assert 0 < finding.saved_ns <= 6.5 * MS, "30 ms in every fifth step"


def test_a_rank_that_collects_in_every_step_is_not_called_slow(tmp_path):
    record(
        tmp_path,
        paused(3, lambda rank, step: rank == 2, 10 * MS),
        collections=lambda rank, step: 10 * MS if rank == 2 else 0,
    )
    (finding,) = diagnose_run(tmp_path)
    assert (finding.code, finding.ranks) == ("PA001", (2,))


def test_pauses_without_a_recorded_cause_are_told_as_such(tmp_path):
    slow_ns = record(tmp_path / "slow", paused(4, every_fifth, 60 * MS))
    fast_ns = record(tmp_path / "fast", noisy(4))
    (finding,) = diagnose_run(tmp_path / "slow")
    assert (finding.code, finding.ranks) == ("PA002", (1,))
    assert finding.title == "rank 1 pauses occasionally"
    assert "in forward and not in backward" in finding.summary
    assert finding.saved_ns == pytest.approx(slow_ns - fast_ns, rel=0.1)


def test_a_pause_in_several_pieces_is_taken_from_all_of_them(tmp_path):
    """As in a pipeline whose microbatches all take longer in one step."""

    def make(rank, step):
        extra = 25 * MS if (rank, step) == (1, 3) else 0
        return [
            part
            for _ in range(4)
            for part in (work("forward", 10 * MS + extra), reduce((0, 1), MS))
        ]

    run = ProgramRun(make, num_ranks=2, num_steps=6, layout=Layout(dp=2))
    replay = replay_of(run, tmp_path)
    excess = np.zeros((len(replay.timeline.steps), 2))
    excess[replay.timeline.steps == 3, 1] = 100 * MS
    (gain,) = replay.price([remove_pauses(replay.timeline, excess, name="without")])
    assert gain.saved_ns * len(replay.timeline.steps) == pytest.approx(100 * MS)


def test_short_collections_are_not_worth_a_line(tmp_path):
    record(tmp_path, noisy(5), collections=lambda rank, step: MS // 4)
    assert diagnose_run(tmp_path) == ()


def test_collections_on_all_ranks_name_no_rank(tmp_path):
    def collects(rank, step):
        return (step + rank) % 4 == 0

    record(
        tmp_path,
        paused(6, collects, 20 * MS),
        collections=lambda rank, step: 20 * MS if collects(rank, step) else 0,
    )
    (finding,) = [one for one in diagnose_run(tmp_path) if one.severity > Severity.LOW]
    assert (finding.code, finding.ranks) == ("PA001", ())


@pytest.mark.parametrize(("every", "saved_ms"), [(5, 14), (2, 6)])
def test_transfers_that_are_longer_beside_collections_come_with_them(tmp_path, every, saved_ms):
    """Every fifth step has a collection of 30 ms on both ranks; in every so many steps the sum
    takes 40 ms longer, as where threads that move data have no core."""
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    now, num_steps = 0, 40
    for step in range(num_steps):
        start, pause = now, 30 * MS if step % 5 == 4 else 0
        summed = 45 * MS if step % every == every - 1 else 5 * MS
        now += 40 * MS + pause
        job.collective(group, {0: now, 1: now}, transfer_ns=summed, step=step)
        now += summed
        for rank in range(2):
            job.phase(rank, "backward", start, now)
            job.own_step(rank, step, start, now)
    timeline = build_timeline(job.close(), warmup_steps=0)
    is_collected = (timeline.pieces.step % 5 == 4) & (timeline.pieces.kind == PieceKind.WORK)
    collections = Collections(
        lost_ns=np.where(is_collected, 30 * MS, 0), num_collections={0: 8, 1: 8}
    )
    edit, _ = remove_collections(timeline, collections)
    (gain,) = build_replay(timeline).price([edit])
    assert gain.saved_ns == pytest.approx(saved_ms * MS, rel=0.05)

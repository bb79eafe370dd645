import numpy as np
import pytest
from diagnosed import find

from builders import MS, make_writer, put_span, put_step
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from timeline_builders import TimedJob


def write_steps(path, forward_ns, *, num_ranks=2, checkpoint=None, seed=0):
    """Ranks that take `forward_ns(step)`; `checkpoint` steps save for 150 ms before them."""
    noise = np.random.default_rng(seed).lognormal(0, 0.02, (num_ranks, 400))
    for rank in range(num_ranks):
        writer = make_writer(path, rank, num_ranks)
        now = 10**9
        for step in range(len(forward_ns)):
            if checkpoint is not None and step in checkpoint:
                put_span(writer, "checkpoint", now, 150 * MS)
                now += 150 * MS
            begin, duration = now, int(forward_ns[step] * noise[rank, step])
            put_span(writer, "forward", now, duration)
            now += duration + MS
            put_step(writer, step, begin, now)
        writer.close(end_host_mono_ns=now)
    return path


def test_steps_that_grow_are_told_with_their_gain(tmp_path):
    write_steps(tmp_path, np.linspace(50, 100, 200) * MS)
    (found,) = find("TI001", tmp_path)
    assert found.severity is Severity.HIGH
    assert found.gain.saved_ns == pytest.approx(18.75 * MS, rel=0.1), "75 less 56.25"
    assert found.first_step is None


def test_a_jump_names_its_step(tmp_path):
    write_steps(tmp_path, np.where(np.arange(240) < 120, 50, 80) * MS)
    (found,) = find("TI001", tmp_path)
    assert found.first_step == pytest.approx(120, abs=10)
    assert find("TI001", tmp_path, drift_min_change_ratio=0.9) == []


def test_checkpoints_at_an_interval_are_named_and_priced(tmp_path):
    write_steps(tmp_path, np.full(200, 50 * MS), checkpoint=range(20, 200, 20))
    (found,) = find("TI002", tmp_path)
    assert found.title == "every 20 steps one is slow, mostly in checkpoint"
    assert found.gain.saved_ns == pytest.approx(150 * MS / 20, rel=0.1)
    assert found.severity is Severity.HIGH
    assert found.confidence.p_value < 1e-6
    assert found.ranks == (), "all ranks do it"
    lost = found.lost_steps
    assert lost.step[lost.lost_ns > 0].tolist() == list(range(20, 200, 20))
    assert find("TI004", tmp_path) == [], "they are explained"


def test_another_phase_with_a_part_of_the_extra_time_is_named(tmp_path):
    """Evaluations of which most is in no phase."""
    writer, now = make_writer(tmp_path, 0, 1), 10**9
    for step in range(60):
        begin = now
        put_span(writer, "forward", now, 30 * MS)
        now += 31 * MS
        put_step(writer, step, begin, now)
        if step % 6 == 5:
            put_span(writer, "eval", now, 25 * MS)
            now += 125 * MS
    writer.close(end_host_mono_ns=now)
    (found,) = find("TI002", tmp_path)
    assert found.title == "every 6 steps one is slow, mostly in no phase (between steps)"
    assert "Of it 25.0 ms in eval." in found.summary


def test_a_first_time_that_takes_far_longer_is_not_what_recurs(tmp_path):
    """And 5 in 44 steps at an interval of 10 are no more than one in 10."""
    steps = np.full(45, 50 * MS)
    steps[4::10] += 100 * MS
    steps[4] += 2000 * MS
    write_steps(tmp_path, steps)
    (found,) = find("TI002", tmp_path)
    assert found.gain.saved_ns == pytest.approx(100 * MS / 10, rel=0.05)


def test_single_slow_steps_are_a_low_finding(tmp_path):
    steps = np.full(200, 50 * MS)
    steps[[17, 58, 91, 130, 131, 177]] += 200 * MS
    write_steps(tmp_path, steps)
    assert find("TI002", tmp_path) == []
    (found,) = find("TI004", tmp_path)
    assert found.severity is Severity.LOW
    assert "mostly in forward" in found.summary
    assert (found.first_step, found.last_step) == (17, 177)
    assert find("TI004", tmp_path, spikes_min_count=7) == []


@pytest.mark.parametrize(("num_steps", "severity"), [(60, Severity.LOW), (250, Severity.HIGH)])
def test_a_long_warm_up_counts_in_runs_that_are_long(tmp_path, num_steps, severity):
    steps = np.full(num_steps, 50 * MS)
    steps[:5] = 500 * MS
    write_steps(tmp_path, steps)
    (found,) = find("TI003", tmp_path)
    assert (found.first_step, found.last_step) == (0, 4)
    assert found.severity is severity
    assert found.gain.saved_ns == pytest.approx(2250 * MS / num_steps, rel=0.05)


def test_a_warm_up_that_nobody_feels_is_low(tmp_path):
    """However short the usual steps are."""
    steps = np.full(300, MS // 2)
    steps[:4] = 10 * MS
    write_steps(tmp_path, steps)
    (found,) = find("TI003", tmp_path)
    assert found.severity is Severity.LOW


def test_steady_runs_are_silent(tmp_path):
    write_steps(tmp_path, np.full(200, 50 * MS))
    for code in ("TI001", "TI002", "TI003", "TI004"):
        assert find(code, tmp_path) == []


def test_on_devices_what_recurs_on_one_rank_alone_is_found_and_its_lead_taken_off(tmp_path):
    """Rank 1's host takes 184 ms in every fifth step and 31 in the others; devices take 44, and the
    other hosts notice nothing in particular: 61.6 ms in the mean, 17.6 beyond a device's step."""
    job = TimedJob(tmp_path, num_ranks=4, layout=Layout(dp=4))
    for step in range(80):
        cycle, place = 308 * (step // 5) * MS, step % 5
        late = (
            cycle + (184 + 31 * (place - 1)) * MS if place else cycle,
            cycle + (184 + 31 * place) * MS,
        )
        even = (int(61.6 * step) * MS, int(61.6 * (step + 1)) * MS)
        end = cycle + (228 + 44 * place) * MS
        for rank in range(4):
            host = late if rank == 1 else even
            if place:
                job.device_phase(rank, "forward", host, (end - 44 * MS, end), offset_ns=5 * MS)
            else:
                job.phase(rank, "forward", *host)
            job.own_step(rank, step, *host)
    job.close()
    (found,) = find("TI002", tmp_path)
    assert found.title == "every 5 steps one is slow, mostly in forward on rank 1"
    assert found.gain.saved_ns == pytest.approx(17.6 * MS, rel=0.05)

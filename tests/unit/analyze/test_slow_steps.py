import numpy as np

from builders import MS, make_writer, put_span, put_step
from meshscope.analyze.stragglers.slow_steps import BETWEEN_STEPS, UNATTRIBUTED, find_excess
from meshscope.store.read.run import open_run

SLOW = np.array([10, 20])


def recording(path, *, gap_phase_ns=0, gap_ns=0, inside_ns=0, forward_ns=0):
    """Thirty steps; those of SLOW have something more, in the gap before them or inside."""
    writer = make_writer(path)
    now = 10**9
    for step in range(30):
        more = step in SLOW
        if more and gap_phase_ns:
            put_span(writer, "checkpoint", now, gap_phase_ns)
        now += (gap_phase_ns + gap_ns) * more + MS
        start = now
        duration = 30 * MS + forward_ns * more
        put_span(writer, "forward", now, duration)
        now += duration + 2 * MS + inside_ns * more
        put_step(writer, step, start, now)
    writer.close(end_host_mono_ns=now)
    return open_run(path).last_attempt.ranks[0]


def first_of(found):
    return found[0].phase, found[0].excess_ns


def test_extra_time_is_put_where_it_is(tmp_path):
    cases = {
        "checkpoint": {"gap_phase_ns": 70 * MS},
        BETWEEN_STEPS: {"gap_ns": 70 * MS},
        UNATTRIBUTED: {"inside_ns": 70 * MS},
        "forward": {"forward_ns": 70 * MS},
    }
    for index, (phase, options) in enumerate(cases.items()):
        found = find_excess(recording(tmp_path / str(index), **options), SLOW)
        assert first_of(found) == (phase, 70 * MS)
        assert [one.excess_ns for one in found[1:]] == [0.0] * (len(found) - 1)


def test_no_step_to_compare_with_says_nothing(tmp_path):
    rank = recording(tmp_path)
    assert find_excess(rank, np.array([99])) == ()
    assert find_excess(rank, np.arange(30)) == ()

"""Critical paths of programs whose longest chain can be read off."""

from made_programs import MS, ProgramRun, ddp, reduce, replay_of, work
from meshscope.core.layout import Layout
from meshscope.simulate.critical_path import PathKind, find_critical_path
from meshscope.simulate.simulation import price_path


def test_path_runs_through_the_last_to_arrive(tmp_path):
    def make(rank: int, step: int):
        ns = 9 * MS if rank == step % 2 else 4 * MS
        return [work("forward", ns), reduce((0, 1), MS), work("optimizer", 2 * MS)]

    replay = replay_of(ProgramRun(make, num_ranks=2, num_steps=5, layout=Layout(dp=2)), tmp_path)
    path = find_critical_path(replay)
    assert path.total_ns == 4 * 12 * MS
    totals = {(s.rank, s.kind, s.phase): s.total_ns for s in path.shares}
    # The last step belongs to rank 0, the path stays on a rank as long as it can.
    assert totals[0, PathKind.WORK, "forward"] == 2 * 9 * MS
    assert totals[1, PathKind.WORK, "forward"] == 2 * 9 * MS
    assert sum(n for (_, kind, _), n in totals.items() if kind is PathKind.TRANSFER) == 4 * MS
    assert sum(s.ratio for s in path.shares) == 1
    transfers = {(s.axis, s.operation) for s in path.shares if s.kind is PathKind.TRANSFER}
    assert transfers == {("dp", "all_reduce")}


def test_slack_is_what_a_rank_could_lose(tmp_path):
    replay = replay_of(ddp({2: 7 * MS}), tmp_path)
    path = find_critical_path(replay)
    by_rank = {one.rank: one for one in path.ranks}
    assert by_rank[2].slack_ns == 0
    assert by_rank[2].path_ratio > 0.9
    assert by_rank[0].slack_ns == 7 * MS
    priced = {
        (one.share.rank, one.share.phase): one.gain_without
        for one in price_path(replay, path).shares
    }
    forward = priced[2, "forward"]
    assert forward.saved_ns == 7 * MS  # after that the others are the last

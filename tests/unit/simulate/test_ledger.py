"""Ledgers of programs whose best step is known: that of the program without its faults."""

import numpy as np
import pytest

from made_programs import MS, ProgramRun, receive, reduce, replay_of, send, work
from meshscope.analyze.pipeline.stage_sizes import RankSizes, SizeKind
from meshscope.core.layout import Layout
from meshscope.simulate.ledger.ledger import Ledger, open_ledger
from meshscope.simulate.ledger.ledger_change import compare_ledgers
from meshscope.simulate.ledger.losses import LossKind

ALL = (0, 1, 2, 3)


def train(rank, *, data=2, forward=10, optimizer=3, after=()):
    return [
        work("data", int(data * MS)),
        work("forward", int(forward * MS)),
        work("backward", 20 * MS),
        reduce(ALL, 2 * MS),
        work("optimizer", int(optimizer * MS)),
        *after,
    ]


def ledger_of(make, path, *, num_steps=16) -> Ledger:
    run = ProgramRun(make, num_ranks=4, num_steps=num_steps, layout=Layout(dp=4))
    ledger = open_ledger(replay_of(run, path))
    assert isinstance(ledger, Ledger), ledger
    total = sum(entry.share_ns for entry in ledger.entries)
    assert total == pytest.approx(ledger.measured_ns - ledger.best_ns, abs=1.0)
    return ledger


def list_entries(ledger):
    """(kind, place, ranks): share in ms, of those that cost something."""
    return {
        (entry.loss.kind, entry.loss.place.name, entry.loss.ranks): entry.share_ns / MS
        for entry in ledger.entries
        if entry.loss is not None and entry.share_ns > 1000
    }


def test_two_faults_that_hide_each_other_share_their_joint_price(tmp_path):
    def make(rank, step):
        return train(rank, forward=50 if rank == 1 else 10, data=42 if rank == 3 else 2)

    ledger = ledger_of(make, tmp_path)
    assert ledger.best_ns == 35 * MS
    assert list_entries(ledger) == pytest.approx(
        {
            (LossKind.SLOWER, "forward", (1,)): 20,
            (LossKind.SLOWER, "data", (3,)): 20,
            (LossKind.ASIDE, "data", ()): 2,
        }
    )
    slower = [entry for entry in ledger.entries if entry.share_ns > 10 * MS]
    assert all(entry.is_hidden and entry.alone_ns == 0 for entry in slower)


def test_a_fault_alone_costs_what_the_twin_saves(tmp_path):
    ledger = ledger_of(lambda rank, step: train(rank, forward=10 + 7 * (rank == 2)), tmp_path)
    entries = list_entries(ledger)
    assert entries[LossKind.SLOWER, "forward", (2,)] == pytest.approx(7)


def test_what_two_runs_lose_differently_sums_to_their_difference(tmp_path):
    before = ledger_of(lambda rank, step: train(rank), tmp_path / "a")
    after = ledger_of(lambda rank, step: train(rank, forward=13 + 7 * (rank == 2)), tmp_path / "b")
    change = compare_ledgers(before, after)
    changed = {line.name: line.change_ns / MS for line in change.losses if line.change_ns}
    assert changed == pytest.approx({"rank 2, forward: slower than peers": 7})
    assert change.best.change_ns == 3 * MS
    assert change.step.change_ns == 10 * MS
    assert change.phases[0].name == "forward"
    assert change.phases[0].change_ns == pytest.approx(3 * MS)


def test_two_ranks_that_are_equally_slow_are_one_loss(tmp_path):
    ledger = ledger_of(lambda rank, step: train(rank, forward=10 + 7 * (rank > 1)), tmp_path)
    assert list_entries(ledger)[LossKind.SLOWER, "forward", (2, 3)] == pytest.approx(7)


def test_a_fast_rank_is_no_loss(tmp_path):
    ledger = ledger_of(lambda rank, step: train(rank, forward=10 - 6 * (rank == 2)), tmp_path)
    assert list_entries(ledger) == pytest.approx({(LossKind.ASIDE, "data", ()): 2})


@pytest.mark.parametrize("most", [3, 10])
def test_a_drifting_rank_is_named_however_steep(tmp_path, most):
    def make(rank, step):
        return train(rank, forward=10 + most * step / 60 * (rank == 2))

    ledger = ledger_of(make, tmp_path, num_steps=60)
    (found,) = (entry for entry in ledger.entries if entry.loss and entry.loss.ranks == (2,))
    assert found.loss.kind is LossKind.SLOWER
    kept = range(60 - len(found.loss.step_ns), 60)
    assert found.share_ns == pytest.approx(sum(most * s / 60 for s in kept) / len(kept) * MS)


def test_rare_long_steps_of_a_rank_are_pauses(tmp_path):
    def make(rank, step):
        return train(rank, forward=10 + 200 * (rank == 2 and step % 13 == 5))

    ledger = ledger_of(make, tmp_path, num_steps=40)
    assert (LossKind.PAUSES, "forward", (2,)) in list_entries(ledger)


def test_one_long_step_does_not_make_a_rank_slow(tmp_path):
    """Its steady excess of 0.1 ms is certain, and not what the mean of 5 ms comes from."""

    def make(rank, step):
        return train(rank, forward=10 + (rank == 2) * (200 if step == 20 else 0.1))

    ledger = ledger_of(make, tmp_path, num_steps=40)
    assert LossKind.SLOWER not in {kind for kind, _, _ in list_entries(ledger)}


def test_steps_that_are_slow_everywhere_blame_no_rank(tmp_path):
    ledger = ledger_of(lambda rank, step: train(rank, forward=10 + 20 * (step % 4 == 3)), tmp_path)
    num_kept = len(ledger.entries[0].loss.step_ns)  # step 0 is warm-up
    assert list_entries(ledger) == pytest.approx(
        {(LossKind.ASIDE, "data", ()): 2, (LossKind.SLOW_STEPS, "forward", ()): 20 * 4 / num_kept}
    )


def pipe(optimizer=(2, 2, 2), forward=(10, 10, 10)):
    """Three stages, one after the other; the first begins when the last is done."""

    def make(rank, step):
        before = [receive(rank - 1, MS)] if rank else []
        after = [send(rank + 1)] if rank < 2 else [send(0)]
        first = [receive(2, MS)] if rank == 0 and step else []
        own = [work("forward", int(forward[rank] * MS)), work("optimizer", optimizer[rank] * MS)]
        return [*first, *before, *own, *after]

    return make


def pipe_ledger(make, path, **sizes):
    run = ProgramRun(make, num_ranks=3, num_steps=16, layout=Layout(pp=3))
    by_kind = {SizeKind[kind.upper()]: np.array(values) for kind, values in sizes.items()}
    ledger = open_ledger(replay_of(run, path), RankSizes(ranks=(0, 1, 2), by_kind=by_kind))
    assert isinstance(ledger, Ledger), ledger
    total = sum(entry.share_ns for entry in ledger.entries)
    assert total == pytest.approx(ledger.replayed_ns - ledger.best_ns, abs=1.0)
    return ledger


def test_a_slow_optimizer_of_one_stage_is_its_loss(tmp_path):
    sizes = {"parameters": [8.0, 8.0, 8.0]}
    ledger = pipe_ledger(pipe(optimizer=(2, 31, 2)), tmp_path, **sizes)
    assert list_entries(ledger) == pytest.approx(
        {(LossKind.LONGER_STAGE, "optimizer", (1,)): 29}, rel=1e-3
    )
    (entry,) = (one for one in ledger.entries if one.share_ns > MS)
    assert not entry.loss.doubt


def test_what_a_stage_holds_explains_its_time(tmp_path):
    make = pipe(optimizer=(2, 6, 2), forward=(10, 30, 10))
    sizes = {"parameters": [1.0, 3.0, 1.0], "flops": [1.0, 3.0, 1.0]}
    assert not list_entries(pipe_ledger(make, tmp_path, **sizes))


def test_a_stage_of_unknown_contents_is_a_loss_with_a_doubt(tmp_path):
    ledger = pipe_ledger(pipe(forward=(10, 30, 10)), tmp_path)
    assert list_entries(ledger) == pytest.approx(
        {(LossKind.LONGER_STAGE, "forward", (1,)): 20}, rel=1e-3
    )
    assert "not recorded" in ledger.entries[0].loss.doubt


def test_a_stage_that_became_slow_is_its_loss(tmp_path):
    def make(rank, step):
        return pipe(forward=(10, 10 + 30 * (step >= 8), 10))(rank, step)

    ledger = pipe_ledger(make, tmp_path, layers=[1.0, 1.0, 1.0])
    (found,) = list_entries(ledger)
    assert found == (LossKind.LONGER_STAGE, "forward", (1,))


def test_a_tp_half_that_is_slow_in_all_replicas_is_a_loss(tmp_path):
    run = ProgramRun(
        lambda rank, step: train(rank, forward=10 + 7 * (rank % 2)),
        num_ranks=4,
        num_steps=16,
        layout=Layout(dp=2, tp=2),
    )
    ledger = open_ledger(replay_of(run, tmp_path))
    assert isinstance(ledger, Ledger)
    assert list_entries(ledger)[LossKind.SLOWER, "forward", (1, 3)] == pytest.approx(7)

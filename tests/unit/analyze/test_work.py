"""Work by rank, step and phase."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from builders import MS
from meshscope.analyze.timeline import work as module
from meshscope.analyze.timeline.timeline import PieceKind
from meshscope.analyze.timeline.work import OTHER_PHASES, group_indices, measure_work
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from timeline_builders import make_dp_run, timeline_of

WORK = {0: {"forward": 10.0, "backward": 20.0}, 1: {"forward": 10.0, "backward": 32.0}}


def test_work_is_by_phase_and_the_rest_by_kind(tmp_path: Path) -> None:
    table = measure_work(timeline_of(make_dp_run(tmp_path, WORK, num_steps=3)))

    assert (table.of_phases(("backward",)) == np.array([[20], [32]]) * MS).all()
    assert (table.of_phases() == np.array([[30], [42]]) * MS).all()
    assert (table.held_ns[:, :, PieceKind.WAIT] == np.array([[12], [0]]) * MS).all()
    assert (table.held_ns[:, :, PieceKind.TRANSFER] == 5 * MS).all()
    assert (table.step_ns == 47 * MS).all()
    assert table.of_phases(("no such phase",)).sum() == 0


def test_many_phases_share_a_column(tmp_path: Path) -> None:
    timeline = timeline_of(make_dp_run(tmp_path, WORK, num_steps=3))
    names = (*timeline.phases, *(f"p{number}" for number in range(40)))
    phase = timeline.pieces.phase.copy()
    phase[timeline.pieces.phase == names.index("forward")] = len(names) - 1
    table = measure_work(
        replace(timeline, phases=names, pieces=replace(timeline.pieces, phase=phase))
    )

    assert len(table.phases) == module.MAX_PHASES
    assert table.phases[0] == ""
    assert table.phases[-1] == OTHER_PHASES
    assert "backward" in table.phases
    assert (table.work_ns.sum(axis=2) == table.of_phases()).all()


def test_peers_share_all_coordinates_but_dp() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    groups = group_indices(layout, tuple(range(8)))

    assert sorted(len(group) for group in groups) == [2, 2, 2, 2]
    for first, second in groups:
        one, two = layout.coordinates(first), layout.coordinates(second)
        assert (one.tp, one.pp) == (two.tp, two.pp)
    assert group_indices(Unavailable("none"), (3, 5)) == ((0, 1),)

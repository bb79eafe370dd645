import numpy as np
import pytest

from builders import MS
from late_runs import LateRun, make_noise, make_peer_work
from meshscope.analyze.stragglers.sequence_imbalance import (
    SequenceImbalance,
    correlate,
    measure_sequence_imbalance,
)
from meshscope.analyze.timeline.peer_work import measure_peer_work
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run


@pytest.fixture
def timeline(tmp_path):
    """One without actions: steps are compared."""

    def work(rank, step):
        return {"forward": 10 * MS, "backward": 20 * MS, "optimizer": MS}

    LateRun(layout=Layout(dp=4), work=work, num_steps=5).record(tmp_path)
    return build_timeline(open_run(tmp_path).last_attempt)


def measure(timeline, forward, backward, tokens=None):
    work = make_peer_work(forward, backward, Layout(dp=4))
    return measure_sequence_imbalance(work, timeline, tokens)


def make_lengths(seed, sigma):
    return make_noise("lognormal", np.random.default_rng(seed), (50, 4), sigma=sigma)


def test_pearson_of_known_pairs():
    assert correlate(np.array([1.0, 2, 3]), np.array([2.0, 4, 6])) == pytest.approx(1)
    assert correlate(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(0.5)
    assert correlate(np.array([1.0, 1, 1]), np.array([1.0, 3, 2])) == 0.0


def test_long_sequences_lengthen_forward_and_backward_together(timeline):
    lengths = make_lengths(1, 0.3)
    tokens = np.rint(1000 * lengths)
    found = measure(timeline, 10 * MS * lengths, 20 * MS * lengths, tokens)
    assert isinstance(found, SequenceImbalance)
    assert found.is_found
    assert found.correlation == pytest.approx(1)
    assert found.token_correlation == pytest.approx(1, abs=0.01)
    assert (found.unit, found.num_pairs) == ("step", 200)


def test_equal_tokens_are_said_to_tell_nothing(timeline):
    lengths = make_lengths(2, 0.3)
    found = measure(timeline, 10 * MS * lengths, 20 * MS * lengths, np.full((50, 4), 512.0))
    assert found.is_found
    assert found.token_correlation == Unavailable(
        "every step of every rank had equally many tokens"
    )


@pytest.mark.parametrize("case", ["independent", "small", "slow rank", "all ranks"])
def test_other_patterns_are_not_sequence_lengths(timeline, case):
    forward, backward = 10 * MS * make_lengths(3, 0.03), 20 * MS * make_lengths(4, 0.03)
    if case == "independent":
        forward, backward = forward * make_lengths(5, 0.3), backward * make_lengths(6, 0.3)
    elif case == "small":
        lengths = make_lengths(7, 0.04)
        forward, backward = 10 * MS * lengths, 20 * MS * lengths
    elif case == "slow rank":
        forward[:, 1] *= 2
        backward[:, 1] *= 2
    else:
        common = make_lengths(8, 0.5)[:, :1]
        forward, backward = forward * common, backward * common
    found = measure(timeline, forward, backward)
    assert isinstance(found, SequenceImbalance)
    assert not found.is_found


def test_few_pairs_say_nothing(timeline):
    lengths = make_lengths(9, 0.3)[:4]
    assert isinstance(measure(timeline, lengths, lengths), Unavailable)


def test_work_of_a_recorded_run_is_paired(tmp_path):
    lengths = make_lengths(10, 0.3)

    def work(rank, step):
        length = lengths[step, rank]
        return {
            "forward": int(10 * MS * length),
            "backward": int(20 * MS * length),
            "optimizer": MS,
        }

    LateRun(layout=Layout(dp=4), work=work, num_steps=30).record(tmp_path)
    timeline = build_timeline(open_run(tmp_path).last_attempt)
    found = measure_sequence_imbalance(measure_peer_work(timeline), timeline)
    assert found.is_found
    assert isinstance(found.token_correlation, Unavailable)


@pytest.mark.parametrize(
    ("correlation", "variation_ratio", "is_found"),
    [(0.85, 0.3, True), (0.85, 0.15, False), (0.95, 0.15, True), (0.75, 0.3, False)],
)
def test_what_varies_much_needs_to_agree_less(correlation, variation_ratio, is_found):
    found = SequenceImbalance(
        correlation=correlation,
        variation_ratio=variation_ratio,
        num_pairs=80,
        unit="step",
        token_correlation=Unavailable("not counted"),
    )
    assert found.is_found is is_found

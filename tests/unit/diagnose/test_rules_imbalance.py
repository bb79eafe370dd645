import numpy as np
import pytest
from diagnosed import context_of

from builders import MS
from late_runs import LateRun, make_noise, noisy
from meshscope.core.layout import Layout
from meshscope.core.schedule import ActionKind
from meshscope.core.schedule_builders import build_schedule
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from pipeline_builders import Recipe, make_pipeline_run

OWN = {
    code: RULES[code] for code in ("ST001", "ST002", "ST003", "ST004", "IM001", "PA001", "PA002")
}
LENGTHS = make_noise("lognormal", np.random.default_rng(1), (60, 4), sigma=0.3)


def by_length(rank, step):
    own = noisy(2)(rank, step)
    length = LENGTHS[step, rank]
    return {
        "forward": int(own["forward"] * length),
        "backward": int(own["backward"] * length),
        "optimizer": own["optimizer"],
    }


def test_uneven_sequences_are_named_and_priced_as_balancing_them_is(tmp_path):
    def even(rank, step):
        """The same work in all, shared evenly."""
        own = [by_length(peer, step) for peer in range(4)]
        return {name: sum(one[name] for one in own) // 4 for name in own[0]}

    layout = Layout(dp=4)
    uneven_ns = LateRun(
        layout=layout,
        work=by_length,
        num_steps=50,
        tokens=lambda rank, step: int(1000 * LENGTHS[step, rank]),
    ).record(tmp_path / "uneven")
    even_ns = LateRun(layout=layout, work=even, num_steps=50).record(tmp_path / "even")
    (finding,) = diagnose(context_of(tmp_path / "uneven"), rules=OWN).findings
    assert (finding.code, finding.ranks) == ("IM001", ())
    assert finding.saved_ns == pytest.approx(uneven_ns - even_ns, rel=0.02)
    assert "r of tokens and work" in finding.summary


def test_even_sequences_are_silent(tmp_path):
    LateRun(layout=Layout(dp=4), work=lambda rank, step: by_length(0, step)).record(tmp_path)
    assert diagnose(context_of(tmp_path), rules=OWN).findings == ()


def test_a_slow_rank_is_not_taken_for_long_sequences(tmp_path):
    def work(rank, step):
        own = noisy(3)(rank, step)
        return {name: int(ns * (1.4 if rank == 1 else 1)) for name, ns in own.items()}

    LateRun(layout=Layout(dp=4), work=work).record(tmp_path)
    (finding,) = diagnose(context_of(tmp_path), rules=OWN).findings
    assert (finding.code, finding.ranks, finding.edit is None) == ("ST001", (1,), False)
    assert 20 * MS > finding.saved_ns > 5 * MS


def pipeline(path, length):
    """Two stages, 8 microbatches, each `length(step, microbatch)` times as long as usual."""

    def cost(step, chain, action):
        usual = 2 * MS if action.kind is ActionKind.FORWARD else 4 * MS
        return usual * length(step, action.microbatch)

    recipe = Recipe(schedule=build_schedule("1f1b", 2, 8), cost=cost, num_steps=12)
    return make_pipeline_run(path, recipe)


def test_uneven_microbatches_of_a_pipeline_are_named_and_priced(tmp_path):
    lengths = make_noise("lognormal", np.random.default_rng(4), (12, 8), sigma=0.4)
    pipeline(tmp_path / "uneven", lambda step, microbatch: lengths[step, microbatch])
    pipeline(tmp_path / "even", lambda step, microbatch: lengths[step].mean())
    uneven, even = (context_of(tmp_path / name) for name in ("uneven", "even"))
    (finding,) = diagnose(uneven, rules=OWN).findings
    assert finding.code == "IM001"
    assert "same microbatch" in finding.summary
    assert finding.saved_ns == pytest.approx(uneven.study.step_ns - even.study.step_ns, rel=0.25)
    assert diagnose(even, rules=OWN).findings == ()


def larger(rank, step):
    """Rank 2 takes twice as long in forward and backward."""
    own = noisy(3)(rank, step)
    factor = 2 if rank == 2 else 1
    return {name: ns * (1 if name == "optimizer" else factor) for name, ns in own.items()}


@pytest.mark.parametrize(
    ("samples", "tokens", "what"),
    [
        (
            lambda rank, step: 16 if rank == 2 else 8,
            lambda rank, step: -1,
            "its batches are larger",
        ),
        (
            lambda rank, step: 8,
            lambda rank, step: 8 * (128 if rank == 2 else 64),
            "its sequences are longer",
        ),
        (lambda rank, step: 8, lambda rank, step: 512, ""),
        # Too little more to explain it.
        (lambda rank, step: 9 if rank == 2 else 8, lambda rank, step: -1, ""),
    ],
)
def test_a_rank_that_is_given_more_is_told_so(tmp_path, samples, tokens, what):
    run = LateRun(layout=Layout(dp=4), work=larger, samples=samples, tokens=tokens)
    run.record(tmp_path)
    (found,) = diagnose(context_of(tmp_path), rules=OWN).findings
    assert (found.code, found.ranks) == ("ST001", (2,))
    assert found.title.endswith(what)
    assert ("batches of the same size" in found.change) == ("batches" in what)
    assert ("sequences of the same total length" in found.change) == ("sequences" in what)


def test_batches_of_random_sizes_are_not_called_lengths(tmp_path):
    LateRun(
        layout=Layout(dp=4),
        work=by_length,
        num_steps=50,
        samples=lambda rank, step: max(1, round(16 * LENGTHS[step, rank])),
    ).record(tmp_path)
    (found,) = diagnose(context_of(tmp_path), rules=OWN).findings
    assert (found.code, found.title) == ("IM001", "batches have uneven sizes")


def test_one_fast_rank_makes_nobody_wait(tmp_path):
    def fast(rank, step):
        return {name: ns // (2 if rank == 1 else 1) for name, ns in noisy(4)(rank, step).items()}

    LateRun(layout=Layout(dp=4), work=fast).record(tmp_path)
    assert diagnose(context_of(tmp_path), rules=OWN).findings == ()

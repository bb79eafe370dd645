import math

import pytest

from builders import GAP_NS, MS, START_MONO_NS, STARTUP_NS, make_run, put_step
from meshscope.analyze.rank.throughput import SAMPLE_SOURCES, TOKEN_SOURCES
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

WALL_S = (5 * 100 * MS + 4 * GAP_NS) / 1e9


def summarize(path):
    return Study(open_run(path).last_attempt)


def test_rates_are_over_the_wall_clock_with_gaps(tmp_path):
    make_run(tmp_path, num_steps=5, scalars={"tokens": lambda rank, step: 100})
    summary = summarize(tmp_path)
    assert summary.steps_per_s == pytest.approx(5 / WALL_S)
    assert summary.tokens.tokens_per_s == pytest.approx(500 / WALL_S)
    assert summary.tokens.source == TOKEN_SOURCES["tokens"]


def test_the_job_counts_each_token_once_over_tensor_ranks_and_stages(tmp_path):
    make_run(
        tmp_path,
        layout=Layout(dp=2, tp=2, pp=2, cp=2),
        num_steps=5,
        input_tokens=10,
    )
    tokens = summarize(tmp_path).tokens
    assert tokens.num_ranks == 4  # dp 2 × cp 2
    assert tokens.tokens_per_s == pytest.approx(4 * 50 / WALL_S)
    assert tokens.source == TOKEN_SOURCES["input_tokens"]


def test_samples_are_summed_over_data_parallel_ranks_only(tmp_path):
    layout = Layout(dp=2, tp=2, pp=2, cp=2)
    make_run(tmp_path, layout=layout, num_steps=5, scalars={"samples": lambda rank, step: 8})
    samples = summarize(tmp_path).samples
    assert (samples.num_ranks, samples.source) == (2, SAMPLE_SOURCES["samples"])
    assert samples.samples_per_s == pytest.approx(2 * 40 / WALL_S)


def test_no_batch_is_no_sample_rate_rather_than_zero(tmp_path):
    make_run(tmp_path, num_steps=5)
    assert isinstance(summarize(tmp_path).samples, Unavailable)


def test_a_first_step_whose_inputs_were_not_seen_had_about_as_many_tokens(tmp_path):
    begin_ns = START_MONO_NS + STARTUP_NS

    def hide_first(writer):
        put_step(writer, 0, begin_ns, begin_ns + 100 * MS)  # the later row of a step counts

    make_run(tmp_path, num_steps=5, input_tokens=10, also=hide_first)
    assert summarize(tmp_path).tokens.tokens_per_s == pytest.approx(50 / WALL_S)


def test_what_the_program_logged_is_preferred(tmp_path):
    make_run(tmp_path, num_steps=5, input_tokens=1, scalars={"tokens": lambda rank, step: 2})
    assert summarize(tmp_path).tokens.tokens_per_s == pytest.approx(10 / WALL_S)


def test_without_a_layout_the_jobs_tokens_are_not_guessed(tmp_path):
    make_run(tmp_path, world_size=2, num_steps=5, scalars={"tokens": lambda rank, step: 100})
    summary = summarize(tmp_path)
    assert isinstance(summary.tokens, Unavailable)
    assert "no layout was declared" in summary.tokens.reason
    assert summary.ranks[0].tokens.tokens_per_s == pytest.approx(500 / WALL_S)


def test_ranks_that_log_no_tokens_are_named(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=5)
    assert "on ranks 0-1" in summarize(tmp_path).tokens.reason


def test_a_value_that_is_not_finite_is_counted_and_left_out(tmp_path):
    make_run(
        tmp_path, num_steps=5, scalars={"tokens": lambda rank, step: math.nan if step == 2 else 10}
    )
    tokens = summarize(tmp_path).tokens
    assert (tokens.num_nonfinite, tokens.num_steps) == (1, 4)
    assert tokens.tokens_per_s == pytest.approx(40 / WALL_S)


def test_signals_show_first_and_last_finite_values_and_where_they_come_from(tmp_path):
    make_run(
        tmp_path,
        layout=Layout(dp=2),
        num_steps=5,
        scalars={
            "backward_loss": lambda rank, step: [9.0, 4.0, 3.0, 2.0, math.inf][step],
            "lr": lambda rank, step: math.nan,
        },
    )
    signals = summarize(tmp_path).signals
    loss = signals["loss"]
    assert isinstance(signals["lr"].shown.source, Unavailable)  # logged, or the recorder's own
    assert (loss.shown.name, loss.shown.source) == ("backward_loss", "what backward was called on")
    assert (loss.shown.first, loss.shown.last, loss.shown.last_step) == (9.0, 2.0, 3)
    assert (loss.num_nonfinite, loss.nonfinite_ranks) == (2, (0, 1))
    assert signals["lr"].shown.last == Unavailable("none of its 5 values is finite")
    assert signals["grad_norm"] == Unavailable("no rank logged grad_norm")


def test_a_program_that_logs_loss_is_believed_over_what_backward_saw(tmp_path):
    scalars = {"backward_loss": lambda r, s: 1.0, "loss": lambda r, s: 2.0}
    make_run(tmp_path, num_steps=2, scalars=scalars)
    assert summarize(tmp_path).signals["loss"].shown.last == 2.0

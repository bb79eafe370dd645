import pytest
from diagnosed import context_of, find

from builders import MS, make_writer, put_span, put_step
from kernel_builders import T0, SampleBuilder
from meshscope.analyze.rank.kernel_sample import read_samples
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.rules.device_idle import find_waiting_lines
from meshscope.diagnose.runner import diagnose
from meshscope.store.schema import KernelKind, SampleReason, SpanFlag
from timeline_builders import TimedJob

LOGS = "my/train.py:88 log_metrics > sleep < my/train.py:140 main"


def write_run(path, gap_ms, *, phases=("data", "forward"), num_steps=40, collected_ms=0, own=()):
    """Steps of 50 ms on one rank, `gap_ms(step)` apart; the gap before step 20 is sampled.

    The collector takes `collected_ms` of each gap; `own` are phases that share it.
    """
    writer = make_writer(path)
    now = 10**9
    for step in range(num_steps):
        gap = int(gap_ms(step) * MS)
        if step == 20:
            for at in range(now + MS // 2, now + gap, MS):
                words = writer.name_id(LOGS) | SampleReason.GAP << 16
                writer.table("stacks").put(words, step - 1, at, 0, 0, 0, 0)
        if collected_ms:
            put_span(writer, "gc gen2", now, collected_ms * MS, depth=0, flags=SpanFlag.DETAIL)
        for index, name in enumerate(own):
            put_span(writer, name, now + index * gap // len(own), gap // len(own))
        now += gap
        start = now
        for name in phases:
            put_span(writer, name, now, 2 * MS if name == "data" else 47 * MS)
            now += 2 * MS if name == "data" else 47 * MS
        now = start + 50 * MS
        put_step(writer, step, start, now)
    writer.close(end_host_mono_ns=now)
    return path


def test_what_happens_between_steps_is_named_with_its_line(tmp_path):
    (found,) = find("TI005", write_run(tmp_path, lambda step: 10))
    assert found.severity > Severity.LOW
    assert found.gain.saved_ns == pytest.approx(10 * MS, rel=0.03)
    assert found.summary.endswith(
        "A stack sampled there shows my/train.py:88 in log_metrics, which calls sleep "
        "(10 of 10 samples)."
    )
    above_low = [
        one.code for one in diagnose(context_of(tmp_path)).findings if one.severity > Severity.LOW
    ]
    assert above_low == ["TI005"]


@pytest.mark.parametrize(
    ("own", "gap_ms", "named"),
    [
        (("sampling",), 30, ["LT001"]),
        (("sampling",), 4, []),  # too little to ask whether training needs it
        (("rollout", "eval"), 30, []),  # an agent acts
    ],
)
def test_a_phase_of_the_programs_own_between_steps_is_medium_at_most(tmp_path, own, gap_ms, named):
    write_run(tmp_path, lambda step: gap_ms, own=own)
    found = [one for one in diagnose(context_of(tmp_path)).findings if one.severity > Severity.LOW]
    assert [one.code for one in found] == named
    for one in found:
        assert one.title == "all ranks spend time in sampling, between steps"
        assert one.severity is Severity.MEDIUM
        assert one.saved_ns == pytest.approx(30 * MS, rel=0.05)
        assert "may need" in one.confidence.text


def test_a_collection_between_steps_is_named_as_one(tmp_path):
    write_run(tmp_path, lambda step: 10, collected_ms=9)
    found = diagnose(context_of(tmp_path)).findings
    assert [one.code for one in found if one.severity > Severity.LOW] == ["PA001"]
    assert found[0].gain.saved_ns == pytest.approx(9 * MS, rel=0.03)
    assert found[0].summary.endswith("mostly between steps.")
    assert find("TI005", tmp_path) == []


def test_short_gaps_and_single_long_ones_are_none(tmp_path):
    assert find("TI005", write_run(tmp_path / "short", lambda step: 3)) == []
    rare = write_run(tmp_path / "rare", lambda step: 100 if step % 10 == 9 else 1)
    assert find("TI005", rare) == []


def test_without_the_phase_data_it_is_low_and_nobody_waits_for_data(tmp_path):
    """An agent's environment acts there: more loader workers would change nothing."""
    write_run(tmp_path, lambda step: 10, phases=("forward",))
    assert find("IN002", tmp_path) == []
    (found,) = find("TI005", tmp_path)
    assert found.severity is Severity.LOW
    assert "plain iterator" not in found.summary
    assert "my/train.py:88 in log_metrics" in found.summary


def test_a_rank_that_works_alone_between_steps_is_priced_by_a_replay(tmp_path):
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    now = 0
    for step in range(30):
        begin = {0: now + 20 * MS, 1: now}
        for rank, at in begin.items():
            job.phase(rank, "data", at, at + MS)
            job.phase(rank, "forward", at + MS, at + 50 * MS)
        ends = {rank: at + 50 * MS for rank, at in begin.items()}
        job.collective(group, ends, transfer_ns=MS, step=step, size_bytes=4096)
        now = max(ends.values()) + MS
        for rank, at in begin.items():
            job.own_step(rank, step, at, now)
    job.close()
    (found,) = find("TI005", tmp_path)
    assert found.ranks == (0,)
    assert found.gain.saved_ns == pytest.approx(20 * MS, rel=0.05)


def test_lines_inside_synchronising_calls_are_found(tmp_path):
    built = SampleBuilder(tmp_path)
    built.step(0, 0, 10_000)
    built.step(1, 10_000, 40_000)
    built.work(11_000, 15_000, launch=10_500)
    built.work(10_900, 15_100, kind=KernelKind.SYNCHRONISATION, name="cudaStreamSynchronize")
    reads, others = "my/train.py:41 train > item", LOGS
    for at, text in ((12, reads), (13, reads), (14, reads), (20, others)):
        words = built.writer.name_id(text) | SampleReason.KERNELS << 16
        built.writer.table("stacks").put(words, 1, T0 + at * MS, 0, 0, 0, 0)
    built.close(last_step=1, end=40_000)
    study = context_of(tmp_path).study
    samples = {0: read_samples(study.attempt.ranks[0])}
    (line,) = find_waiting_lines(study, samples).lines
    assert (line.text, line.num_samples) == ("my/train.py:41 in train, which calls item", 3)
    assert find_waiting_lines(study, {}).lines == ()

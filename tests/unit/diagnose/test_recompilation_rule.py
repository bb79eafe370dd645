import pytest
from diagnosed import context_of, find

from builders import MS, make_writer, put_span, put_step
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.runner import diagnose
from timeline_builders import TimedJob

REASON = "tensor 'x' size mismatch at index 0. expected {}, actual {}"


def put_compilation(writer, step, start_ns, duration_ns, *, reason, number):
    writer.journal.write(
        "update",
        compilation={
            "compile_id": f"0/{number}",
            "step": step,
            "start_host_mono_ns": start_ns,
            "duration_ns": duration_ns,
            "function": "_dynamo/external_utils.py:67 inner",
            "where": "my/train.py:31 train > model < my/train.py:90 main",
            "reason": reason,
        },
    )


def write_run(path, *, compiled, num_steps=60, has_reason=True, grows=False, tried_ms=0):
    """Steps of 50 ms; those in `compiled` take 400 ms more, in `compile` inside forward, and then
    `tried_ms` to try new code out."""
    writer = make_writer(path)
    now, rss = 10**9, 1 << 30
    for step in range(num_steps):
        extra = 400 * MS if step in compiled else 0
        if extra:
            number = sorted(compiled).index(step)
            reason = REASON.format(number, number + 1) if has_reason and number else ""
            put_span(writer, "compile", now, extra, depth=1)
            put_compilation(writer, step, now, extra, reason=reason, number=number)
            extra += tried_ms * MS
        put_span(writer, "forward", now, 49 * MS + extra, self_ns=49 * MS)
        put_step(writer, step, now, now + 50 * MS + extra)
        now += 50 * MS + extra
        rss += (64 << 20 if step in compiled else 0) if grows else 0
        writer.table("memory").put(step, now, rss, -1, -1, -1, -1)
        now += MS
    writer.close(end_host_mono_ns=now)
    return path


def test_a_function_compiled_again_is_named_with_its_reason_and_price(tmp_path):
    compiled = {0, 10, 17, 31, 40}
    (found,) = find("CP007", write_run(tmp_path, compiled=compiled))
    assert found.title == "code is compiled again 4 times: model, called at my/train.py:31"
    assert found.severity is Severity.CRITICAL
    assert found.gain.saved_ns == pytest.approx(4 * 400 * MS / 60)
    assert "expected 1, actual 2" in found.summary
    assert (found.first_step, found.last_step) == (10, 40)
    assert find("TI004", tmp_path) == []
    assert find("TI002", tmp_path) == []


def test_trying_new_code_out_is_part_of_the_price(tmp_path):
    (found,) = find("CP007", write_run(tmp_path, compiled={0, 10, 17, 31, 40}, tried_ms=100))
    assert found.gain.saved_ns == pytest.approx(4 * 500 * MS / 60)


def test_one_cause_is_one_finding(tmp_path):
    compiled = set(range(0, 60, 5))
    result = diagnose(context_of(write_run(tmp_path, compiled=compiled, grows=True)))
    above_low = [one.code for one in result.findings if one.severity > Severity.LOW]
    assert above_low == ["CP007"]


def test_memory_that_grows_without_compilations_stays_a_leak(tmp_path):
    writer = make_writer(tmp_path)
    now = 10**9
    for step in range(60):
        put_span(writer, "forward", now, 49 * MS)
        put_step(writer, step, now, now + 50 * MS)
        now += 51 * MS
        writer.table("memory").put(step, now, (1 << 30) + step * (16 << 20), -1, -1, -1, -1)
    put_compilation(writer, 30, 10**9, MS, reason=REASON.format(1, 2), number=1)
    writer.close(end_host_mono_ns=now)
    assert len(find("ME001", tmp_path)) == 1


def test_first_compilations_are_no_finding(tmp_path):
    assert find("CP007", write_run(tmp_path, compiled={0, 1, 2}, has_reason=False)) == []


def test_one_recompilation_is_no_finding(tmp_path):
    """The second shape makes torch compile once more, for any size."""
    write_run(tmp_path, compiled={0, 1})
    assert find("CP007", tmp_path) == []
    assert len(find("CP007", tmp_path, recompile_min_count=1)) == 1


def test_ranks_that_wait_for_the_compiling_one_are_named(tmp_path):
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    now = 0
    for step in range(40):
        extra = 300 if step in (20, 25, 30) else 0
        start = job.local_ns(1, now)
        if extra:
            number = step // 5
            reason = REASON.format(number, number + 1)
            put_compilation(job.writers[1], step, start, extra * MS, reason=reason, number=number)
        work = {0: {"forward": 50.0}, 1: {"forward": 50.0, **({"compile": extra} if extra else {})}}
        now = job.train(
            num_steps=1, work_ms=work, transfer_ms=1, group=group, first_step=step, start_ns=now
        )
    job.close()
    (found,) = find("CP007", tmp_path)
    assert found.ranks == (1,)
    assert "Rank 0 is held up by it." in found.summary

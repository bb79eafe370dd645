from builders import MS, START_MONO_NS, make_run, make_writer, put_device_span, put_span, put_step
from meshscope.analyze.rank.device import NO_ACCELERATOR, NO_EVENTS, explain_no_job_device
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

T0 = START_MONO_NS


def summarize(path, **options):
    return Study(open_run(path).last_attempt, **options)


def test_device_time_is_joined_to_the_steps_of_its_host_spans(tmp_path):
    make_run(tmp_path, num_steps=5, device_ratio=0.5)
    time = summarize(tmp_path).time
    assert time.num_device_rank_steps == 4
    assert time.device_phase_ns == {
        "data": 4 * MS,
        "forward": 60 * MS,
        "backward": 120 * MS,
        "optimizer": 10 * MS,
    }


def test_nested_phases_give_their_device_time_only_once(tmp_path):
    writer = make_writer(tmp_path)
    # The outer and the inner phase begin in the same nanosecond.
    put_span(writer, "embed", T0 + 100, 20, depth=2)
    put_span(writer, "attention", T0 + 100, 50, self_ns=30, depth=1)
    put_span(writer, "mlp", T0 + 160, 30, depth=1)
    put_span(writer, "forward", T0 + 100, 100, self_ns=20, depth=0)
    for name, start, duration in (
        ("attention", 100, 400),
        ("embed", 100, 150),
        ("mlp", 160, 300),
        ("forward", 100, 1000),
    ):
        put_device_span(writer, name, T0 + start, duration)
    put_device_span(writer, "forward", T0 + 77, 5)  # its host span was lost
    put_step(writer, 0, T0 + 50, T0 + 250)
    writer.close(end_host_mono_ns=T0 + 300)

    device = summarize(tmp_path).ranks[0].device
    assert device.phase_ns == {"embed": 150, "attention": 250, "mlp": 300, "forward": 300}
    assert device.num_unmatched == 1


def test_steps_without_marks_are_counted(tmp_path):
    writer = make_writer(tmp_path)
    for step in range(8):
        start = T0 + step * 1000
        put_span(writer, "forward", start, 500)
        if step % 4 == 0:
            put_device_span(writer, "forward", start, 400)
        put_step(writer, step, start, start + 1000)
    writer.close(end_host_mono_ns=T0 + 8000)
    time = summarize(tmp_path, warmup_steps=0).time
    assert (time.num_device_rank_steps, time.num_markable_rank_steps) == (2, 8)
    assert time.device_phase_ns == {"forward": 800}


def test_a_job_with_accelerators_on_some_ranks_says_so():
    reasons = [NO_ACCELERATOR, NO_EVENTS, NO_ACCELERATOR]
    assert explain_no_job_device(reasons) == Unavailable(
        "1 rank recorded without device events, the others used no accelerator"
    )


def test_without_device_spans_the_reason_says_whether_there_was_a_device(tmp_path):
    make_run(tmp_path / "cpu", memory=(1 << 30, -1, -1, -1, -1))
    make_run(tmp_path / "gpu", memory=(1 << 30, 5, 6, 7, 8))
    cpu, gpu = summarize(tmp_path / "cpu"), summarize(tmp_path / "gpu")
    assert cpu.ranks[0].device == Unavailable("no accelerator was used by this process")
    assert cpu.time.device_phase_ns == Unavailable("no rank used an accelerator")
    assert gpu.time.device_phase_ns == Unavailable("recorded without device events")
    assert cpu.ranks[0].peak_device_bytes == Unavailable("no accelerator was used by this process")
    assert (gpu.ranks[0].peak_rss_bytes, gpu.ranks[0].peak_device_bytes) == (1 << 30, 7)

"""What limits a device, in traces made for it."""

import pytest

from made_traces import call, host, kernel, nccl, step, summarize
from meshscope.analyze.device.trace_verdict import OthersPart, judge


def busy(tmp_path, *names):
    """A device without gaps, whose kernels were all launched at the begin."""
    events = [step(1, 0, 1000)]
    for place, name in enumerate(names):
        events.append(call("cudaLaunchKernel", place, 10 + place))
        events.append(kernel(name, 100 + 200 * place, 200, correlation=10 + place))
    return summarize(tmp_path / "trace.json", events)


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        ("cutlass_80_simt_sgemm_128x256_8x4_nt_align1", True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8", True),
        ("ampere_sgemm_128x64_nn", True),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x256x32", False),
        ("ampere_bf16_s1688gemm_bf16_128x64_nn", False),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", False),
    ],
)
def test_products_in_plain_float32_are_told(tmp_path, name, is_plain):
    verdict = judge(busy(tmp_path, name, name, "elementwise_kernel<add>"))
    assert verdict.cause == "kernels"
    assert ("float32 without matrix units" in verdict.advice) == is_plain


def make_communicating(tmp_path):
    """100 µs of compute, 300 µs of communication with nothing beside it, 50 µs for the host."""
    events = [
        step(1, 0, 1000),
        call("cudaLaunchKernel", 0, 1),
        kernel("gemm", 10, 100, correlation=1),
        call("cudaLaunchKernel", 1, 2),
        nccl("allreduce", 110, 300, correlation=2),
        call("cudaLaunchKernel", 440, 3),
        kernel("gemm", 460, 100, correlation=3),
    ]
    return summarize(tmp_path / "trace.json", events)


def test_what_a_rank_waited_for_others_is_not_its_own_communication(tmp_path):
    summary = make_communicating(tmp_path)
    assert judge(summary).cause == "communication"
    waited = judge(summary, OthersPart(wait_ns=250_000, late_rank=3))
    assert (waited.cause, waited.share_ratio) == ("waiting", pytest.approx(250 / 550))
    assert "Rank 3 comes last" in waited.advice
    sent = judge(summary, OthersPart(wait_ns=20_000, late_rank=None))
    assert sent.cause == "communication"
    assert "transfer" in sent.advice


def test_where_others_share_the_blame_the_hosts_part_leads(tmp_path):
    events = [
        step(1, 0, 1000),
        call("cudaLaunchKernel", 0, 1),
        nccl("allreduce", 10, 200, correlation=1),
        call("cudaLaunchKernel", 400, 2),
        kernel("gemm", 405, 100, correlation=2),
    ]
    summary = summarize(tmp_path / "trace.json", events)
    assert judge(summary, OthersPart(wait_ns=150_000, late_rank=None)).cause == "host"


def on_cpu(tmp_path, *more, operators=((0, 300),)):
    """A step of 1,000 µs on a host."""
    events = [step(1, 0, 1000)]
    events += [host("cpu_op", "aten::addmm", begin, length) for begin, length in operators]
    return summarize(tmp_path / "trace.json", [*events, *more])


@pytest.mark.parametrize(
    ("more", "operators", "cause", "share", "words"),
    [
        (("user_annotation", "enumerate(DataLoader)#_S.__next__", 500, 200), ((0, 500),),
         "loading", 0.2, "more workers"),
        (("user_annotation", "gloo:all_reduce", 500, 300, 2), ((0, 400),),
         "communication", 0.3, "traces of all ranks"),
        (("user_annotation", "Optimizer.step#SGD.step", 400, 600), ((0, 300),),
         "optimizer", 0.6, "foreach"),
        (("cpu_op", "aten::relu", 999, 1), ((0, 200),), "python", 0.799, "with_stack"),
        (("cpu_op", "aten::relu", 999, 1), ((0, 600),), "operators", 0.601, ""),
    ],
)  # fmt: skip
def test_without_a_device_the_main_thread_is_judged(tmp_path, more, operators, cause, share, words):
    verdict = judge(on_cpu(tmp_path, host(*more), operators=operators))
    assert (verdict.cause, verdict.share_ratio) == (cause, pytest.approx(share))
    assert words in verdict.advice


def test_operators_are_named(tmp_path):
    assert "aten::addmm (100 % of" in judge(on_cpu(tmp_path, operators=((0, 900),))).text


def test_work_that_was_launched_and_not_recorded_is_no_work_of_the_hosts(tmp_path):
    """ProfilerActivity.CPU alone in a program that computes on a GPU."""
    summary = on_cpu(tmp_path, call("cudaLaunchKernel", 10, 1), call("cudaLaunchKernel", 20, 2))
    verdict = judge(summary)
    assert verdict.cause == "unseen"
    assert "ProfilerActivity.CUDA" in verdict.advice
    assert any("2 calls launched device work" in one for one in summary.warnings)


def test_of_ranks_without_a_trace_it_is_not_said_whom_one_waited_for(tmp_path):
    summary = make_communicating(tmp_path)
    verdict = judge(summary, OthersPart(wait_ns=0, late_rank=None, unmatched_ns=300_000))
    assert "takes the traces of all ranks" in verdict.advice
    assert "transfer" not in verdict.advice

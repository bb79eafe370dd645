"""What limits a device, in traces made for it."""

import pytest

from made_traces import call, kernel, nccl, step, summarize
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

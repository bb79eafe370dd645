"""FLOPs of the real model: what is counted, what counting must leave alone, what is recorded."""

import warnings

import pytest
import torch
from recorded import read_recorded
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshscope.analyze.budget.model_flops import RankFlops, read_flops
from meshscope.capture.model.flops import count_model_flops
from meshscope.capture.model.gemm_peak import measure_gemm_peak
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.unavailable import Unavailable
from meshscope.errors import CaptureError
from meshscope.store.read.run import open_run

BATCH = 4


class Mlp(nn.Module):
    """Two matrices of 8 × 8."""

    def __init__(self, *, recomputes: bool = False, is_reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.recomputes = recomputes
        self.is_reentrant = is_reentrant

    def _begin(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        if self.recomputes:
            x = checkpoint(self._begin, x, use_reentrant=self.is_reentrant)
        else:
            x = self._begin(x)
        return self.second(self.norm(self.dropout(x)))


ONE = 2 * BATCH * 8 * 8
"""One product of the batch with a matrix."""


def count(model, *inputs, is_real=False, **kwargs):
    return count_model_flops(torch, model, inputs, kwargs, is_real=is_real)


@pytest.mark.parametrize("is_real", [False, True])
def test_forward_and_backward_are_counted(is_real):
    found = count(Mlp(), torch.randn(BATCH, 8), is_real=is_real)
    # The first layer's input needs no gradient.
    assert (found.forward_flops, found.backward_flops) == (2 * ONE, 3 * ONE)
    assert (found.recomputed_flops, found.main_dtype) == (0, "float32")
    assert found.model_flops == found.hardware_flops == 5 * ONE


@pytest.mark.parametrize("is_real", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_is_computed_again_is_counted_apart(is_reentrant, is_real):
    x = torch.randn(BATCH, 8, requires_grad=True)  # reentrant checkpointing needs it
    found = count(Mlp(recomputes=True, is_reentrant=is_reentrant), x, is_real=is_real)
    assert found.model_flops == 6 * ONE
    assert found.recomputed_flops == ONE
    assert found.hardware_flops == 7 * ONE
    assert x.grad is None


def test_frozen_parameters_need_no_gradient():
    model = Mlp()
    for part in (model.first, model.norm):
        part.requires_grad_(requires_grad=False)
    assert count(model, torch.randn(BATCH, 8)).backward_flops == ONE


def test_attention_on_the_cpu_has_its_two_products():
    class Attention(nn.Module):
        def forward(self, query, key):
            return nn.functional.scaled_dot_product_attention(
                query, key, key, is_causal=True, enable_gqa=True
            )

    query = torch.randn(2, 4, 10, 8, requires_grad=True)
    key = torch.randn(2, 2, 10, 8, requires_grad=True)
    found = count(Attention(), query, key)
    assert found.forward_flops == 2 * (2 * 2 * 4 * 10 * 10 * 8)
    assert found.backward_flops == 2 * found.forward_flops


def test_the_dtype_is_that_of_the_products():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert count(Mlp(), torch.randn(BATCH, 8)).main_dtype == "bfloat16"


@pytest.mark.parametrize("is_real", [False, True])
def test_counting_leaves_no_trace(is_real):
    model = Mlp().train()
    x = torch.randn(BATCH, 8)
    random_state = torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count(model, x, is_real=is_real)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_count_that_fails_leaves_no_trace_either():
    model = Mlp().train()
    with pytest.raises(RuntimeError):
        count(model, torch.randn(BATCH, 9))
    assert model.training
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert count(model, torch.randn(BATCH, 8)).model_flops == 5 * ONE


def test_a_model_may_take_keywords_only():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, *, input_ids, scale):
            return self.inner(input_ids) * scale

    found = count(Keywords(), input_ids=torch.randn(BATCH, 8), scale=torch.ones(()))
    assert found.model_flops == 2 * ONE


def test_outputs_of_any_form_and_a_loss_of_ones_own():
    class Forms(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, batch, *, scale=1.0):
            y = self.inner(batch["x"]) * scale
            return {"logits": [y, (y,)], "count": 3}

    batch = {"x": torch.randn(BATCH, 8)}
    assert count(Forms(), batch, scale=2.0).model_flops == 2 * ONE
    found = count_model_flops(
        torch, Forms(), (batch,), {}, lambda output: output["logits"][0].square().mean()
    )
    assert found.model_flops == 2 * ONE


def test_a_model_that_looks_at_values_is_counted_on_real_tensors():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x) if x.sum().item() > -1e9 else x

    x = torch.randn(BATCH, 8)
    with pytest.raises(Exception, match=r"_local_scalar_dense|item"):
        count(Looks(), x)
    assert count(Looks(), x, is_real=True).model_flops == 2 * ONE


def test_a_measured_peak_is_that_of_the_products_it_made():
    found = measure_gemm_peak(torch, size=64, seconds=0.0)
    assert (found.dtype, found.device, found.size) == ("float32", "cpu", 64)
    assert found.flops_per_s > 0
    assert found.num_products >= 5
    with pytest.raises(CaptureError, match="floating-point"):
        measure_gemm_peak(torch, torch.int64)


# --- recorded ----------------------------------------------------------------------------------


def train(recorder, model, num_steps=3, num_microbatches=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.attach(model, optimizer)
    for _ in range(num_steps):
        for _ in range(num_microbatches):
            model(torch.randn(BATCH, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def read(recorder):
    path = recorder.run_dir
    recorder.close()
    return open_run(path).last_attempt


def test_counting_is_not_recorded_as_training(recorder):
    model = Mlp()
    train(recorder, model)
    assert recorder.count_flops(model, torch.randn(BATCH, 8)).model_flops == 5 * ONE
    path = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    recorded = read_recorded(path)
    assert [step.num_microbatches for step in recorded.steps] == [2, 2, 2]
    assert recorded.outside == []


def test_a_count_per_microbatch_becomes_one_per_step(recorder):
    model = Mlp(recomputes=True)
    recorder.count_flops(model, torch.randn(BATCH, 8))  # before the run is open
    recorder.set_peak(2e9, "fp32", "by the data sheet")
    train(recorder, model)
    found = read_flops(read(recorder))
    assert not isinstance(found, Unavailable)
    assert found[0] == RankFlops(
        model_flops=2.0 * 5 * ONE,
        hardware_flops=2.0 * 6 * ONE,
        source="counted on one forward and backward",
        dtype="float32",
        peak_flops_per_s=2e9,
        peak_source="by the data sheet",
    )


def test_attach_counts_by_itself_when_asked(tmp_path):
    config = RecorderConfig(provenance=False, count_flops=True)
    recorder = Recorder(tmp_path / "run", config=config)
    train(recorder, Mlp(), num_microbatches=1)
    found = read_flops(read(recorder))
    assert recorder.guard.counts == {}
    assert not isinstance(found, Unavailable)
    assert found[0].model_flops == 5 * ONE


def test_what_cannot_be_counted_is_an_error_of_the_recorders(recorder):
    assert recorder.count_flops(nn.Identity(), torch.randn(2)) is None
    assert recorder.count_flops(Mlp(), "no tensor") is None
    assert recorder.guard.counts == {"count flops": 2}


@pytest.mark.parametrize(
    "flops", [{}, {"x": 0}, {"x": -1}, {"x": float("nan")}, {"x": "many"}, {"x": None}]
)
def test_flops_that_are_none_are_refused(recorder, flops):
    with recorder.step():
        pass
    if flops:
        recorder.set_flops(model_flops_per_step=flops["x"])
        assert recorder.guard.num_errors == 1
    found = read_flops(read(recorder))
    assert isinstance(found, Unavailable)
    assert "count_flops" in found.reason


def test_a_peak_in_teraflops_is_refused(recorder):
    recorder.set_peak(989, "bfloat16")
    assert "TFLOP/s" in recorder.guard.first_messages["peak"]


def test_without_a_dtype_or_device_there_is_no_peak(recorder):
    with recorder.step():
        pass
    recorder.set_flops(model_flops_per_step=1e9, hardware_flops_per_step=1.5e9)
    recorder.set_flops(model_flops_per_step=2e9, source="the second word counts")
    found = read_flops(read(recorder))
    assert not isinstance(found, Unavailable)
    one = found[0]
    assert (one.model_flops, one.source) == (2e9, "the second word counts")
    assert one.hardware_flops == Unavailable("what is computed again was not said")
    assert one.peak_flops_per_s == Unavailable(
        "no peak: the dtype was not said; give the peak with --peak-tflops"
    )

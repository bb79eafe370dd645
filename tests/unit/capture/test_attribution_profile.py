"""Exact bytes of small models, by arithmetic; what the founding profiler got wrong; no traces left.

Only bytes of tensors are compared here, never the allocator: that is `tests/distributed`'s, in
processes of its own.
"""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshscope.capture.guard import Guard
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout
from meshscope.core.trace_names import parse_rank_folder, rank_folder_name

WIDTH, BATCH = 64, 32
WEIGHT_BYTES = 4 * WIDTH * WIDTH
ROW_BYTES = 4 * BATCH * WIDTH


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.fixture(autouse=True)
def _leaves_no_hooks():
    yield
    found = top_hooks()
    while top_hooks() is not None:  # a test that failed must not take others with it
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert found is None
    assert torch._C._len_torch_dispatch_stack() == 0


def make_chain(*modules):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *modules)


def profile_of(model, optimizer=None, **settings):
    optimizers = [] if optimizer is None else [optimizer]
    return MemoryProfile(torch, [model], optimizers, guard=Guard(), **settings).open()


def sums(point):
    """Without what other tests still hold."""
    found = {name: sum(paths.values()) for name, paths in point.modules_bytes.items()}
    found.pop("other", None)
    return found


def named(profile, name):
    return [point for point in profile.points if point.name == name]


def close_cleanly(profile):
    profile.close()
    assert profile._guard.counts == {}


def test_parameters_gradients_and_state_of_adam():
    model = make_chain()
    optimizer = torch.optim.Adam(model.parameters())
    profile = profile_of(model, optimizer)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    assert not profile.is_open
    # Gradients do not exist before backward, nor optimizer state before its step: SEEDS §5.
    assert sums(named(profile, "construction")[0]) == {"parameters": WEIGHT_BYTES}
    assert "gradients" not in sums(named(profile, "after_forward")[0])
    assert sums(named(profile, "after_backward")[0])["gradients"] == WEIGHT_BYTES
    last = named(profile, "after_step")[0]
    assert last.modules_bytes["optimizer_state"] == {
        "0.weight.step": 4,
        "0.weight.exp_avg": WEIGHT_BYTES,
        "0.weight.exp_avg_sq": WEIGHT_BYTES,
    }
    assert "master_parameters" not in sums(last)  # they are the model's own
    optimizer.zero_grad(set_to_none=True)
    assert profile._guard.counts == {}


def test_master_parameters_and_their_gradients_are_found():
    model = make_chain().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    profile = profile_of(model, torch.optim.SGD(masters, lr=0.1))
    assert sums(named(profile, "construction")[0]) == {
        "parameters": WEIGHT_BYTES // 2,
        "master_parameters": WEIGHT_BYTES,
    }
    close_cleanly(profile)


def test_activations_are_what_is_saved_and_once():
    """Linear saves its input, ReLU its output, which is also the next Linear's input."""
    model = make_chain(nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    profile = profile_of(model)
    loss = model(torch.randn(BATCH, WIDTH)).sum()
    found = sums(profile.point("now"))
    assert found == {
        "parameters": 2 * WEIGHT_BYTES,
        "inputs": ROW_BYTES,
        "activations": ROW_BYTES,
        "temporaries": 4,  # the loss
    }
    assert profile.points[-1].modules_bytes["activations"] == {"1": ROW_BYTES}
    del loss
    assert "activations" not in sums(profile.point("dropped"))
    close_cleanly(profile)


def test_in_place_operations_and_views_cost_nothing_more():
    class Cut(nn.Module):
        def forward(self, x):
            first, second = x.view(BATCH, 2, WIDTH // 2).unbind(1)
            return first.sigmoid() * second

    model = make_chain(nn.ReLU(inplace=True), Cut())
    profile = profile_of(model)
    loss = model(torch.randn(BATCH, WIDTH)).sum()
    # The sigmoid's half, and the rows of which `second` and ReLU keep views.
    assert sums(profile.point("now"))["activations"] == ROW_BYTES + ROW_BYTES // 2
    loss.backward()
    close_cleanly(profile)


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100, bias=False))
    model[1].weight = model[0].weight
    profile = profile_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    functional.cross_entropy(model(torch.arange(50)), torch.arange(50)).backward()
    assert sums(profile.points[0]) == {"parameters": 400 * WIDTH}
    assert sums(named(profile, "after_backward")[0])["gradients"] == 400 * WIDTH
    close_cleanly(profile)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_keeps_inputs_only(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)
            self.blocks = nn.ModuleList(
                make_chain(nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)
            )

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    model = Checkpointed()
    profile = profile_of(model, steps=2)
    loss = model(torch.arange(BATCH) % 10).sum()
    assert sums(profile.point("now"))["activations"] == 3 * ROW_BYTES
    loss.backward()
    after = named(profile, "after_backward")[0]
    assert sums(after).get("activations", 0) == 0
    assert sums(after)["gradients"] == sums(after)["parameters"]
    close_cleanly(profile)


def test_token_inputs_keep_their_activations_until_backward():
    """A full backward hook of a model fed with tokens fires at once; SEEDS §5."""
    model = nn.Sequential(nn.Embedding(10, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    profile = profile_of(model)
    seen = []
    profile._sample = lambda *_: seen.append(sums(profile._take("now")).get("activations", 0))
    loss = model(torch.arange(10)).sum()
    del seen[:-1]
    loss.backward()
    assert seen[0] == 2 * 4 * 10 * WIDTH  # GELU's input, and its output
    assert seen[1] > 0  # the first node of backward has run, GELU's has not
    close_cleanly(profile)


def test_eval_and_no_grad_add_nothing():
    model = make_chain(nn.GELU())
    profile = profile_of(model, steps=2)
    with torch.no_grad():
        model.eval()(torch.randn(BATCH, WIDTH))
    assert [point.name for point in profile.points] == ["construction"]
    model.train()(torch.randn(BATCH, WIDTH)).sum().backward()
    with torch.no_grad():
        model(torch.randn(BATCH, WIDTH))
    assert sums(profile.point("now")).get("activations", 0) == 0
    close_cleanly(profile)


def test_outputs_that_are_tuples_or_dicts_do_no_harm():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(WIDTH, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 4)

        def forward(self, x):
            y, state = self.gru(x)
            z, weights = self.attention(y, y, y)
            return {"z": z, "more": [state, (weights, None)]}

    model = Outer()
    profile = profile_of(model, steps=1)
    model(torch.randn(3, 2, WIDTH))["z"].sum().backward()
    profile.end_step()
    assert {p.name for p in profile.points} >= {"after_forward", "after_backward", "after_step"}
    close_cleanly(profile)


def test_small_layers_keep_their_bytes():
    model = nn.Linear(500, 490)  # 0.98 MB: floored to MiB it would be nothing
    profile = profile_of(model)
    assert profile.points[0].modules_bytes["parameters"] == {
        "weight": 4 * 500 * 490,
        "bias": 4 * 490,
    }
    close_cleanly(profile)


def test_training_is_the_same_with_and_without():
    def train(is_profiled):
        torch.manual_seed(0)
        model = make_chain(nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        profile = profile_of(model, optimizer, steps=3) if is_profiled else None
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
        assert profile is None or (not profile.is_open and profile._guard.counts == {})
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_a_saved_tensor_that_was_changed_is_still_an_error():
    model = make_chain(nn.Sigmoid())
    profile = profile_of(model)
    out = model(torch.randn(BATCH, WIDTH))
    loss = out.sum()
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    close_cleanly(profile)


def test_others_hooks_stay_in_force():
    model = make_chain(nn.GELU(), nn.Linear(WIDTH, WIDTH))
    profile = profile_of(model)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t.clone(), lambda t: t
    ):
        loss = model(torch.randn(BATCH, WIDTH)).sum()
    assert len(packed) >= 3
    assert top_hooks() is None
    loss.backward()
    close_cleanly(profile)


def test_a_forward_that_raises_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    model = make_chain(Fails())
    profile = profile_of(model)
    with pytest.raises(ValueError, match="no"):
        model(torch.randn(BATCH, WIDTH))
    assert profile._calls.path == ""
    close_cleanly(profile)


def test_all_hooks_are_taken_out():
    model = make_chain(nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    assert not profile.is_open
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_error_of_ours_is_counted_and_training_goes_on():
    model = make_chain(nn.GELU())
    profile = profile_of(model)

    def fail(*_):
        raise OSError("no allocator")

    profile._sample = fail
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert profile._guard.num_errors > 0
    profile.close()


def test_chosen_steps_by_number():
    model = make_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer, steps={1, 3})
    for _ in range(5):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()
    assert [point.step for point in named(profile, "after_step")] == [1, 3]
    assert not profile.is_open


def test_microbatches_are_counted():
    model = make_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer)
    for _ in range(3):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    assert [p.microbatch for p in named(profile, "after_backward")] == [0, 1, 2]


def test_buffers_of_communication_are_found():
    class Reducer:
        def __init__(self):
            self.buckets = [torch.zeros(100), torch.zeros(50)]

    profile = profile_of(make_chain(), communication=[Reducer()])
    assert sums(profile.points[0])["communication"] == 600
    close_cleanly(profile)


def test_the_recorder_writes_both_files_and_overwrites_none(tmp_path):
    model = make_chain(nn.GELU())
    optimizer = torch.optim.Adam(model.parameters())
    config = RecorderConfig(provenance=False, communication=False)
    with Recorder(tmp_path / "run", layout=Layout(), config=config) as recorder:
        recorder.attach(model, optimizer)
        for _ in range(2):
            recorder.profile_memory(model, optimizer, estimate={"parameters": WEIGHT_BYTES})
            model(torch.randn(BATCH, WIDTH)).sum().backward()
            optimizer.step()
        run_dir = recorder.run_dir
    assert recorder.guard.counts == {}
    folder = run_dir / "memory" / "rank0_dp0_tp0_pp0"
    lines = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    assert [line["point"] for line in lines[1:]] == [
        "construction",
        "after_forward",
        "after_backward",
        "at_peak",
        "after_step",
    ]
    assert lines[0]["estimate_bytes"] == {"parameters": WEIGHT_BYTES}
    log = (folder / "memory.log").read_text()
    assert "parameters: 0.02 MiB (estimated 0.02 MiB)" in log
    assert "  0.weight: 0.02, 0.02" in log
    second = (folder / "profile002" / "memory.jsonl").read_text().splitlines()
    assert json.loads(second[2])["step"] == 1


def test_names_of_folders():
    layout = Layout(dp=2, tp=2, pp=2)
    assert rank_folder_name(5, layout) == "rank5_dp0_tp1_pp1"
    assert rank_folder_name(3) == "rank3"
    assert rank_folder_name(9, layout) == "rank9"
    assert rank_folder_name(1, Layout(cp=2)) == "rank1_dp0_tp0_pp0_cp1"
    assert parse_rank_folder("rank5_dp0_tp1_pp1") == 5
    assert parse_rank_folder("rank5/../x") is None


def test_buffers_are_a_category_of_their_own():
    model = make_chain(nn.BatchNorm1d(WIDTH))
    profile = profile_of(model)
    found = sums(profile.points[0])
    assert found["buffers"] == 2 * 4 * WIDTH + 8  # mean, variance, and how many batches
    assert found["parameters"] == WEIGHT_BYTES + 2 * 4 * WIDTH
    close_cleanly(profile)


def test_gradients_that_are_dropped_are_not_counted():
    """The founding profiler counts gradients by the parameters that could have one; SEEDS §5."""
    model = make_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer, steps=2)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert sums(profile.point("zeroed"))["gradients"] == WEIGHT_BYTES
    optimizer.zero_grad(set_to_none=True)
    assert "gradients" not in sums(profile.point("dropped"))
    close_cleanly(profile)


def test_the_total_at_construction_is_the_models():
    """The founding profiler gives 17.67 MB for a model of 5.89 MB: gradients before there are any,
    and the optimizer's parameters, which are the model's; SEEDS §5."""
    model = nn.Sequential(*(nn.Linear(500, 490) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    profile = profile_of(model, optimizer)
    assert sum(sums(profile.points[0]).values()) == 3 * 4 * (500 * 490 + 490)
    close_cleanly(profile)


def test_the_optimizers_state_dict_is_never_asked_for():
    """It copies, and a sharded optimizer gathers for it; SEEDS §5."""

    class Sharded(torch.optim.SGD):
        def state_dict(self):
            raise AssertionError("asked for")

    model = make_chain()
    optimizer = Sharded(model.parameters(), lr=0.1, momentum=0.9)
    profile = profile_of(model, optimizer)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    assert sums(named(profile, "after_step")[0])["optimizer_state"] == WEIGHT_BYTES
    close_cleanly(profile)


def test_files_are_written_once_for_each_step(tmp_path):
    """Not at every forward and backward; SEEDS §5."""
    model = make_chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = profile_of(model, optimizer, folder=tmp_path)
    for _ in range(5):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        assert len((tmp_path / "memory.jsonl").read_text().splitlines()) == 2
    optimizer.step()
    lines = (tmp_path / "memory.jsonl").read_text().splitlines()
    assert len(lines) == 2 + 2 * 5 + 2  # header, construction; microbatches; peak, end
    close_cleanly(profile)

"""The memory model against a dry run of the engine's model on meta tensors.

A rank's row of the schedule is run action by action: forward keeps what autograd saves, backward
lets it go, AdamW makes its states. Tensors are torch's fake ones: meta tensors that operators treat
as those of a CPU (plain meta tensors get attention's slow formula, which keeps all scores). Nothing
is computed and nothing allocated, so models are of real size; tp ranks are those of torch's fake
process group. Counted are storages, each once.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshscope.core.config.layer_memory import LayerShape, count_in_flight, estimate_stage
from meshscope.core.config.memory_model import estimate_memory
from meshscope.core.schedule import ActionKind
from meshscope.engine.config.toml_file import from_document
from meshscope.engine.memory.strategy import make_memory_strategy
from meshscope.engine.model import transformer
from meshscope.engine.model.transformer import build_stage

GPT = {"preset": "gpt2-medium", "num_layers": 8}
LLAMA = {"preset": "llama-2-7b", "num_layers": 4, "sequence_length": 2048}
LAYOUTS = {
    "one rank": (GPT, {}, "basic"),
    "one rank, recompute": (LLAMA, {}, "standard"),
    "tp4": (LLAMA, {"tp": 4}, "basic"),
    "tp4, sequence parallel": (LLAMA, {"tp": 4, "sequence_parallel": True}, "basic"),
    "tp2 pp4 1f1b": (LLAMA, {"tp": 2, "pp": 4}, "basic"),
    "pp4 gpipe, recompute": (GPT, {"pp": 4, "schedule": "gpipe"}, "standard"),
    "pp4 interleaved": (GPT, {"pp": 4, "schedule": "interleaved_1f1b"}, "basic"),
    "pp2 uneven": (LLAMA, {"pp": 2, "stage_sizes": [3, 1]}, "basic"),
}


@pytest.fixture
def join_tp():
    """Makes this process rank 0 of so many that do nothing."""

    def join(size):
        if size == 1:
            return None
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return dist.group.WORLD

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_bytes(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class DryRun:
    """One pipeline rank, one step."""

    def __init__(self, config, pp_rank, group):
        schedule, parallel = config.schedule, config.parallel
        self.config, self.schedule, self.pp_rank = config, schedule, pp_rank
        self.row = schedule.actions[pp_rank]
        self.stages = {
            index: build_stage(
                config.model, index, schedule.num_stages, stage_sizes=parallel.stage_sizes,
                tp_group=group, sequence_parallel=parallel.sequence_parallel,
            )
            for index in schedule.stages_of(pp_rank)
        }  # fmt: skip
        for stage in self.stages.values():
            make_memory_strategy(config.memory.strategy).prepare(stage)
        own = [t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers())]
        self.own = {t.untyped_storage()._cdata for t in own}
        self.held, self.peak_bytes = {}, 0

    @property
    def parameters(self):
        return [p for stage in self.stages.values() for p in stage.parameters()]

    def run(self):
        for action in self.row:
            if action.kind is ActionKind.FORWARD:
                self.forward(action)
            elif action.kind is not ActionKind.INPUT_GRAD:
                self.backward(action)

    def forward(self, action):
        stage, model = self.stages[action.stage], self.config.model
        size, kept = self.config.batch.microbatch_size, []
        ids = torch.zeros(size, model.sequence_length, dtype=torch.long)
        x = ids
        if not stage.is_first:
            x = torch.zeros(stage.hidden_shape(size), requires_grad=True)

        def pack(tensor):
            if tensor.untyped_storage()._cdata not in self.own:
                kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = stage(x, ids, 1) if stage.is_last else stage(x)
        self.held[action.stage, action.microbatch] = made, kept
        self.note_peak()

    def backward(self, action):
        made, _ = self.held.pop((action.stage, action.microbatch))
        made.backward(None if made.ndim == 0 else torch.zeros_like(made))
        self.note_peak()

    def note_peak(self):
        """What is kept for backward, and gradients."""
        everything = [tensor for _, tensors in self.held.values() for tensor in tensors]
        grads = [p.grad for p in self.parameters if p.grad is not None]
        self.peak_bytes = max(self.peak_bytes, sum_bytes(everything) + sum_bytes(grads))


def count_temporary(config, dry):
    """What the estimate adds for single operations, which autograd does not keep."""
    shape = LayerShape(
        model=config.model, microbatch_size=config.batch.microbatch_size, compute_bytes=4,
        tp=config.parallel.tp, sequence_parallel=config.parallel.sequence_parallel,
        has_fused_norm=False,
    )  # fmt: skip
    found = [
        estimate_stage(
            shape, len(stage.layers), config.memory.strategy, is_first=stage.is_first,
            is_last=stage.is_last, num_in_flight=count_in_flight(dry.schedule, dry.pp_rank),
        )
        for stage in dry.stages.values()
    ]  # fmt: skip
    return max(s.temporary_bytes for s in found) + max(s.temporary_logits_bytes for s in found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_gradients_states_and_activations_are_as_estimated(name, join_tp, monkeypatch):
    monkeypatch.setattr(transformer, "initialize_parameters", lambda stage, seed: None)
    model, parallel, strategy = LAYOUTS[name]
    config = from_document(
        {
            "model": model, "parallel": parallel, "memory": {"strategy": strategy},
            "batch": {"microbatch_size": 2, "num_microbatches": 4 if "pp" in parallel else 2},
        }
    )  # fmt: skip
    group = join_tp(config.parallel.tp)
    ranks = estimate_memory(config, device_type="cpu").ranks
    for estimate in {id(rank): rank for rank in (ranks[0], ranks[-1])}.values():
        with FakeTensorMode():
            dry = DryRun(config, estimate.pp_rank, group)
            dry.run()
            optimizer = torch.optim.AdamW(dry.parameters)
            optimizer.step()
        states = [t for one in optimizer.state.values() for t in one.values() if t.ndim]
        assert sum_bytes(dry.parameters) == estimate.parameters_bytes
        gradients = sum_bytes([p.grad for p in dry.parameters])
        assert 0 <= estimate.gradients_bytes <= gradients
        assert sum_bytes(states) == estimate.optimizer_bytes
        kept = estimate.activations_bytes + estimate.logits_bytes + estimate.gradients_bytes
        kept -= count_temporary(config, dry)
        # The ids of tokens and targets are not in the model: 8 bytes each.
        ids = 2 * 8 * config.batch.microbatch_size * config.model.sequence_length
        assert dry.peak_bytes == pytest.approx(kept, rel=1e-4, abs=len(dry.row) * ids)

"""Attribution + residual = the CUDA allocator; run by hand where there is a device."""

import gc
import json

import pytest
import torch
from tests.distributed.attribution_ranks import BATCH, LENGTH, VOCABULARY, Gpt, find_loss, sums

from meshscope.capture.attribution.memory_profile import MemoryProfile
from meshscope.capture.guard import Guard
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.ingest.snapshot import read_snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MAX_RESIDUAL_RATIO = 0.03
MAX_ACTIVATION_ERROR_RATIO = 0.02


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non_reentrant"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_the_residual_is_small_and_freeing_returns_the_activations(checkpointing, is_autocast):
    torch.manual_seed(0)
    # cuBLAS keeps a workspace for good, 64 MiB here, which is nobody's tensor.
    for dtype in (torch.float32, torch.bfloat16):
        torch.mm(*torch.ones(2, 512, 512, device="cuda", dtype=dtype))
    gc.collect()
    already = torch.cuda.memory_allocated()
    model = Gpt(checkpointing).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, VOCABULARY, (64 * BATCH, LENGTH), device="cuda")

    def loss_of():
        with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
            return find_loss(model, tokens)

    def train_step():
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    train_step()
    guard = Guard()
    profile = MemoryProfile(torch, [model], [optimizer], guard=guard, steps=2).open()
    train_step()
    loss = loss_of()
    before = profile.point("before_freeing")
    del loss
    gc.collect()
    after = profile.point("freed")
    profile.close()
    assert guard.first_messages == {}
    peak = max(point.allocated_bytes for point in profile.points)
    for point in profile.points:
        assert point.attributed_bytes + point.residual_bytes == point.allocated_bytes
        residual = point.residual_bytes - already  # other tests' tensors are not ours
        print(point.name, point.allocated_bytes, residual)
        assert abs(residual) <= MAX_RESIDUAL_RATIO * peak, (point.name, sums(point))
    freed = before.allocated_bytes - after.allocated_bytes
    found = sums(before)["activations"] - sums(after).get("activations", 0)
    assert found == pytest.approx(freed, rel=MAX_ACTIVATION_ERROR_RATIO)


def test_a_full_device_is_explained(tmp_path):
    model = torch.nn.Linear(4096, 4096).cuda()
    config = RecorderConfig(provenance=False)
    with Recorder(tmp_path / "run", config=config) as recorder:
        recorder.attach(model)
        recorder.open()
        assert recorder.watch_out_of_memory()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 44, device="cuda", dtype=torch.uint8)
        folder = recorder.run_dir / "memory" / "rank0"
        assert recorder.guard.counts == {}
    report = json.loads((folder / "out_of_memory.json").read_text())
    assert report["categories_bytes"]["parameters"] == 4 * (4096 * 4096 + 4096)
    assert "cuda:0 is full" in report["sentence"]
    assert "16.0 TiB were asked for" in report["sentence"]
    assert len(read_snapshot(folder / "out_of_memory.pickle").segment_device) > 0

"""Attribution + residual = the CUDA allocator; run by hand where there is a device."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.attribution_ranks import (
    BATCH,
    LENGTH,
    NCCL_CASE,
    TOGETHER_ON_CUDA,
    VOCABULARY,
    WORLD_SIZE,
    Gpt,
    find_loss,
    sums,
)

from meshscope.analyze.study import Study
from meshscope.capture.guard import Guard
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.diagnose.context import Context
from meshscope.diagnose.rules.out_of_memory import OutOfMemory
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.store.read.run import open_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROOT = Path(__file__).parents[2]
MAX_RESIDUAL_RATIO = 0.03
MAX_ACTIVATION_ERROR_RATIO = 0.02
CASES = [(case, rank) for case in TOGETHER_ON_CUDA for rank in range(WORLD_SIZE)]


def begin_clean():
    """What other tests left is released."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()


def check_residuals(profile):
    peak = max(point.allocated_bytes for point in profile.points)
    for point in profile.points:
        assert point.attributed_bytes + point.residual_bytes == point.allocated_bytes
        residual = point.residual_bytes
        print(point.name, point.during, point.allocated_bytes, residual, f"{residual / peak:.4%}")
        print("   ", sums(point), point.modules_bytes.get("libraries"))
        assert abs(residual) <= MAX_RESIDUAL_RATIO * peak, (point.name, sums(point))
    print("peak: found", peak, "of", torch.cuda.max_memory_allocated())
    return peak


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non_reentrant"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_the_residual_is_small_and_freeing_returns_the_activations(checkpointing, is_autocast):
    torch.manual_seed(0)
    begin_clean()
    model = Gpt(checkpointing).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
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
    peak = check_residuals(profile)
    # What is in use only inside of an operator is not seen; all else is.
    assert peak >= 0.9 * torch.cuda.max_memory_allocated()
    freed = before.allocated_bytes - after.allocated_bytes
    found = sums(before)["activations"] - sums(after).get("activations", 0)
    assert found == pytest.approx(freed, rel=MAX_ACTIVATION_ERROR_RATIO)


def test_what_cublas_keeps_is_said_in_the_very_first_step():
    begin_clean()
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = MemoryProfile(torch, [model], [optimizer], guard=Guard(), steps=1).open()
    model(torch.ones(512, 512, device="cuda")).sum().backward()
    optimizer.step()
    check_residuals(profile)
    last = profile.points[-1]
    in_use = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    released = in_use - torch.cuda.memory_allocated()
    assert released > 0
    # What releases them returns is what was said to be theirs.
    assert sums(last)["libraries"] == pytest.approx(released, rel=0.01)


def test_a_peak_inside_of_the_optimizer_is_found():
    begin_clean()
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    profile = MemoryProfile(torch, [model], [optimizer], guard=Guard(), steps=1).open()
    model(torch.ones(8, 2048, device="cuda")).sum().backward()
    optimizer.step()
    check_residuals(profile)
    peak = next(point for point in profile.points if point.name == "at_peak")
    assert peak.during.startswith("optimizer")
    assert sums(peak)["temporaries"] > 0


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_and_compiled_models_run_as_they_would():
    """A higher-order operator reaches the dispatch mode; a compiled one is not taken apart."""
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(64, 64)

        def forward(self, x):
            x = self.inner(x)
            return flex_attention(x, x, x)

    begin_clean()
    model = Flexible().cuda()
    guard = Guard()
    profile = MemoryProfile(torch, [model], [], guard=guard, steps=1).open()
    model(torch.randn(2, 4, 256, 64, device="cuda")).sum().backward()
    profile.end_step()
    assert guard.first_messages == {}
    check_residuals(profile)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attribution")
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.attribution_ranks", folder, "--cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return results, done.stderr


@pytest.mark.parametrize(("case", "rank"), [*CASES, (NCCL_CASE, 0)])
def test_ranks_that_share_a_device(found, case, rank):
    results, stderr = found
    name = f"{case}.rank{rank}"
    assert name in results, stderr[-4000:]
    result = results[name]
    assert result["errors"] == {}
    peak = max(point["allocated_bytes"] for point in result["points"])
    for point in result["points"]:
        ratio = point["residual_bytes"] / peak
        print(point["name"], point["during"], point["allocated_bytes"], f"{ratio:.4%}")
        print("   ", point["categories"])
    print("peak: found", peak, "of", result["peak_bytes"])
    print("activations", result["activations_bytes"], "freed", result["freed_bytes"])
    for point in result["points"]:
        attributed = sum(point["categories"].values())
        assert attributed + point["residual_bytes"] == point["allocated_bytes"]
        assert abs(point["residual_bytes"]) <= MAX_RESIDUAL_RATIO * peak, point
    assert result["activations_bytes"] == pytest.approx(
        result["freed_bytes"], rel=MAX_ACTIVATION_ERROR_RATIO
    )


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
    (finding,) = OutOfMemory().run(Context(Study(open_run(tmp_path / "run").last_attempt)))
    assert report["sentence"] in finding.summary

"""FLOPs that are counted from a trace's shapes, against torch's counter and by hand.

    python benchmarks/trace_roofline.py [--recorded FOLDER] [--output FILE]

Trains four kinds of models for a step on the CPU below torch.profiler with shapes: a residual
network, a GPT, a gated one with fewer heads for keys (Llama's kind), and a recommendation model
with embedding bags. Prints for each the FLOPs of forward and backward as counted from the trace, by
`torch.utils.flop_counter`, and by hand, and the share of the operators' own time whose cost is
known. A CPU has no roofline here: what is checked is the counting.

`--recorded FOLDER` has traces of a GPU, as `trace_programs.py` writes them. For each: the share of
device time whose cost is known; FLOPs against the formula; and the achieved rate of products,
convolutions and attention, or of an operator that moves data, against a count by hand: what the
formula says over the durations of those kernels, summed here from the raw JSON. Beside it the rate
between CUDA events without a profiler, in other calls: a device's clock differs between them.
"""

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from meshscope.analyze.device.trace_roofline import measure_coverage, measure_rates
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.core.unavailable import known
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_tables import OperatorRow

COMPOSITE = ("aten::linear", "aten::matmul", "aten::convolution", "aten::_convolution",
             "aten::scaled_dot_product_attention", "aten::to", "aten::_to_copy", "aten::contiguous",
             "aten::clone", "aten::softmax", "aten::log_softmax", "aten::relu_")  # fmt: skip
"""Call others, which are counted."""
WITHOUT_DEVICE = frozenset(
    f"aten::{name}"
    for name in ("view", "reshape", "transpose", "t", "empty", "new_empty", "empty_like",
                 "empty_strided", "as_strided", "expand", "permute", "slice", "select", "unsqueeze",
                 "squeeze", "detach", "alias", "result_type", "resolve_conj", "flatten", "chunk",
                 "split", "narrow", "_unsafe_view", "lift_fresh", "unbind", "expand_as")
)  # fmt: skip
"""Move nothing: on a device they have no time, on a host only what a call takes."""

NUM_RUNS = 5
"""Shares of time are the median of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program and what it costs by hand."""

    name: str
    run: Callable[[], None]
    hand_flops: float
    hand: str


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.around = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.first(x)).relu()
        y = self.norms[1](self.second(y))
        return (y + (x if self.around is None else self.around(x))).relu()


def make_resnet() -> Case:
    """ResNet-18 on 64 × 64 pixels, 10 classes."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1),
              (256, 512, 2), (512, 512, 1)]  # fmt: skip
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *(Block(*one) for one in widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    batch, size = 4, 64
    macs = (size // 2) ** 2 * 64 * 3 * 49
    first = macs
    side = size // 4
    for width, out, stride in widths:
        side //= stride
        macs += side * side * out * (width * 9 + out * 9) + (
            side * side * out * width if stride > 1 else 0
        )
    macs += 512 * 10
    # Backward is twice forward; the first convolution's input needs no gradient.
    flops = 2.0 * batch * (3 * macs - first)
    data, target = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Case(
        name="ResNet",
        run=lambda: nn.functional.cross_entropy(model(data), target).backward(),
        hand_flops=flops,
        hand="2·B·(3·multiply-adds − first convolution's)",
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, 2 * key_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        query = self.query(x).view(b, s, self.heads, self.size).transpose(1, 2)
        key, value = self.keys(x).view(b, s, 2, self.key_heads, self.size).permute(2, 0, 3, 1, 4)
        repeat = self.heads // self.key_heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, s, w))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, ffn: int, *, gated: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, key_heads)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inner = nn.Linear(width, ffn * (2 if gated else 1), bias=False)
        self.outer = nn.Linear(ffn, width, bias=False)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.inner(self.norms[1](x))
        if self.gated:
            gate, y = y.chunk(2, -1)
            y = silu(gate) * y
        else:
            y = nn.functional.gelu(y)
        return x + self.outer(y)


def make_decoder(name: str, *, heads: int, key_heads: int, ffn: int, gated: bool) -> Case:
    """Layers of one width, and a head; 6·N per token and 12·s·h per token and layer."""
    layers, width, vocab, b, s = 4, 256, 2048, 4, 256
    table = nn.Embedding(vocab, width)
    body = nn.Sequential(*(Layer(width, heads, key_heads, ffn, gated=gated) for _ in range(layers)))
    head = nn.Linear(width, vocab, bias=False)
    tokens = torch.randint(vocab, (b, s))

    def run() -> None:
        logits = head(body(table(tokens)))
        nn.functional.cross_entropy(logits.view(-1, vocab), tokens.view(-1)).backward()

    size = width // heads
    weights = 2 * width * width + 2 * key_heads * size * width
    weights += width * ffn * (3 if gated else 2)
    flops = b * s * (6.0 * (layers * weights + width * vocab) + layers * 12.0 * s * width)
    return Case(name=name, run=run, hand_flops=flops, hand="B·s·(6·N + 12·L·h·s)")


def make_dlrm() -> Case:
    """Dense layers, embedding bags, products of all pairs, dense layers."""
    batch, width, tables = 256, 64, 8
    bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
    pairs = (tables + 1) ** 2
    top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 1))
    bags = nn.ModuleList(nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
    dense = torch.randn(batch, 13)
    indices = [torch.randint(1000, (batch, 4)) for _ in range(tables)]

    def run() -> None:
        x = bottom(dense)
        rows = torch.stack([x, *(bag(one) for bag, one in zip(bags, indices, strict=True))], 1)
        crossed = torch.bmm(rows, rows.transpose(1, 2)).flatten(1)
        top(torch.cat([x, crossed], 1)).mean().backward()

    first = 13 * 256
    macs = first + 256 * width + (width + pairs) * 256 + 256 + (tables + 1) ** 2 * width
    return Case(
        name="DLRM", run=run, hand_flops=2.0 * batch * (3 * macs - first),
        hand="2·B·(3·multiply-adds − first layer's)",
    )  # fmt: skip


def count_from_trace(run: Callable[[], None]) -> tuple[int, float]:
    """FLOPs, and the share of the operators' own time whose cost is known."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        rows = summarize_trace(read_trace(path)).host.operators
    operators = tuple(
        OperatorRow(
            name=row.name, shapes=row.shapes, types=row.types, values=row.values, count=row.count,
            num_kernels=0, device_ns=row.self_ns, link_ns=0, host_ns=row.total_ns, share_ratio=0.0,
        )
        for row in rows
        if row.name.startswith("aten::")
    )  # fmt: skip
    rates = measure_rates(tuple(one for one in operators if one.name not in COMPOSITE), "")
    working = tuple(one for one in operators if one.name not in WITHOUT_DEVICE)
    coverage = measure_coverage(working, rates)
    return sum(rate.flops for rate in rates), float(coverage.counted_ns / coverage.device_ns)


ARITHMETIC = ("mm", "addmm", "bmm", "baddbmm", "convolution", "cudnn_convolution", "_scaled_mm",
              "convolution_backward", "_scaled_dot_product_flash_attention",
              "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention",
              "_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward",
              "_scaled_dot_product_efficient_attention_backward", "_flash_attention_forward",
              "_flash_attention_backward", "_cudnn_attention_forward")  # fmt: skip


def sum_kernels_ns(path: Path, *, all_of_them: bool) -> int:
    """Durations of kernels by hand: those of arithmetic, or all."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ids = {
        event["args"]["External id"]
        for event in events
        if event.get("cat") == "cpu_op" and event["name"].removeprefix("aten::") in ARITHMETIC
    }
    return round(1000 * sum(
        event["dur"]
        for event in events
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")
        and (all_of_them or event["args"].get("External id") in ids)
    ))  # fmt: skip


def hold_recorded(folder: Path) -> list[dict[str, Any]]:
    """What is read from traces of a GPU against what is known of their programs."""
    said = json.loads((folder / "programs.json").read_text(encoding="utf-8"))
    rows = []
    for name, program in said["programs"].items():
        path = folder / f"{name}.json.gz"
        if "left_out" in program or not path.exists():
            continue
        summary = summarize_trace(read_trace(path))
        device = max(summary.devices, key=lambda one: one.breakdown.time.busy_ns)
        row: dict[str, Any] = {
            "program": name,
            "coverage_ratio": known(device.coverage.ratio),
            "coverage_of_launched_ratio": known(device.coverage.launched_ratio),
            "roofline_ratio": known(device.coverage.roofline_ratio),
            "not_counted": [
                [one.name, round(one.device_ns / device.coverage.device_ns, 3), one.reason]
                for one in device.coverage.uncounted[:3]
                if one.device_ns * 50 > device.coverage.device_ns
            ],
        }
        hand = program["flops"] or program["num_bytes"]
        rated = [one for one in device.rates if one.flops or not program["flops"]]
        if hand and rated:
            counted = sum(one.flops or one.num_bytes for one in rated)
            whole = hand * program["traced_steps"]
            by_hand_ns = sum_kernels_ns(path, all_of_them=not program["flops"])
            rate = counted / sum(one.device_ns for one in rated) * 1e9
            hand_rate = whole / by_hand_ns * 1e9
            row |= {
                "counted": counted,
                "by_hand": whole,
                "formula": program["formula"],
                "error_ratio": counted / whole - 1,
                "achieved_per_s": rate,
                "achieved_by_hand_per_s": hand_rate,
                "achieved_error_ratio": rate / hand_rate - 1,
            }
            if name.startswith("op_"):
                row["between_events_per_s"] = hand / program["step_s"]
        rows.append(row)
        print(row)
    return [{"device": said["device"], "torch": said["torch"]}, *rows]


def main() -> int:
    """Exit code 1 where a count on the CPU is 3 % or more off the one by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--recorded", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cases = [
        make_resnet(),
        make_decoder("GPT", heads=4, key_heads=4, ffn=1024, gated=False),
        make_decoder("Llama", heads=8, key_heads=2, ffn=704, gated=True),
        make_dlrm(),
    ]
    rows = []
    for case in cases:
        case.run()
        with FlopCounterMode(display=False) as counter:
            case.run()
        found = [count_from_trace(case.run) for _ in range(NUM_RUNS)]
        counted, ratio = found[0][0], statistics.median(one for _, one in found)
        rows.append(
            {
                "program": case.name,
                "counted_flops": counted,
                "torch_flop_counter": counter.get_total_flops(),
                "by_hand": case.hand_flops,
                "formula": case.hand,
                "error_ratio": counted / case.hand_flops - 1,
                "covered_self_time_ratio": round(ratio, 3),
            }
        )
        print(rows[-1])
    recorded = hold_recorded(options.recorded) if options.recorded else []
    if options.output:
        result = {"torch": torch.__version__, "programs": rows, "recorded": recorded}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(float(str(row["error_ratio"]))) >= 0.03 for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""FLOPs that are counted from a trace's shapes, against torch's counter and by hand.

    python benchmarks/trace_roofline.py [--recorded FOLDER] [--output FILE]

Trains kinds of models of `trace_programs.py`, made small, for a step on the CPU below
torch.profiler with shapes: a residual network, a GPT, a Llama, a recommendation model with
embedding bags, a mixture of experts; and attention alone, forward and backward. Prints for each the
FLOPs as counted from the trace, by `torch.utils.flop_counter` (which knows no attention of a CPU),
and by hand, and the share of the operators' own time whose cost is known. A CPU has no roofline
here: what is checked is the counting.

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
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from trace_programs import PROGRAMS

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

CASES = ("resnet", "gpt", "llama", "dlrm", "experts", "op_attention", "op_attention_backward")
NUM_RUNS = 3
"""Shares of time are the median of so many."""


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
    rows = []
    for name in CASES:
        program = PROGRAMS[name](True)
        program.step()
        with FlopCounterMode(display=False) as counter:
            program.step()
        found = [count_from_trace(program.step) for _ in range(NUM_RUNS)]
        counted, ratio = found[0][0], statistics.median(one for _, one in found)
        rows.append(
            {
                "program": name,
                "counted_flops": counted,
                "torch_flop_counter": counter.get_total_flops(),
                "by_hand": program.flops,
                "formula": program.formula,
                "error_ratio": counted / (program.flops or 1) - 1,
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

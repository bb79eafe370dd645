"""Do findings in traces of a GPU say what was done to the program, and what mending it wins?

    python benchmarks/trace_faults.py --record FOLDER     (needs a CUDA device; traces and timings)
    python benchmarks/trace_faults.py FOLDER [--output FILE]    (judges them; needs none)

One training loop (a stack of linear layers in bf16, AdamW) on one device, as it is and with one
fault each: the host reads the loss in the middle of every step and then works, the host works while
the device waits, inputs are copied from pageable memory when they are needed, all of them. Each is
timed without a profiler, in turns with the loop as it is, and traced for a few steps. The truth is
the difference of the timed medians; a finding is right if its rule is the fault's and its gain is
the truth. A profiler slows the host, so gains of host-bound faults come out larger: how much larger
is what this measures.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

EXPECTED = {"plain": None, "reads": "CP005", "late": "CP004", "copies": "CP006"}
"""Fault to the code of the rule that must find it; None: nothing above low."""
NUM_STEPS = 30
NUM_TRACED = 4
NUM_ROUNDS = 5
HOST_WORK_S = 0.004


def record(folder: Path) -> None:
    """Times and traces all variants."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    width, depth, batch = 4096, 12, 8192
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    on_device = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)
    on_host = torch.randn(batch, width, dtype=torch.bfloat16).repeat(1, 1)
    first, second = model[: depth // 2], model[depth // 2 :]

    def work() -> None:
        end = time.perf_counter() + HOST_WORK_S
        while time.perf_counter() < end:
            pass

    def step(fault: str) -> None:
        inputs = on_device
        if fault == "copies":
            for _ in range(4):
                inputs = on_host.to("cuda")
        hidden = first(inputs)
        if fault == "reads":
            hidden[0, 0].item()
            work()
        loss = second(hidden).float().square().mean()
        loss.backward()
        if fault == "late":
            torch.cuda.current_stream().query()
            for _ in range(12):
                work()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def measure(fault: str) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(NUM_STEPS):
            step(fault)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / NUM_STEPS

    for fault in EXPECTED:
        measure(fault)
    times: dict[str, list[float]] = {fault: [] for fault in EXPECTED}
    for _ in range(NUM_ROUNDS):
        for fault, values in times.items():
            values.append(measure(fault))
    folder.mkdir(parents=True, exist_ok=True)
    for fault in EXPECTED:
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=2, warmup=2, active=NUM_TRACED),
        ) as profiler:
            for _ in range(4 + NUM_TRACED):
                step(fault)
                profiler.step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(folder / f"{fault}.json.gz"))
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "step_s": {fault: statistics.median(values) for fault, values in times.items()},
        "rounds_s": times,
    }
    (folder / "timings.txt").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def judge(folder: Path) -> dict[str, object]:
    """Findings of each trace against the timed truth."""
    from meshscope.analyze.study import Study
    from meshscope.core.verdict.severity import Severity
    from meshscope.diagnose.context import Context
    from meshscope.diagnose.runner import diagnose
    from meshscope.ingest.kineto.kineto import read_trace
    from meshscope.ingest.traces.trace_recording import record_trace
    from meshscope.ingest.traces.trace_run import make_run

    facts = json.loads((folder / "timings.txt").read_text(encoding="utf-8"))
    rows = []
    for fault, code in EXPECTED.items():
        path = folder / f"{fault}.json.gz"
        recording = record_trace(read_trace(path), max_spans=60_000)
        context = Context(Study(make_run([recording], path).run.last_attempt))
        found = diagnose(context).findings
        budget = context.study.budget
        wall_s = float(budget.wall_ns.mean()) / 1e9
        above = [one for one in found if one.severity > Severity.LOW]
        truth_s = facts["step_s"][fault] - facts["step_s"]["plain"]
        own = next((one for one in above if one.code == code), None)
        rows.append(
            {
                "fault": fault,
                "expected": code,
                "found": [one.code for one in above],
                "step_s": facts["step_s"][fault],
                "traced_step_s": wall_s,
                "truth_s": truth_s,
                "gain_s": None if own is None else own.saved_ns / 1e9,
                "is_named": [one.code for one in above[:1]] == ([code] if code else []),
            }
        )
    return {"device": facts["device"], "torch": facts["torch"], "rows": rows}


def show(result: dict[str, object]) -> None:
    """A line for each fault."""
    print(f"{result['device']}, torch {result['torch']}")
    for row in result["rows"]:
        gain = "n/a" if row["gain_s"] is None else f"{row['gain_s'] * 1e3:.2f} ms"
        print(
            f"{row['fault']:8} expected {row['expected']} found {row['found']}: gain {gain}, truth "
            f"{row['truth_s'] * 1e3:.2f} ms; step {row['step_s'] * 1e3:.2f} ms, traced "
            f"{row['traced_step_s'] * 1e3:.2f} ms"
        )


def main() -> None:
    """Records or judges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.folder)
        return
    result = judge(arguments.folder)
    show(result)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

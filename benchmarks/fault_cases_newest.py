"""Ten cases of the fault matrix that were written last, and judged once.

Forms of the classes of faults that no other part has: a fault that comes in bursts or grows beside
a steady one, input that is slow on one tensor-parallel rank more and more, an optimizer that is
slow on one stage of torch's pipeline, evaluation on one rank beside a slow one, a late onset
between steps. Words for truths are those of `fault_cases_trials`.
"""

from dataclasses import replace

from benchmarks.fault_cases_trials import (
    STAGE_CODES,
    at,
    cause,
    changing,
    contrast,
    fault,
    one,
    plain,
)
from tests.distributed.fault_matrix import Case
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay

from meshscope.core.layout import Layout

DDP3 = plain("ddp2", 3, 48, num_layers=3, layer_ms=6.0)
DDP4 = plain("ddp2", 4, 48, num_layers=3, layer_ms=6.0)
FSDP3 = plain("fsdp2", 3, 48, num_layers=3, layer_ms=6.0)
FSDP4 = plain("fsdp2", 4, 48, num_layers=3, layer_ms=6.0)
TP4 = plain("dtensor", 4, 42, layout=Layout(tp=4), num_layers=2, layer_ms=10.0)
DP2TP2 = plain("dtensor", 4, 42, layout=Layout(dp=2, tp=2), num_layers=2, layer_ms=10.0)
PP3 = plain(
    "pipelining", 3, 30, layout=Layout(pp=3), num_layers=3, layer_ms=3.0,
    options={"microbatches": 8},
)  # fmt: skip


def list_newest() -> list[Case]:
    return [*list_changes(), *list_pairs(), *list_causes()]


def list_changes() -> list[Case]:
    cases = []
    for name, program, where, rank, ms, shape, first in (
        ("tp4", TP4, "data", 3, 70, "drift", 0), ("fsdp4", FSDP4, "between", 3, 50, "steady", 30),
        ("ddp3", DDP3, "optimizer", 2, 60, "bursts", 0),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first)
        name = f"newest {name} {where} r{rank} {shape} {first}"
        cases.append(fault(name, program, (changing(where, rank), delay)))
    return cases


def list_pairs() -> list[Case]:
    bursts = Delay(where="between", ranks=(1,), ms=60, shape="bursts")
    grows = Delay(where="backward", ranks=(2,), ms=60, shape="drift")
    evaluated = (
        replace(at("evaluation", 0), every=6),
        Delay(where="evaluation", ranks=(0,), ms=150, every=6),
    )
    return [
        fault("newest ddp4 between r1 bursts and data r2", DDP4,
              (changing("between", 1), bursts), one("data", 2, 30)),
        fault("newest fsdp3 backward r2 drift and logging r0", FSDP3,
              (changing("backward", 2), grows), one("logging", 0, 25)),
        fault("newest dp2tp2 optimizer r1 and data r2", DP2TP2,
              one("optimizer", 1, 35), one("data", 2, 35)),
        fault("newest ddp3 evaluation r0 every 6 and forward r2", DDP3,
              evaluated, one("forward", 2, 35)),
    ]  # fmt: skip


def list_causes() -> list[Case]:
    stage = Truth(
        kind="slow optimizer of a stage", codes=STAGE_CODES, ranks=(1,), phase="optimizer"
    )
    tiny = plain("ddp2", 2, 30, num_layers=24, layer_ms=0.5, options={"fair": True})
    synced = plain(
        "ddp2", 3, 30, num_microbatches=3, layer_ms=2.0, options={"ballast": 400_000, "fair": True}
    )
    many = Truth(kind="small operations", codes=("CO003",))
    return [
        fault("newest pp3 optimizer of stage 1", PP3,
              (stage, Delay(where="optimizer", ranks=(1,), ms=40))),
        contrast("newest tiny buckets 2 x 24", many, tiny, bucket_mb=1e-4),
        contrast("newest no no_sync 3 x 3", cause("no_sync", "no_sync"), synced, sync=True),
    ]  # fmt: skip

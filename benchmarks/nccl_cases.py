"""The faults of `nccl_faults.py`, each with its clean twin and what has to be said of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from nccl_catalog import (
    CHECKPOINTS,
    EVALUATIONS,
    compute,
    fragment,
    leak,
    multiply_again,
    print_loss,
    read_and_log,
    sleep,
)
from nccl_programs import (
    COMPILED,
    SHARED_TP,
    SHORT,
    Fault,
    Moment,
    Program,
    Size,
    Training,
    engine,
    pipelined,
    plain,
    wrap_ddp,
    wrap_fsdp2,
    wrap_tp_fsdp2,
    wrapped,
)

LIGHT = Size(layers=4, width=256, words=1024, batch=48)
"""Few parameters and many tokens: most of the communication can hide behind computing."""
BALANCED = Size(layers=4, width=1024, words=4096, batch=20)
"""The host needs about half as long as the device: a wait costs time, and nothing else does."""
COMPILED_LONG = replace(COMPILED, batch=28)
"""The host keeps up with a margin."""
MANY = Size(layers=12, width=256, words=1024, batch=24)
"""150 parameters."""
DEEP = Size(width=512, words=1024, batch=24)
"""For a pipeline of 12 layers: much computing for what stages send."""
LAUNCHES = Size(layers=4, width=128, words=512, length=64, batch=2)
"""Host-bound, with few layers to compile for its twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the diagnosis has to say."""

    codes: tuple[str, ...]
    """Any of these names the cause; none: healthy, and there is nothing to say."""
    ranks: tuple[int, ...] = ()
    """The culprits; empty: nobody in particular."""
    words: tuple[str, ...] = ()
    """One of these is in the title or the summary; none: no matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault. The twin is the same program without it, or another program."""

    name: str
    clean: Program
    expected: Expected
    faults: tuple[Fault, ...] = ()
    other: Program | None = None
    """The faulty program, where it is built in another way."""
    also: tuple[Expected, ...] = ()
    """Further faults beside the first, each to be named; their prices add up."""
    is_timed: bool = True
    """Whether its cost is time."""
    has_price: bool = True
    """Whether its cost can be told from a recording: not where the twin computes in another way."""
    set_name: str = "first"

    @property
    def is_healthy(self) -> bool:
        return not self.expected.codes

    @property
    def since(self) -> int:
        """The step from which all its faults are there."""
        return max((fault.since for fault in self.faults), default=0)

    @property
    def num_ranks(self) -> int:
        return self.clean.num_ranks

    @property
    def period(self) -> int:
        periods = [fault.every for fault in self.faults]
        return max([1, *periods, self.other.period if self.other is not None else 1])


OWN = ("CO001", "CO002", "PP004")
"""What is true of a clean program whose kernels show as much: exposed communication, which between
stages of a pipeline is slow transfers."""
OWN_COPIES = ("CP006",)
"""Likewise, of copies that nothing runs beside."""

DDP = wrapped("ddp_light", wrap_ddp, size=LIGHT, bucket_mib=4.0)
FSDP2 = wrapped("fsdp2_light", wrap_fsdp2, size=LIGHT)
TP_FSDP2 = wrapped("tp_fsdp2_light", wrap_tp_fsdp2, size=SHARED_TP)
PIPELINE = pipelined("pp4_even", stage_layers=(3, 3, 3, 3), num_microbatches=12, size=DEEP)
ENGINE = engine("engine_222_clean", dp=2, tp=2, pp=2, num_microbatches=4)
ENGINE_DP = engine("engine_dp4_clean", size=LIGHT, dp=4)
SINGLE = plain("single_clean", SHORT)
SINGLE_BALANCED = plain("balanced_clean", BALANCED)


def slow(
    moment: Moment, act: Callable[[Training], None], *ranks: int, every: int = 1
) -> tuple[Fault, ...]:
    return (Fault(moment=moment, act=act, ranks=ranks or None, every=every),)


def name_rank(*ranks: int, words: tuple[str, ...] = ()) -> Expected:
    return Expected(codes=("ST001", "ST002", "ST004"), ranks=ranks, words=words)


def read_often(training: Training) -> None:
    """`.item()` in every layer."""
    torch.ones(1, device=training.place.device).item()


def copy_to_host(training: Training) -> None:
    """All parameters, into pageable memory."""
    training.kept[:] = [p.detach().cpu() for p in training.model.parameters()]


def list_data_parallel() -> list[Case]:
    """DistributedDataParallel on 4 ranks."""
    late = ("PA002", "TI002", "TI004", "ST001", "ST004")
    return [
        Case(
            name="ddp_slow_kernels",
            clean=DDP,
            faults=slow(Moment.IN_FORWARD, compute(15), 2),
            expected=name_rank(2, words=("forward",)),
        ),
        Case(
            name="ddp_slow_host_before_backward",
            clean=DDP,
            faults=slow(Moment.BEFORE_BACKWARD, sleep(40), 2),
            expected=name_rank(2),
        ),
        Case(
            name="ddp_slow_host_in_backward",
            clean=DDP,
            faults=slow(Moment.IN_BACKWARD, sleep(40), 2),
            expected=name_rank(2, words=("backward",)),
        ),
        Case(
            name="ddp_slow_host_after_backward",
            clean=DDP,
            faults=slow(Moment.BEFORE_OPTIMIZER, sleep(40), 2),
            expected=name_rank(2),
        ),
        Case(
            name="ddp_slow_input",
            clean=DDP,
            faults=slow(Moment.FETCH, sleep(50), 2),
            expected=Expected(codes=("IN001",), ranks=(2,)),
        ),
        Case(
            name="ddp_throttled",
            clean=DDP,
            faults=slow(Moment.IN_MATRICES, multiply_again(), 2),
            expected=name_rank(2),
        ),
        Case(
            name="ddp_late_every_7",
            clean=DDP,
            faults=slow(Moment.BEFORE_FORWARD, sleep(150), 2, every=7),
            expected=Expected(codes=late, ranks=(2,)),
        ),
        Case(
            name="ddp_two_slow_ranks",
            clean=DDP,
            faults=slow(Moment.IN_FORWARD, compute(15), 1, 3),
            expected=name_rank(1, 3),
        ),
        Case(
            name="ddp_small_buckets",
            clean=wrapped("ddp_many", wrap_ddp, size=MANY),
            other=wrapped("ddp_small_buckets", wrap_ddp, size=MANY, bucket_mib=0.001),
            expected=Expected(codes=("CO003",)),
        ),
    ]


def list_sharded() -> list[Case]:
    """FSDP2, and tensor parallel with it."""
    return [
        Case(
            name="fsdp2_slow_kernels",
            clean=FSDP2,
            faults=slow(Moment.IN_FORWARD, compute(15), 2),
            expected=name_rank(2, words=("forward",)),
        ),
        Case(
            name="fsdp2_slow_host_in_backward",
            clean=FSDP2,
            faults=slow(Moment.IN_BACKWARD, sleep(40), 1),
            expected=name_rank(1, words=("backward",)),
        ),
        Case(
            name="tp_fsdp2_slow_kernels",
            clean=TP_FSDP2,
            faults=slow(Moment.IN_FORWARD, compute(20), 3),
            expected=name_rank(3, words=("forward",)),
        ),
    ]


def list_pipelines() -> list[Case]:
    few = pipelined("pp4_few", stage_layers=(3, 3, 3, 3), num_microbatches=4, size=DEEP)
    uneven = pipelined("pp4_uneven", stage_layers=(2, 2, 6, 2), num_microbatches=12, size=DEEP)
    return [
        Case(
            name="pp4_uneven",
            clean=PIPELINE,
            other=uneven,
            expected=Expected(codes=("PP002",), ranks=(2,), words=("stage 2",)),
        ),
        Case(
            name="pp4_few_microbatches",
            clean=PIPELINE,
            other=few,
            expected=Expected(codes=("PP001",)),
        ),
        Case(
            name="pp4_slow_stage",
            clean=PIPELINE,
            faults=slow(Moment.IN_FORWARD, compute(3), 1),
            expected=Expected(codes=("PP003", "ST001"), ranks=(1,)),
        ),
    ]


def list_engines() -> list[Case]:
    rank_5 = engine(
        "engine_222_slow",
        dp=2,
        tp=2,
        pp=2,
        num_microbatches=4,
        fault="slow rank=5 phase=forward ms=10",
    )
    rank_2 = engine("engine_dp4_slow", size=LIGHT, dp=4, fault="slow rank=2 phase=backward ms=40")
    return [
        Case(
            name="engine_dp4_slow_rank",
            clean=ENGINE_DP,
            other=rank_2,
            expected=name_rank(2, words=("backward",)),
        ),
        Case(
            name="engine_222_slow_rank",
            clean=ENGINE,
            other=rank_5,
            expected=name_rank(5, words=("forward",)),
        ),
    ]


def list_singles() -> list[Case]:
    """One GPU."""
    synchronises = Expected(codes=("CP005",))
    periodic = ("TI002", "TI004")
    return [
        Case(
            name="one_host_bound",
            clean=plain("launches_graphs", LAUNCHES, compile_mode="reduce-overhead"),
            other=plain("launches", LAUNCHES),
            expected=Expected(codes=("CP004",)),
        ),
        Case(
            name="one_item_each_step",
            clean=SINGLE_BALANCED,
            faults=slow(Moment.AFTER_OPTIMIZER, read_and_log),
            expected=synchronises,
        ),
        Case(
            name="one_item_each_layer",
            clean=SINGLE_BALANCED,
            faults=slow(Moment.IN_MATRICES, read_often),
            expected=synchronises,
        ),
        Case(
            name="one_print_each_step",
            clean=SINGLE_BALANCED,
            faults=slow(Moment.AFTER_OPTIMIZER, print_loss),
            expected=synchronises,
        ),
        Case(
            name="one_copies_each_step",
            clean=SINGLE_BALANCED,
            faults=slow(Moment.AFTER_OPTIMIZER, copy_to_host),
            expected=Expected(codes=("CP005", "CP006")),
        ),
        Case(
            name="one_fragmentation",
            clean=SINGLE_BALANCED,
            faults=slow(Moment.AFTER_OPTIMIZER, fragment),
            expected=Expected(codes=("ME003",), words=("grows",)),
            is_timed=False,
        ),
        Case(
            name="one_recompiles",
            clean=plain("compiled_clean", COMPILED_LONG, compile_mode="default"),
            other=plain("recompiles", COMPILED_LONG, compile_mode="default", new_length_every=15),
            expected=Expected(codes=("CP007", "TI002", "TI004"), words=("ompil",)),
        ),
        Case(
            name="one_checkpoint",
            clean=SINGLE,
            faults=(CHECKPOINTS,),
            expected=Expected(codes=periodic, words=("checkpoint",)),
        ),
        Case(
            name="one_evaluation",
            clean=SINGLE,
            faults=(EVALUATIONS,),
            expected=Expected(codes=periodic, words=("eval",)),
        ),
        Case(
            name="one_slow_loader",
            clean=SINGLE,
            faults=slow(Moment.FETCH, sleep(40)),
            expected=Expected(codes=("IN002", "IN001")),
        ),
        Case(
            name="one_leak",
            clean=SINGLE,
            faults=slow(Moment.AFTER_OPTIMIZER, leak()),
            expected=Expected(codes=("ME001",)),
            is_timed=False,
        ),
    ]


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *list_singles(),
        *list_data_parallel(),
        *list_sharded(),
        *list_pipelines(),
        *list_engines(),
    )
}


def make_faulty(case: Case) -> Program:
    return case.other or replace(case.clean, faults=case.faults)

"""A third part of the fault matrix: written last, on layouts, amounts and pairs no other part has.

Committed before the rules were looked at again, recorded and judged once after the last change to
them. Words for truths are those of `fault_cases_trials`. New kinds: a phase of the program's own
name, three faults at once, a slow link beside a slow rank, collections on all ranks together, half
of a group slow, real matrix products beside a sleeping rank.
"""

from dataclasses import replace

from benchmarks.fault_cases_engine import changed, list_stage_ranks
from benchmarks.fault_cases_trials import (
    CHANGING_CODES,
    NEVER,
    SLOW_CODES,
    STAGE_CODES,
    all_at,
    at,
    cause,
    changing,
    contrast,
    fault,
    one,
    plain,
)
from tests.distributed.fault_cases import healthy, timed, with_faults, with_link
from tests.distributed.fault_matrix import Case, Link, Scripted, Trained
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout

DDP4 = plain("ddp2", 4, 50, num_layers=3, layer_ms=5.0)
DDP6 = plain("ddp2", 6, 48, num_layers=3, layer_ms=5.0)
DDP8 = plain("ddp2", 8, 40, num_layers=2, layer_ms=10.0)
FSDP2 = plain("fsdp2", 2, 50, num_layers=3, layer_ms=5.0)
FSDP5 = plain("fsdp2", 5, 42, num_layers=2, layer_ms=9.0)
TP4 = plain("dtensor", 4, 42, layout=Layout(tp=4), num_layers=1, layer_ms=18.0)
TP2 = plain("dtensor", 2, 42, layout=Layout(tp=2), num_layers=3, layer_ms=6.0)
TP32 = plain("dtensor", 6, 32, layout=Layout(dp=3, tp=2), num_layers=1, layer_ms=18.0)
CP2 = plain("exchanging", 2, 50, layout=Layout(cp=2), layer_ms=4.0)
CP6 = plain("exchanging", 6, 42, layout=Layout(cp=6), num_layers=3, layer_ms=6.0)
DP3CP2 = plain("exchanging", 6, 42, layout=Layout(dp=3, cp=2), num_layers=3, layer_ms=6.0)
DP4EP2 = plain("exchanging", 8, 36, layout=Layout(dp=4, ep=2), num_layers=2, layer_ms=9.0)
PP2 = plain(
    "pipelining", 2, 30, layout=Layout(pp=2), num_layers=2, layer_ms=3.0,
    options={"microbatches": 10},
)  # fmt: skip
DP3PP2 = plain(
    "pipelining", 6, 26, layout=Layout(dp=3, pp=2), num_layers=2, layer_ms=3.0,
    options={"microbatches": 8},
)  # fmt: skip
REAL = plain("ddp2", 2, 40, options={"width": 384, "rows": 192, "threads": 1})
"""Real products; `threads` also leaves the ranks without real-time priority."""
ENGINE_TRIO = timed(dp=3, pp=2, microbatches=8, layer_ms=1.2, num_steps=26)
ENGINE_TWIST = timed(tp=2, pp=3, microbatches=12, num_layers=3, layer_ms=1.5, num_steps=22)
ENGINE_PLANE = timed(dp=3, tp=2, data_parallel="ddp", num_layers=2, layer_ms=5.0, num_steps=36)
ENGINE_FSDP = timed(dp=6, data_parallel="fsdp", num_layers=2, layer_ms=5.0, num_steps=32)
ENGINE_ZB = timed(pp=3, microbatches=12, num_layers=3, layer_ms=1.5, num_steps=22, schedule="zb_h1")


def list_fresh() -> list[Case]:
    return [
        *list_places(),
        *list_own_phases(),
        *list_everyone(),
        *list_changes(),
        *list_several(),
        *list_pipelines(),
        *list_causes(),
        *list_engine(),
        *list_links(),
        *list_healthy(),
    ]


def list_places() -> list[Case]:
    places: tuple[tuple[str, Program, str, int, float], ...] = (
        ("ddp6", DDP6, "backward", 4, 22), ("ddp6", DDP6, "between", 2, 50),
        ("ddp6", DDP6, "saving", 5, 60), ("ddp8", DDP8, "data", 3, 60),
        ("fsdp2", FSDP2, "between", 1, 25), ("fsdp2", FSDP2, "backward", 0, 45),
        ("fsdp5", FSDP5, "optimizer", 4, 50), ("fsdp5", FSDP5, "data", 1, 28),
        ("tp4", TP4, "backward", 1, 40), ("tp4", TP4, "between", 2, 28),
        ("tp2", TP2, "forward", 0, 22), ("tp32", TP32, "forward", 3, 50),
        ("tp32", TP32, "between", 4, 30), ("cp2", CP2, "between", 1, 25),
        ("cp6", CP6, "backward", 5, 40), ("cp6", CP6, "data", 0, 55),
        ("dp3cp2", DP3CP2, "forward", 4, 28), ("dp3cp2", DP3CP2, "optimizer", 1, 45),
        ("dp4ep2", DP4EP2, "forward", 6, 45), ("dp4ep2", DP4EP2, "between", 3, 32),
        ("real", REAL, "between", 0, 40), ("real", REAL, "forward", 1, 30),
    )  # fmt: skip
    return [
        fault(f"fresh {name} {where} r{rank}", program, one(where, rank, ms))
        for name, program, where, rank, ms in places
    ]


def list_own_phases() -> list[Case]:
    """What a rank, or all, do between steps in a phase of the program's own name."""
    found = []
    for name, program, aside, ranks, ms in (
        ("ddp6", DDP6, "metrics", (0,), 32), ("fsdp5", FSDP5, "sampling", (2,), 40),
        ("tp4", TP4, "metrics", (1,), 26), ("ddp4", DDP4, "sampling", None, 30),
    ):  # fmt: skip
        truth = Truth(
            kind="phase of its own", codes=("TI005", "ST001", "LT001", "TI002"), says=(aside,),
            ranks=ranks or tuple(range(program.num_ranks)), is_everyone=ranks is None,
        )  # fmt: skip
        clean = replace(program, options={**program.options, "aside": aside})
        delay = Delay(where="logging", ranks=ranks, ms=ms)
        found.append(fault(f"fresh {name} {aside} {ranks or 'all'}", clean, (truth, delay)))
    return found


def list_everyone() -> list[Case]:
    found = []
    for name, program, where, ms, every in (
        ("ddp6", DDP6, "between", 26, 1), ("cp6", CP6, "saving", 35, 1),
        ("fsdp5", FSDP5, "evaluation", 110, 5), ("tp32", TP32, "data", 40, 1),
        ("dp4ep2", DP4EP2, "logging", 28, 1),
    ):  # fmt: skip
        truth = replace(all_at(where, program.num_ranks), every=every)
        delay = Delay(where=where, ms=ms, every=every)
        found.append(fault(f"fresh {name} all {where} {every}", program, (truth, delay)))
    truth = Truth(kind="gc", codes=("PA001",), ranks=(0, 1), is_everyone=True, every=5)
    delay = Delay(where="gc_between", every=5)
    case = fault("fresh fsdp2 all gc 5", FSDP2, (truth, delay))
    clean = Scripted(program=replace(FSDP2, delays=(replace(delay, first=NEVER),)))
    return [*found, replace(case, clean=clean)]


def list_changes() -> list[Case]:
    found = []
    for name, program, where, rank, ms, shape, first in (
        ("ddp6", DDP6, "optimizer", 1, 55, "drift", 0),
        ("ddp6", DDP6, "between", 4, 70, "swing", 0),
        ("fsdp5", FSDP5, "backward", 3, 60, "drift", 0),
        ("cp6", CP6, "forward", 2, 50, "steady", 25),
        ("tp4", TP4, "data", 0, 60, "bursts", 0),
        ("ddp4", DDP4, "between", 3, 60, "bursts", 0),
        ("dp4ep2", DP4EP2, "backward", 7, 55, "steady", 12),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first)
        name = f"fresh {name} {where} r{rank} {shape}"
        found.append(fault(name, program, (changing(where, rank), delay)))
    for name, program, where, rank, ms, every in (
        ("ddp6", DDP6, "forward", 2, 90, 3), ("fsdp5", FSDP5, "data", 4, 160, 7),
        ("ddp8", DDP8, "evaluation", 6, 140, 4),
    ):  # fmt: skip
        usual = at(where, rank)
        codes = (*usual.codes, *CHANGING_CODES, "TI002")
        truth = replace(usual, codes=usual.codes if usual.says else codes, every=every, phase=None)
        delay = Delay(where=where, ranks=(rank,), ms=ms, every=every)
        found.append(fault(f"fresh {name} {where} r{rank} every {every}", program, (truth, delay)))
    return found


def list_several() -> list[Case]:
    several: tuple[tuple[str, Program, tuple[tuple[str, int, float], ...]], ...] = (
        ("ddp6", DDP6, (("data", 0, 45), ("optimizer", 4, 30))),
        ("ddp6", DDP6, (("forward", 1, 45), ("backward", 3, 45), ("between", 5, 45))),
        ("fsdp5", FSDP5, (("forward", 2, 50), ("logging", 0, 50))),
        ("fsdp2", FSDP2, (("between", 0, 35), ("data", 1, 35))),
        ("tp4", TP4, (("backward", 0, 40), ("data", 2, 40))),
        ("dp3cp2", DP3CP2, (("forward", 0, 40), ("optimizer", 5, 40))),
        ("ddp4", DDP4, (("saving", 1, 45), ("logging", 2, 45))),
    )
    found = [
        fault(
            f"fresh {name} {' and '.join(f'{where} r{rank}' for where, rank, _ in parts)}",
            program,
            *(one(*part) for part in parts),
        )
        for name, program, parts in several
    ]
    for name, program, where, ranks, ms in (
        ("ddp6", DDP6, "backward", (1, 4), 35), ("ddp8", DDP8, "forward", (1, 2, 5, 6), 45),
        ("fsdp5", FSDP5, "between", (0, 3), 40),
    ):  # fmt: skip
        part = (at(where, *ranks, may_split=True), Delay(where=where, ranks=ranks, ms=ms))
        found.append(fault(f"fresh {name} {where} of {ranks}", program, part))
    return found


def list_pipelines() -> list[Case]:
    found = []
    for name, program, where, stage, ms in (
        ("pp2", PP2, "backward", 1, 6), ("dp3pp2", DP3PP2, "forward", 0, 5),
    ):  # fmt: skip
        ranks = list_ranks_of_stage(program, stage)
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks)
        part = (truth, Delay(where=where, ranks=ranks, ms=ms))
        found.append(fault(f"fresh {name} stage {where} {ranks}", program, part))
    return [
        *found,
        fault("fresh pp2 between r0", PP2, one("between", 0, 45)),
        fault("fresh dp3pp2 backward r4", DP3PP2, one("backward", 4, 7)),
        fault("fresh dp3pp2 data r2", DP3PP2, one("data", 2, 50)),
    ]


def list_ranks_of_stage(program: Program, stage: int) -> tuple[int, ...]:
    layout = program.layout
    assert layout is not None
    return tuple(r for r in range(program.num_ranks) if layout.coordinates(r).pp == stage)


def list_causes() -> list[Case]:
    many = Truth(kind="small operations", codes=("CO003",))
    summed = plain("summed", 3, 30, num_layers=36, layer_ms=0.3, options={"flat": True})
    tiny = plain("ddp2", 3, 30, num_layers=32, layer_ms=0.3, options={"fair": True})
    synced = plain(
        "ddp2", 2, 30, num_microbatches=6, layer_ms=1.0, options={"ballast": 600_000, "fair": True}
    )
    unused = plain("ddp2", 2, 34, layer_ms=2.0, options={"fair": True})
    starved = plain("ddp2", 3, 44, options={"workers": 1})
    batches = plain("ddp2", 6, 44, options={"rows_of_rank": {}})
    lengths = plain("fsdp2", 3, 60, options={"lengths": 0})
    threads = plain("ddp2", 2, 24, options={"width": 448, "rows": 224, "threads": 1})
    nan = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(4,), first_step=16)
    return [
        contrast("fresh summed 3 x 36", many, summed, flat=False),
        contrast("fresh tiny buckets 3 x 32", many, tiny, bucket_mb=1e-4),
        contrast("fresh no no_sync 2 x 6", cause("no_sync", "no_sync"), synced, sync=True),
        contrast("fresh unused 2", cause("unused parameters", "unused"), unused, unused=9_000_000),
        contrast("fresh threads 2 x 12", cause("threads", "thread"), threads, threads=12),
        contrast(
            "fresh ddp6 batch of r1 is 10", cause("uneven batches", "batch", ranks=(1,)), batches,
            rows_of_rank={1: 10},
        ),
        contrast(
            "fresh fsdp3 random lengths",
            Truth(kind="uneven lengths", codes=("IM001",), is_uneven=True), lengths, lengths=11,
        ),
        fault(
            "fresh starved 3 (0,)", starved,
            (replace(at("data", 0), kind="starved loader"),
             Delay(where="data", ranks=(0,), ms=70)),
        ),
        fault(
            "fresh ddp6 nan_batch r4", DDP6,
            (nan, Delay(where="nan_batch", ranks=(4,), first=16, last=16)), is_timed=False,
        ),
    ]  # fmt: skip


def list_engine() -> list[Case]:
    found = []
    for name, config, where, rank, ms in (
        ("trio", ENGINE_TRIO, "forward", 4, 6), ("trio", ENGINE_TRIO, "data", 1, 50),
        ("plane", ENGINE_PLANE, "backward", 5, 35), ("plane", ENGINE_PLANE, "optimizer", 0, 30),
        ("fsdp6", ENGINE_FSDP, "forward", 2, 45),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        text = f"{kind} rank={rank} ms={ms}"
        found.append(with_faults(f"fresh {name} {where} r{rank}", at(where, rank), config, text))
    for name, config, stage, where, ms in (
        ("twist", ENGINE_TWIST, 1, "backward", 5), ("zb", ENGINE_ZB, 0, "forward", 6),
        ("twist", ENGINE_TWIST, 0, "optimizer", 45),
    ):  # fmt: skip
        truth = Truth(
            kind="slow optimizer of a stage" if where == "optimizer" else "slow stage",
            codes=STAGE_CODES, ranks=list_stage_ranks(config, stage),
            phase="optimizer" if where == "optimizer" else None, may_split=True,
        )  # fmt: skip
        text = f"slow pp={stage} phase={where} ms={ms}"
        found.append(with_faults(f"fresh {name} stage {stage} {where}", truth, config, text))
    onset = changed(at("backward", 3), is_uneven=True)
    found.append(
        with_faults(
            "fresh plane backward r3 in 18-", onset, ENGINE_PLANE,
            "slow rank=3 phase=backward ms=50 steps=18-",
        )
    )  # fmt: skip
    return found


def list_links() -> list[Case]:
    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    slow = Delay(where="forward", ranks=(1,), ms=50)
    both = Case(
        name="fresh cp6 all of cp and forward r1", truth=link("cp"),
        also=(at("forward", 1, codes=SLOW_CODES),),
        faulty=Scripted(program=replace(CP6, delays=(slow,)), link=Link(axis="cp", ms=8)),
        clean=Scripted(program=CP6),
    )  # fmt: skip
    return [
        with_link(
            "fresh dp3cp2 link 4-5", link("cp", 4, 5), Scripted(program=DP3CP2),
            Link(axis="cp", ms=9, pair=(4, 5)),
        ),
        # The timed model has no operations along tp: a slow link that nothing uses costs nothing.
        healthy("fresh plane all of tp", Trained(config=ENGINE_PLANE, link=Link(axis="tp", ms=10))),
        both,
    ]  # fmt: skip


def list_healthy() -> list[Case]:
    """Near misses: 2 % of a step or less, or nothing that could be saved."""

    def with_delay(program: Program, **values: object) -> Scripted:
        return Scripted(program=replace(program, delays=(Delay(**values),)))  # type: ignore[arg-type]

    others = tuple(rank for rank in range(6) if rank != 4)
    return [
        healthy("fresh near miss ddp6 between",
                with_delay(DDP6, where="between", ranks=(3,), ms=0.3)),
        healthy("fresh near miss fsdp5 optimizer",
                with_delay(FSDP5, where="optimizer", ranks=(1,), ms=0.3)),
        healthy("fresh near miss cp6 saving",
                with_delay(CP6, where="saving", ranks=(2,), ms=4, every=20)),
        healthy("fresh near miss tp4 all backward", with_delay(TP4, where="backward", ms=15)),
        healthy("fresh near miss ddp6 drift",
                with_delay(DDP6, where="backward", ranks=(0,), ms=1, shape="drift")),
        healthy("fresh ddp6 fast r4 forward",
                with_delay(DDP6, where="forward", ranks=others, ms=18)),
        healthy("fresh fsdp2 evaluates once",
                with_delay(FSDP2, where="evaluation", ms=0, every=60)),
        healthy("fresh engine trio", Trained(config=replace(ENGINE_TRIO, num_steps=30))),
        healthy("fresh engine zb", Trained(config=replace(ENGINE_ZB, num_steps=26))),
        healthy("fresh real", Scripted(program=replace(REAL, num_steps=50))),
    ]  # fmt: skip

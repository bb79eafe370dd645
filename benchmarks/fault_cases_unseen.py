"""A fifth part of the fault matrix: committed before any rule was touched again, judged once.

Programs, layouts, amounts and pairs that no earlier part has. New programs: DDP with a hook that
compresses, FSDP2 in pairs of ranks that are copies, parameters averaged after the optimizer,
torch's looped pipelines, ranks that meet at a barrier after what one of them does between steps.
New faults: a core kept busy instead of a sleep, accumulation beside a slow rank, four at once.
Words for truths are those of `fault_cases_trials`.
"""

from dataclasses import replace

from benchmarks.fault_cases_engine import changed, list_stage_ranks
from benchmarks.fault_cases_fresh import list_ranks_of_stage
from benchmarks.fault_cases_trials import (
    CHANGING_CODES,
    NEVER,
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
from tests.distributed.fault_cases import SMALL, engine, healthy, timed, with_faults, with_link
from tests.distributed.fault_matrix import Case, Link, Scripted, Trained
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout

DDP2 = plain("ddp2", 2, 44, num_layers=5, layer_ms=4.0)
DDP3 = plain("ddp2", 3, 46, num_layers=2, layer_ms=12.0)
DDP5 = plain("ddp2", 5, 44, num_layers=3, layer_ms=7.0)
DDP7 = plain("ddp2", 7, 40, num_layers=2, layer_ms=9.0)
MET4 = plain("ddp2", 4, 44, num_layers=3, layer_ms=5.5, options={"barrier": True})
"""Ranks meet after each step, as many programs do around what rank 0 does alone."""
HOOKED3 = plain("hooked", 3, 44, num_layers=3, layer_ms=6.5)
AVERAGED4 = plain("averaged", 4, 44, num_layers=3, layer_ms=6.0)
GATHERED3 = plain("ddp2", 3, 36, num_layers=2, layer_ms=4.0, num_microbatches=3)
FSDP4 = plain("fsdp2", 4, 42, num_layers=2, layer_ms=11.0)
FSDP6 = plain("fsdp2", 6, 40, num_layers=2, layer_ms=9.0)
HSDP4 = plain("hsdp", 4, 42, num_layers=2, layer_ms=9.0)
HSDP6 = plain("hsdp", 6, 36, num_layers=2, layer_ms=9.0)
TP42 = plain("dtensor", 8, 30, layout=Layout(dp=4, tp=2), num_layers=1, layer_ms=22.0)
TP22 = plain("dtensor", 4, 38, layout=Layout(dp=2, tp=2), num_layers=1, layer_ms=17.0)
TP8 = plain("dtensor", 8, 30, layout=Layout(tp=8), num_layers=1, layer_ms=24.0)
CP8 = plain("exchanging", 8, 36, layout=Layout(cp=8), num_layers=2, layer_ms=10.0)
DP2CP3 = plain("exchanging", 6, 40, layout=Layout(dp=2, cp=3), num_layers=2, layer_ms=8.0)
EP2 = plain("exchanging", 2, 44, layout=Layout(ep=2), num_layers=3, layer_ms=6.0)
PP5 = plain(
    "pipelining", 5, 24, layout=Layout(pp=5), num_layers=5, layer_ms=2.5,
    options={"microbatches": 20},
)  # fmt: skip
DP2PP3 = plain(
    "pipelining", 6, 24, layout=Layout(dp=2, pp=3), num_layers=3, layer_ms=2.5,
    options={"microbatches": 12},
)  # fmt: skip
BREADTH = plain(
    "pipelining", 2, 26, layout=Layout(pp=2), num_layers=4, layer_ms=2.5,
    options={"schedule": "ScheduleLoopedBFS", "chunks": 2, "microbatches": 8},
)  # fmt: skip
ENGINE_CUBE = timed(dp=2, tp=2, pp=2, microbatches=6, num_layers=2, layer_ms=3.0, num_steps=24)
ENGINE_QUAD = timed(dp=4, pp=2, microbatches=8, num_layers=2, layer_ms=2.0, num_steps=24)
ENGINE_FIVE = timed(pp=5, microbatches=15, num_layers=5, layer_ms=1.5, num_steps=20)
ENGINE_TP = timed(tp=4, num_layers=2, layer_ms=6.0, num_steps=36)
ENGINE_SEVEN = timed(dp=7, data_parallel="ddp", num_layers=2, layer_ms=5.0, num_steps=36)
ENGINE_LOOP = timed(
    dp=2, pp=2, microbatches=8, num_layers=4, layer_ms=1.5, num_steps=24,
    schedule="interleaved_1f1b",
)  # fmt: skip
ENGINE_MODEL = engine(
    replace(SMALL, num_layers=5, hidden_size=80, ffn_hidden_size=160), dp=2,
    data_parallel="fsdp", microbatch_size=4, num_steps=36,
)  # fmt: skip


def list_unseen() -> list[Case]:
    return [
        *list_places(),
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
        ("ddp2", DDP2, "optimizer", 1, 28), ("ddp3", DDP3, "backward", 2, 33),
        ("ddp5", DDP5, "between", 3, 42), ("ddp7", DDP7, "data", 5, 38),
        ("met4", MET4, "evaluation", 0, 36), ("met4", MET4, "between", 1, 30),
        ("hooked3", HOOKED3, "forward", 1, 36), ("averaged4", AVERAGED4, "forward", 2, 44),
        ("averaged4", AVERAGED4, "optimizer", 1, 32), ("gathered3", GATHERED3, "forward", 0, 12),
        ("fsdp6", FSDP6, "saving", 0, 55), ("fsdp4", FSDP4, "backward", 3, 26),
        ("hsdp4", HSDP4, "forward", 1, 38), ("hsdp6", HSDP6, "data", 4, 46),
        ("tp42", TP42, "backward", 6, 48), ("tp22", TP22, "data", 3, 34),
        ("tp8", TP8, "forward", 5, 42), ("cp8", CP8, "between", 7, 36),
        ("dp2cp3", DP2CP3, "backward", 4, 34), ("ep2", EP2, "optimizer", 0, 30),
    )  # fmt: skip
    found = [
        fault(f"unseen {name} {where} r{rank}", program, one(where, rank, ms))
        for name, program, where, rank, ms in places
    ]
    for name, program, where, rank, ms in (
        ("ddp2", DDP2, "forward", 0, 26), ("fsdp4", FSDP4, "between", 2, 34),
    ):  # fmt: skip
        part = one(where, rank, ms, burns=True)
        found.append(fault(f"unseen {name} burns {where} r{rank}", program, part))
    return found


def list_everyone() -> list[Case]:
    found = []
    for name, program, where, ms, every in (
        ("ddp3", DDP3, "between", 31, 1), ("hsdp4", HSDP4, "data", 33, 1),
        ("ddp7", DDP7, "saving", 140, 5), ("averaged4", AVERAGED4, "evaluation", 130, 4),
    ):  # fmt: skip
        truth = replace(all_at(where, program.num_ranks), every=every)
        delay = Delay(where=where, ms=ms, every=every)
        found.append(fault(f"unseen {name} all {where} {every}", program, (truth, delay)))
    for name, program, where, ranks, every in (
        ("ddp3", DDP3, "gc_between", None, 4), ("fsdp4", FSDP4, "gc", (2,), 3),
    ):  # fmt: skip
        truth = Truth(
            kind="gc", codes=("PA001",), ranks=ranks or tuple(range(program.num_ranks)),
            is_everyone=ranks is None, every=every,
        )  # fmt: skip
        delay = Delay(where=where, ranks=ranks, every=every)
        case = fault(f"unseen {name} {where} {ranks or 'all'} {every}", program, (truth, delay))
        clean = Scripted(program=replace(program, delays=(replace(delay, first=NEVER),)))
        found.append(replace(case, clean=clean))
    return found


def list_changes() -> list[Case]:
    found = []
    for name, program, where, rank, ms, shape, first in (
        ("ddp5", DDP5, "backward", 1, 65, "drift", 0),
        ("fsdp6", FSDP6, "forward", 4, 58, "bursts", 0),
        ("hsdp4", HSDP4, "between", 0, 55, "drift", 0),
        ("tp22", TP22, "forward", 2, 52, "steady", 16),
        ("ddp3", DDP3, "data", 0, 64, "swing", 0),
        ("averaged4", AVERAGED4, "backward", 3, 48, "steady", 22),
        ("ddp2", DDP2, "between", 1, 62, "bursts", 0),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first)
        name = f"unseen {name} {where} r{rank} {shape} {first}"
        found.append(fault(name, program, (changing(where, rank), delay)))
    for name, program, where, rank, ms, every in (
        ("ddp5", DDP5, "optimizer", 2, 110, 4), ("met4", MET4, "saving", 0, 170, 5),
    ):  # fmt: skip
        usual = at(where, rank)
        codes = (*usual.codes, *CHANGING_CODES, "TI002")
        truth = replace(usual, codes=usual.codes if usual.says else codes, every=every, phase=None)
        delay = Delay(where=where, ranks=(rank,), ms=ms, every=every)
        found.append(fault(f"unseen {name} {where} r{rank} every {every}", program, (truth, delay)))
    return found


def list_several() -> list[Case]:
    several: tuple[tuple[str, Program, tuple[tuple[str, int, float], ...]], ...] = (
        ("ddp5", DDP5, (("forward", 0, 38), ("saving", 3, 38))),
        ("ddp7", DDP7, (("data", 1, 50), ("backward", 2, 50), ("optimizer", 4, 50),
                        ("between", 6, 50))),
        ("hsdp6", HSDP6, (("forward", 1, 44), ("between", 4, 44))),
        ("averaged4", AVERAGED4, (("data", 0, 36), ("backward", 2, 36))),
        ("tp42", TP42, (("optimizer", 1, 46), ("forward", 6, 46))),
        ("hooked3", HOOKED3, (("between", 0, 30), ("optimizer", 2, 40))),
        ("ep2", EP2, (("forward", 0, 34), ("logging", 1, 34))),
    )  # fmt: skip
    found = [
        fault(
            f"unseen {name} {' and '.join(f'{where} r{rank}' for where, rank, _ in parts)}",
            program,
            *(one(*part) for part in parts),
        )
        for name, program, parts in several
    ]
    for name, program, where, ranks, ms in (
        ("ddp5", DDP5, "data", (0, 4), 40), ("cp8", CP8, "forward", (1, 3, 6), 40),
    ):  # fmt: skip
        part = (at(where, *ranks, may_split=True), Delay(where=where, ranks=ranks, ms=ms))
        found.append(fault(f"unseen {name} {where} of {ranks}", program, part))
    return found


def list_pipelines() -> list[Case]:
    found = []
    for name, program, where, stage, ms in (
        ("pp5", PP5, "backward", 3, 5), ("dp2pp3", DP2PP3, "forward", 1, 5),
        ("breadth", BREADTH, "backward", 0, 5),
    ):  # fmt: skip
        ranks = list_ranks_of_stage(program, stage)
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks)
        part = (truth, Delay(where=where, ranks=ranks, ms=ms))
        found.append(fault(f"unseen {name} stage {where} {ranks}", program, part))
    optimizer = Truth(
        kind="slow optimizer of a stage", codes=STAGE_CODES, ranks=(4,), phase="optimizer"
    )
    return [
        *found,
        fault("unseen pp5 optimizer of stage 4", PP5,
              (optimizer, Delay(where="optimizer", ranks=(4,), ms=45))),
        fault("unseen pp5 saving r2", PP5, one("saving", 2, 50)),
        fault("unseen dp2pp3 forward r5", DP2PP3, one("forward", 5, 8)),
    ]  # fmt: skip


def list_causes() -> list[Case]:
    many = Truth(kind="small operations", codes=("CO003",))
    summed = plain("summed", 5, 28, num_layers=24, layer_ms=0.4, options={"flat": True})
    synced = plain(
        "ddp2", 2, 30, num_microbatches=5, layer_ms=1.5, options={"ballast": 300_000, "fair": True}
    )
    unused = plain("ddp2", 2, 34, num_layers=3, layer_ms=4.0, options={"fair": True})
    starved = plain("ddp2", 2, 44, num_layers=3, layer_ms=6.0, options={"workers": 2})
    batches = plain("hooked", 3, 44, options={"rows_of_rank": {}})
    lengths = plain("ddp2", 3, 60, num_layers=3, layer_ms=6.0, options={"lengths": 0})
    nan = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(2,), first_step=13)
    return [
        contrast("unseen summed 5 x 24", many, summed, flat=False),
        contrast("unseen no no_sync 2 x 5", cause("no_sync", "no_sync"), synced, sync=True),
        contrast("unseen unused 2", cause("unused parameters", "unused"), unused, unused=5_000_000),
        contrast(
            "unseen hooked3 batch of r2 is 9", cause("uneven batches", "batch", ranks=(2,)),
            batches, rows_of_rank={2: 9},
        ),
        contrast(
            "unseen ddp3 random lengths",
            Truth(kind="uneven lengths", codes=("IM001",), is_uneven=True), lengths, lengths=23,
        ),
        fault(
            "unseen starved 2 all", starved,
            (replace(all_at("data", 2), kind="starved loader"), Delay(where="data", ms=130)),
        ),
        fault(
            "unseen averaged4 nan_batch r2", AVERAGED4,
            (nan, Delay(where="nan_batch", ranks=(2,), first=13, last=13)), is_timed=False,
        ),
    ]  # fmt: skip


def list_engine() -> list[Case]:
    found = []
    for name, config, where, rank, ms in (
        ("cube", ENGINE_CUBE, "forward", 5, 8), ("cube", ENGINE_CUBE, "optimizer", 2, 42),
        ("quad", ENGINE_QUAD, "backward", 6, 7), ("quad", ENGINE_QUAD, "data", 3, 44),
        ("tp", ENGINE_TP, "forward", 3, 34), ("seven", ENGINE_SEVEN, "optimizer", 6, 36),
        ("loop", ENGINE_LOOP, "forward", 2, 5), ("model", ENGINE_MODEL, "backward", 0, 45),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        text = f"{kind} rank={rank} ms={ms}"
        found.append(with_faults(f"unseen {name} {where} r{rank}", at(where, rank), config, text))
    for name, config, stage, where, ms in (
        ("five", ENGINE_FIVE, 2, "forward", 5), ("cube", ENGINE_CUBE, 0, "backward", 7),
        ("five", ENGINE_FIVE, 4, "optimizer", 40),
    ):  # fmt: skip
        truth = Truth(
            kind="slow optimizer of a stage" if where == "optimizer" else "slow stage",
            codes=STAGE_CODES, ranks=list_stage_ranks(config, stage),
            phase="optimizer" if where == "optimizer" else None, may_split=True,
        )  # fmt: skip
        text = f"slow pp={stage} phase={where} ms={ms}"
        found.append(with_faults(f"unseen {name} stage {stage} {where}", truth, config, text))
    late = changed(at("forward", 4), is_uneven=True)
    pair = with_faults(
        "unseen seven data r1 and backward r5", at("data", 1), ENGINE_SEVEN,
        "stalled_loader rank=1 ms=42", "slow phase=backward rank=5 ms=42",
    )  # fmt: skip
    return [
        *found,
        with_faults("unseen seven forward r4 in 14-", late, ENGINE_SEVEN,
                    "slow rank=4 phase=forward ms=52 steps=14-"),
        replace(pair, also=(at("backward", 5),)),
    ]  # fmt: skip


def list_links() -> list[Case]:
    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    return [
        with_link(
            "unseen dp2cp3 group of 3-5", link("cp", 3, 4, 5), Scripted(program=DP2CP3),
            Link(axis="cp", ms=9, pair=(3, 4, 5)),
        ),
        with_link("unseen five link 2-3", link("pp", 2, 3), Trained(config=ENGINE_FIVE),
                  Link(axis="pp", ms=7, pair=(2, 3))),
        with_link("unseen ep2 all of ep", link("ep"), Scripted(program=EP2),
                  Link(axis="ep", ms=7)),
    ]  # fmt: skip


def list_healthy() -> list[Case]:
    """Near misses: 2 % of a step or less, or nothing that could be saved."""

    def with_delay(program: Program, **values: object) -> Scripted:
        return Scripted(program=replace(program, delays=(Delay(**values),)))  # type: ignore[arg-type]

    others = tuple(rank for rank in range(5) if rank != 2)
    return [
        healthy("unseen near miss met4 logging",
                with_delay(MET4, where="logging", ranks=(0,), ms=0.4)),
        healthy("unseen near miss hsdp4 between",
                with_delay(HSDP4, where="between", ranks=(2,), ms=0.4)),
        healthy("unseen near miss averaged4 saving",
                with_delay(AVERAGED4, where="saving", ranks=(1,), ms=4, every=22)),
        healthy("unseen near miss ddp5 all optimizer",
                with_delay(DDP5, where="optimizer", ms=16)),
        healthy("unseen near miss ddp3 drift",
                with_delay(DDP3, where="forward", ranks=(1,), ms=1, shape="drift")),
        healthy("unseen near miss ddp7 one pause",
                with_delay(DDP7, where="backward", ranks=(3,), ms=22, first=25, last=25)),
        healthy("unseen ddp5 fast r2 backward",
                with_delay(DDP5, where="backward", ranks=others, ms=14)),
        healthy("unseen near miss tp22 burns",
                with_delay(TP22, where="forward", ranks=(1,), ms=0.4, burns=True)),
        healthy("unseen engine loop", Trained(config=replace(ENGINE_LOOP, num_steps=30))),
        healthy("unseen gathered", Scripted(program=replace(GATHERED3, num_steps=44))),
    ]  # fmt: skip

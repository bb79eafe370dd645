"""A seventh part of the fault matrix: committed before any rule was touched again, judged once.

Programs (`last_programs`), layouts, amounts, places, phases and pairs that no earlier part has.
Only programs of two ranks with one thread each really compute, so that ranks that compute do not
outnumber cores. New: a teacher that is slow, a sharded optimizer, FSDP2 that keeps what it
gathered, a ring of messages, phases that the program marks, a rank slow in all three phases. Words
for truths are those of `fault_cases_trials`.

One case could not run and was replaced before anything was judged: rank 0 of FSDP2 evaluated alone,
which waits for ever for the others' parameters.
"""

from dataclasses import replace
from typing import Any

from benchmarks.fault_cases_engine import changed, list_stage_ranks
from benchmarks.fault_cases_fresh import list_ranks_of_stage
from benchmarks.fault_cases_trials import (
    CHANGING_CODES,
    NEVER,
    SLOW_CODES,
    STAGE_CODES,
    Part,
    all_at,
    at,
    cause,
    changing,
    one,
    plain,
)
from benchmarks.last_programs import Last
from tests.distributed.fault_cases import SMALL, engine, healthy, timed, with_faults, with_link
from tests.distributed.fault_matrix import Case, Link, Trained
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout

STUDENT2 = plain("student", 2, 46, num_layers=2, layer_ms=6.0, options={"teacher": 5.0})
STUDENT5 = plain("student", 5, 42, num_layers=2, layer_ms=9.0, options={"teacher": 6.0})
STUDENT8 = plain("student", 8, 38, num_layers=1, layer_ms=19.0, options={"teacher": 9.0})
ZERO3 = plain("zero", 3, 44, num_layers=3, layer_ms=6.5)
ZERO4 = plain("zero", 4, 42, num_layers=2, layer_ms=10.0, options={"barrier": True})
ZERO6 = plain("zero", 6, 40, num_layers=2, layer_ms=11.0)
KEPT2 = plain("kept", 2, 40, num_layers=2, layer_ms=4.5, num_microbatches=2)
KEPT3 = plain("kept", 3, 42, num_layers=4, layer_ms=5.0)
KEPT4 = plain("kept", 4, 36, num_layers=2, layer_ms=6.0, num_microbatches=2)
KEPT7 = plain("kept", 7, 36, num_layers=2, layer_ms=12.0)
COLUMNS2 = plain("columns", 2, 44, layout=Layout(tp=2), num_layers=2, layer_ms=8.0)
COLUMNS22 = plain("columns", 4, 40, layout=Layout(dp=2, tp=2), num_layers=1, layer_ms=19.0)
COLUMNS32 = plain("columns", 6, 34, layout=Layout(dp=3, tp=2), num_layers=1, layer_ms=21.0)
RING3 = plain("ring", 3, 42, layout=Layout(cp=3), num_layers=2, layer_ms=9.0)
RING5 = plain("ring", 5, 38, layout=Layout(cp=5), num_layers=1, layer_ms=20.0)
RING22 = plain("ring", 4, 40, layout=Layout(dp=2, cp=2), num_layers=2, layer_ms=9.0)
MARKED2 = plain("marked", 2, 46, num_layers=2, layer_ms=7.0)
MARKED4 = plain("marked", 4, 44, num_layers=2, layer_ms=9.0, data_ms=1.0)
MARKED6 = plain("marked", 6, 42, num_layers=2, layer_ms=10.0)
RECURRENT = plain("recurrent", 2, 44, num_layers=4, options={"fair": True})
GATHERED = plain("recurrent", 2, 40, num_layers=1, num_microbatches=3, options={"fair": True})
PRODUCTS = plain("products", 2, 44, num_layers=4, options={"fair": True})
PP6 = plain(
    "stages", 6, 24, layout=Layout(pp=6), num_layers=6, layer_ms=2.0, options={"microbatches": 24}
)
PP2 = plain(
    "stages", 2, 28, layout=Layout(pp=2), num_layers=2, layer_ms=3.5,
    options={"microbatches": 11, "schedule": "ScheduleGPipe"},
)  # fmt: skip
DP3PP2 = plain(
    "stages", 6, 26, layout=Layout(dp=3, pp=2), num_layers=2, layer_ms=4.0,
    options={"microbatches": 8},
)  # fmt: skip
WOVEN = plain(
    "stages", 4, 24, layout=Layout(dp=2, pp=2), num_layers=4, layer_ms=2.5,
    options={"schedule": "ScheduleInterleaved1F1B", "chunks": 2, "microbatches": 8},
)  # fmt: skip
ENGINE_CUBE = timed(
    dp=2, tp=2, pp=2, microbatches=8, num_layers=2, layer_ms=2.5, num_steps=24, schedule="gpipe"
)
ENGINE_WOVEN = timed(
    dp=2, tp=2, pp=2, microbatches=6, num_layers=4, layer_ms=1.8, num_steps=22,
    schedule="interleaved_1f1b",
)  # fmt: skip
ENGINE_FIVE = timed(dp=5, data_parallel="ddp", num_layers=2, layer_ms=6.0, num_steps=38)
ENGINE_SHARDS = timed(dp=4, data_parallel="fsdp", num_layers=3, layer_ms=6.0, num_steps=34)
ENGINE_V = timed(pp=3, microbatches=12, num_layers=6, layer_ms=1.2, num_steps=20, schedule="zb_v")
ENGINE_TALL = timed(tp=2, pp=3, microbatches=9, num_layers=3, layer_ms=2.0, num_steps=22)
ENGINE_MODEL = engine(
    replace(SMALL, num_layers=3, hidden_size=96, ffn_hidden_size=224), dp=2,
    data_parallel="ddp", microbatch_size=3, num_steps=40,
)  # fmt: skip

PART = Part("last", Last)
fault, contrast = PART.fault, PART.contrast


def list_last() -> list[Case]:
    return [
        *list_places(),
        *list_everyone(),
        *list_changes(),
        *list_several(),
        *list_causes(),
        *list_stages(),
        *list_engine(),
        *list_links(),
        *list_healthy(),
    ]


def list_places() -> list[Case]:
    """One rank, one place, every step."""
    found = []
    for name, program, where, rank, ms in (
        ("student2", STUDENT2, "forward", 1, 24), ("student2", STUDENT2, "saving", 0, 39),
        ("student5", STUDENT5, "backward", 3, 31), ("student5", STUDENT5, "between", 4, 37),
        ("student8", STUDENT8, "data", 5, 43), ("zero3", ZERO3, "forward", 2, 29),
        ("zero4", ZERO4, "evaluation", 0, 41), ("zero6", ZERO6, "data", 3, 44),
        ("zero6", ZERO6, "backward", 1, 36), ("kept3", KEPT3, "forward", 0, 33),
        ("kept4", KEPT4, "between", 2, 46), ("kept4", KEPT4, "forward", 3, 17),
        ("kept7", KEPT7, "optimizer", 6, 49), ("columns2", COLUMNS2, "between", 0, 27),
        ("columns22", COLUMNS22, "forward", 1, 32), ("columns32", COLUMNS32, "data", 4, 47),
        ("ring3", RING3, "backward", 1, 34), ("ring5", RING5, "between", 3, 38),
        ("ring22", RING22, "optimizer", 2, 31), ("marked2", MARKED2, "optimizer", 0, 26),
        ("marked4", MARKED4, "data", 1, 39), ("marked6", MARKED6, "forward", 5, 42),
        ("marked6", MARKED6, "between", 2, 35), ("recurrent", RECURRENT, "forward", 0, 27),
        ("recurrent", RECURRENT, "between", 1, 31), ("products", PRODUCTS, "data", 0, 33),
        ("products", PRODUCTS, "optimizer", 1, 29), ("gathered", GATHERED, "data", 1, 13),
    ):  # fmt: skip
        truth, delay = one(where, rank, ms)
        found.append(fault(f"{name} {where} r{rank}", program, truth, delay))
    # Neither forward nor backward of what is trained: no rule has a word for it.
    teacher = Truth(kind="slow teacher", codes=SLOW_CODES, ranks=(2,))
    slower = tuple(
        Delay(where=where, ranks=(4,), ms=ms)
        for where, ms in (("forward", 5.0), ("backward", 5.0), ("optimizer", 2.0))
    )
    return [
        *found,
        fault("student5 teacher r2", STUDENT5, teacher, Delay(where="teacher", ranks=(2,), ms=34)),
        fault("zero6 r4 slower in all phases", ZERO6,
              Truth(kind="slower in all phases", codes=SLOW_CODES, ranks=(4,)), *slower),
        fault("student8 pause r6", STUDENT8, at("pause", 6),
              Delay(where="pause", ranks=(6,), ms=40)),
    ]  # fmt: skip


def list_everyone() -> list[Case]:
    found = []
    for name, program, where, ms, every in (
        ("student5", STUDENT5, "data", 32, 1), ("zero3", ZERO3, "saving", 38, 1),
        ("kept4", KEPT4, "between", 36, 1), ("ring3", RING3, "evaluation", 145, 5),
        ("recurrent", RECURRENT, "saving", 29, 1), ("zero6", ZERO6, "between", 34, 1),
        ("columns22", COLUMNS22, "data", 37, 1),
    ):  # fmt: skip
        truth = replace(all_at(where, program.num_ranks), every=every)
        found.append(
            fault(f"{name} all {where} {every}", program, truth,
                  Delay(where=where, ms=ms, every=every))
        )  # fmt: skip
    for name, program, where, ranks, every in (
        ("zero3", ZERO3, "gc", (0,), 5), ("kept4", KEPT4, "gc_between", (3,), 4),
        ("student2", STUDENT2, "gc_between", None, 4), ("student5", STUDENT5, "gc", (1,), 3),
    ):  # fmt: skip
        truth = Truth(
            kind="gc", codes=("PA001",), ranks=ranks or tuple(range(program.num_ranks)),
            is_everyone=ranks is None, every=every,
        )  # fmt: skip
        delay = Delay(where=where, ranks=ranks, every=every)
        case = fault(f"{name} {where} {ranks or 'all'} {every}", program, truth, delay)
        clean = Last(program=replace(program, delays=(replace(delay, first=NEVER),)))
        found.append(replace(case, clean=clean))
    return found


def list_changes() -> list[Case]:
    found = []
    for name, program, where, rank, ms, shape, first, last in (
        ("student5", STUDENT5, "backward", 0, 68, "drift", 0, None),
        ("kept3", KEPT3, "forward", 2, 66, "down", 0, None),
        ("kept7", KEPT7, "forward", 3, 72, "down", 0, None),
        ("zero4", ZERO4, "data", 2, 63, "bursts", 0, None),
        ("marked4", MARKED4, "backward", 3, 57, "half", 0, None),
        ("ring22", RING22, "forward", 3, 51, "steady", 18, None),
        ("columns22", COLUMNS22, "backward", 2, 61, "swing", 0, None),
        ("recurrent", RECURRENT, "between", 0, 49, "drift", 0, None),
        ("zero6", ZERO6, "optimizer", 5, 59, "steady", 0, 19),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first, last=last)
        after = "" if last is None else f" until {last}"
        found.append(
            fault(f"{name} {where} r{rank} {shape}{after}", program, changing(where, rank), delay)
        )
    for name, program, where, rank, ms, every in (
        ("student5", STUDENT5, "pause", 1, 125, 4), ("zero4", ZERO4, "saving", 0, 185, 6),
        ("marked6", MARKED6, "forward", 0, 115, 3), ("zero3", ZERO3, "evaluation", 0, 160, 5),
    ):  # fmt: skip
        usual = at(where, rank)
        codes = (*usual.codes, *CHANGING_CODES, "TI002")
        truth = replace(usual, codes=usual.codes if usual.says else codes, every=every, phase=None)
        delay = Delay(where=where, ranks=(rank,), ms=ms, every=every)
        found.append(fault(f"{name} {where} r{rank} every {every}", program, truth, delay))
    return found


def list_several() -> list[Case]:
    several: tuple[tuple[str, Program, tuple[tuple[str, int, float], ...]], ...] = (
        ("student5", STUDENT5, (("forward", 1, 44), ("between", 3, 32))),
        ("student8", STUDENT8, (("backward", 2, 46), ("data", 7, 46))),
        ("zero6", ZERO6, (("saving", 0, 42), ("backward", 4, 42))),
        ("kept3", KEPT3, (("backward", 0, 35), ("between", 2, 35))),
        ("kept4", KEPT4, (("data", 1, 19), ("optimizer", 3, 38))),
        ("columns32", COLUMNS32, (("forward", 0, 43), ("between", 5, 43))),
        ("ring5", RING5, (("data", 1, 39), ("optimizer", 4, 39))),
        ("marked4", MARKED4, (("forward", 0, 37), ("optimizer", 2, 37))),
        ("products", PRODUCTS, (("between", 0, 32), ("data", 1, 32))),
    )  # fmt: skip
    found = [
        fault(
            f"{name} {' and '.join(f'{where} r{rank}' for where, rank, _ in parts)}",
            program,
            [one(*part)[0] for part in parts],
            *(one(*part)[1] for part in parts),
        )
        for name, program, parts in several
    ]
    for name, program, where, ranks, ms in (
        ("zero6", ZERO6, "forward", (0, 5), 41), ("student8", STUDENT8, "optimizer", (2, 3), 45),
        ("kept7", KEPT7, "between", (1, 5), 43),
    ):  # fmt: skip
        truth = at(where, *ranks, may_split=True)
        found.append(
            fault(f"{name} {where} of {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    return found


def list_causes() -> list[Case]:
    rows = replace(STUDENT5, options={**STUDENT5.options, "rows_of_rank": {}})
    sharded = replace(KEPT3, options={"rows_of_rank": {}})
    metrics = replace(ZERO4, layer_ms=3.0, options={"metrics": 70, "flat": True})
    lengths = replace(RECURRENT, num_steps=56)
    nan = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(0,), first_step=17)
    more = cause("uneven batches", "batch", ranks=(1,))
    return [
        contrast("student5 batch of r3 is 17", cause("uneven batches", "batch", ranks=(3,)), rows,
                 rows_of_rank={3: 17}),
        contrast("kept3 batch of r1 is 14", more, sharded, rows_of_rank={1: 14}),
        contrast("recurrent batch of r1 is 26", more, RECURRENT, rows_of_rank={1: 26}),
        contrast("zero4 70 metrics one by one", Truth(kind="small operations", codes=("CO003",)),
                 metrics, flat=False),
        contrast("gathered no no_sync", cause("no_sync", "no_sync"),
                 replace(GATHERED, num_layers=3, num_microbatches=4), sync=True),
        contrast("recurrent unused head", cause("unused parameters", "unused"), RECURRENT,
                 aux=6_000_000),
        contrast("recurrent random lengths",
                 Truth(kind="uneven lengths", codes=("IM001",), is_uneven=True), lengths,
                 lengths=29),
        fault("recurrent nan_batch r0", RECURRENT, nan,
              Delay(where="nan_batch", ranks=(0,), first=17, last=17), is_timed=False),
    ]  # fmt: skip


def list_stages() -> list[Case]:
    found = []
    for name, program, where, stage, ms in (
        ("pp6", PP6, "forward", 2, 4), ("pp2", PP2, "backward", 1, 6),
        ("dp3pp2", DP3PP2, "forward", 1, 6), ("woven", WOVEN, "backward", 1, 4),
    ):  # fmt: skip
        ranks = list_ranks_of_stage(program, stage)
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks)
        found.append(
            fault(f"{name} stage {where} {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    optimizer = Truth(
        kind="slow optimizer of a stage", codes=STAGE_CODES, ranks=(3,), phase="optimizer"
    )
    return [
        *found,
        fault(
            "pp6 optimizer of stage 3", PP6, optimizer, Delay(where="optimizer", ranks=(3,), ms=48)
        ),
        fault("pp6 data r0", PP6, *one("data", 0, 58)),
        fault("pp2 between r1", PP2, *one("between", 1, 41)),
        fault("dp3pp2 forward r3", DP3PP2, *one("forward", 3, 8)),
        fault("dp3pp2 data r1", DP3PP2, *one("data", 1, 52)),
        fault("woven saving r3", WOVEN, *one("saving", 3, 45)),
    ]


def list_engine() -> list[Case]:
    found = []
    for name, config, where, rank, ms in (
        ("cube", ENGINE_CUBE, "backward", 3, 6), ("cube", ENGINE_CUBE, "data", 1, 46),
        ("woven", ENGINE_WOVEN, "optimizer", 6, 39), ("five", ENGINE_FIVE, "forward", 4, 37),
        ("shards", ENGINE_SHARDS, "backward", 2, 34), ("tall", ENGINE_TALL, "forward", 5, 7),
        ("model", ENGINE_MODEL, "forward", 0, 38),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        text = f"{kind} rank={rank} ms={ms}"
        found.append(with_faults(f"last {name} {where} r{rank}", at(where, rank), config, text))
    for name, config, stage, where, ms in (
        ("cube", ENGINE_CUBE, 1, "backward", 6), ("v", ENGINE_V, 1, "forward", 4),
        ("tall", ENGINE_TALL, 0, "optimizer", 43),
    ):  # fmt: skip
        truth = Truth(
            kind="slow optimizer of a stage" if where == "optimizer" else "slow stage",
            codes=STAGE_CODES, ranks=list_stage_ranks(config, stage),
            phase="optimizer" if where == "optimizer" else None, may_split=True,
        )  # fmt: skip
        text = f"slow pp={stage} phase={where} ms={ms}"
        found.append(with_faults(f"last {name} stage {stage} {where}", truth, config, text))
    recovers = changed(at("optimizer", 1), is_uneven=True)
    pair = with_faults(
        "last cube forward r6 and optimizer r0", at("forward", 6), ENGINE_CUBE,
        "slow phase=forward rank=6 ms=7", "slow phase=optimizer rank=0 ms=47",
    )  # fmt: skip
    return [
        *found,
        with_faults("last five optimizer r1 until 16", recovers, ENGINE_FIVE,
                    "slow rank=1 phase=optimizer ms=58 steps=0-16"),
        replace(pair, also=(at("optimizer", 0),)),
    ]  # fmt: skip


def list_links() -> list[Case]:
    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    return [
        with_link("last tall link 2-4", link("pp", 2, 4), Trained(config=ENGINE_TALL),
                  Link(axis="pp", ms=8, pair=(2, 4))),
        with_link("last cube all of dp", link("dp"), Trained(config=ENGINE_CUBE),
                  Link(axis="dp", ms=34)),
    ]  # fmt: skip


def list_healthy() -> list[Case]:
    """As programs are, and near misses: 2 % of a step or less, or nothing that could be saved."""

    def run(name: str, program: Program, *delays: Delay, **options: Any) -> Case:
        told = replace(program, delays=delays, options={**program.options, **options})
        return healthy(f"last near miss {name}", Last(program=told))

    others = (0, 1, 3, 4)
    return [
        run("student5 all teachers", STUDENT5, Delay(where="teacher", ms=14)),
        run("student8 r3 1 % slower", STUDENT8, Delay(where="backward", ranks=(3,), ms=0.5)),
        run("zero3 saves once", ZERO3, Delay(where="saving", ranks=(0,), ms=25, first=21, last=21)),
        run("zero6 small pause", ZERO6, Delay(where="between", ranks=(2,), ms=0.4)),
        run("kept3 all optimizer", KEPT3, Delay(where="optimizer", ms=13)),
        run("kept7 one pause", KEPT7, Delay(where="forward", ranks=(4,), ms=20, first=20, last=20)),
        run("columns2 drift", COLUMNS2, Delay(where="forward", ranks=(1,), ms=0.7, shape="drift")),
        run("ring5 fast r2 forward", RING5, Delay(where="forward", ranks=others, ms=15)),
        run("marked4 all backward", MARKED4, Delay(where="backward", ms=16)),
        run("zero4 5 metrics", ZERO4, metrics=5),
        run("recurrent large batches", RECURRENT, rows_of_rank={0: 22, 1: 22}),
        run("recurrent longer", replace(RECURRENT, num_steps=60)),
        run("products deeper", replace(PRODUCTS, num_layers=6)),
        run("gathered six", replace(GATHERED, num_microbatches=6)),
        run("pp6 other microbatches", replace(PP6, options={"microbatches": 30})),
        healthy("last near miss engine v", Trained(config=replace(ENGINE_V, num_steps=26))),
        healthy("last near miss engine model", Trained(config=replace(ENGINE_MODEL, num_steps=44))),
        healthy("last near miss engine shards", Trained(config=ENGINE_SHARDS)),
    ]  # fmt: skip

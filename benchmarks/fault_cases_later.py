"""An eighth part of the fault matrix: written while others changed rules, judged once after them.

Programs (`later_programs`), layouts, amounts, places, phases and pairs that no earlier part has.
Whoever wrote it had not read the rules' code, and judged nothing before all of it was recorded.
Only programs of two ranks with one thread each really compute (collections on four ranks do, too:
an oversight). Near misses cost less than 1 % of a step. Words for truths are those of
`fault_cases_trials`.
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
from benchmarks.later_programs import Later
from tests.distributed.fault_cases import (
    SMALL,
    TOO_FEW,
    engine,
    healthy,
    leak,
    timed,
    uneven,
    with_faults,
    with_link,
)
from tests.distributed.fault_matrix import Case, Link, Trained
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout

TOWERS3 = plain("towers", 3, 42, num_layers=2, layer_ms=8.0)
TOWERS6 = plain("towers", 6, 38, num_layers=1, layer_ms=15.0)
NEIGHBOURS4 = plain("neighbours", 4, 42, num_layers=3, layer_ms=7.5)
NEIGHBOURS5 = plain("neighbours", 5, 40, num_layers=2, layer_ms=12.0, optimizer_ms=2.0)
SERVED4 = plain("served", 4, 42, num_layers=2, layer_ms=11.5)
SERVED7 = plain("served", 7, 38, num_layers=1, layer_ms=26.0)
STARTED3 = plain("started", 3, 44, num_layers=4, layer_ms=5.5)
STARTED6 = plain("started", 6, 40, num_layers=3, layer_ms=8.5)
AGAIN3 = plain("again", 3, 42, num_layers=3, layer_ms=6.0)
AGAIN8 = plain("again", 8, 36, num_layers=2, layer_ms=12.0, options={"barrier": True})
AGAIN5 = plain("again", 5, 38, num_layers=2, layer_ms=11.0, options={"sharded": True})
SCATTERED3 = plain("scattered", 3, 42, layout=Layout(tp=3), num_layers=2, layer_ms=9.5)
SCATTERED22 = plain("scattered", 4, 40, layout=Layout(dp=2, tp=2), num_layers=2, layer_ms=10.0)
SCATTERED24 = plain("scattered", 8, 32, layout=Layout(dp=2, tp=4), num_layers=1, layer_ms=23.0)
GATES = plain("gates", 2, 42, num_layers=4, options={"fair": True})
HELD_GATES = plain("gates", 2, 38, num_layers=2, num_microbatches=4, options={"fair": True})
SHARDED_GATES = plain("gates", 2, 40, num_layers=5, options={"fair": True, "sharded": True})
PP3 = plain(
    "stages", 3, 26, layout=Layout(pp=3), num_layers=6, layer_ms=1.6,
    options={"microbatches": 13, "schedule": "ScheduleGPipe"},
)  # fmt: skip
DP4PP2 = plain(
    "stages", 8, 24, layout=Layout(dp=4, pp=2), num_layers=2, layer_ms=4.5,
    options={"microbatches": 10},
)  # fmt: skip
WOVEN3 = plain(
    "stages", 3, 22, layout=Layout(pp=3), num_layers=6, layer_ms=2.2,
    options={"schedule": "ScheduleInterleaved1F1B", "chunks": 2, "microbatches": 12},
)  # fmt: skip
ENGINE_CUBE = timed(dp=2, tp=2, pp=2, microbatches=10, num_layers=4, layer_ms=1.3, num_steps=22)
ENGINE_SIX = timed(dp=6, data_parallel="ddp", num_layers=3, layer_ms=4.5, num_steps=36)
ENGINE_PLANE = timed(dp=3, tp=2, num_layers=2, layer_ms=6.0, num_steps=34)
ENGINE_ROW = timed(
    pp=4, microbatches=16, num_layers=4, layer_ms=1.7, num_steps=20, schedule="gpipe"
)
ENGINE_H1 = timed(pp=3, microbatches=13, num_layers=3, layer_ms=2.3, num_steps=20, schedule="zb_h1")
ENGINE_MODEL = engine(
    replace(SMALL, num_layers=4, hidden_size=96, ffn_hidden_size=256), tp=2, microbatch_size=4,
    num_steps=36,
)  # fmt: skip

PART = Part("later", Later)
fault, contrast = PART.fault, PART.contrast


def list_later() -> list[Case]:
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
        ("towers3", TOWERS3, "forward", 2, 27), ("towers6", TOWERS6, "backward", 4, 41),
        ("towers6", TOWERS6, "data", 1, 45), ("neighbours4", NEIGHBOURS4, "optimizer", 0, 31),
        ("neighbours4", NEIGHBOURS4, "saving", 2, 40),
        ("neighbours5", NEIGHBOURS5, "forward", 3, 35),
        ("served4", SERVED4, "optimizer", 0, 34), ("served4", SERVED4, "data", 3, 36),
        ("served7", SERVED7, "backward", 5, 47), ("served4", SERVED4, "evaluation", 1, 22),
        ("started3", STARTED3, "between", 1, 29), ("started6", STARTED6, "forward", 0, 39),
        ("again3", AGAIN3, "backward", 2, 30), ("again8", AGAIN8, "optimizer", 7, 48),
        ("again5", AGAIN5, "forward", 1, 37), ("scattered3", SCATTERED3, "backward", 0, 28),
        ("scattered22", SCATTERED22, "data", 2, 34), ("scattered24", SCATTERED24, "between", 6, 49),
        ("gates", GATES, "forward", 1, 25), ("sharded gates", SHARDED_GATES, "data", 1, 30),
    ):  # fmt: skip
        truth, delay = one(where, rank, ms)
        found.append(fault(f"{name} {where} r{rank}", program, truth, delay))
    return [
        *found,
        fault("served7 pause r2", SERVED7, at("pause", 2),
              Delay(where="pause", ranks=(2,), ms=43)),
    ]  # fmt: skip


def list_everyone() -> list[Case]:
    found = []
    for name, program, where, ms, every in (
        ("towers3", TOWERS3, "between", 30, 1), ("started6", STARTED6, "data", 38, 1),
        ("neighbours5", NEIGHBOURS5, "saving", 150, 5), ("again3", AGAIN3, "evaluation", 120, 4),
    ):  # fmt: skip
        truth = replace(all_at(where, program.num_ranks), every=every)
        found.append(
            fault(f"{name} all {where} {every}", program, truth,
                  Delay(where=where, ms=ms, every=every))
        )  # fmt: skip
    for name, program, where, ranks, every in (
        ("started3", STARTED3, "gc", (2,), 4), ("neighbours4", NEIGHBOURS4, "gc_between", None, 5),
    ):  # fmt: skip
        truth = Truth(
            kind="gc", codes=("PA001",), ranks=ranks or tuple(range(program.num_ranks)),
            is_everyone=ranks is None, every=every,
        )  # fmt: skip
        delay = Delay(where=where, ranks=ranks, every=every)
        case = fault(f"{name} {where} {ranks or 'all'} {every}", program, truth, delay)
        clean = Later(program=replace(program, delays=(replace(delay, first=NEVER),)))
        found.append(replace(case, clean=clean))
    return found


def list_changes() -> list[Case]:
    found = []
    for name, program, where, rank, ms, shape, first, last in (
        ("towers6", TOWERS6, "forward", 0, 70, "drift", 0, None),
        ("started6", STARTED6, "backward", 4, 60, "bursts", 0, None),
        ("neighbours5", NEIGHBOURS5, "data", 1, 58, "half", 0, None),
        ("served4", SERVED4, "between", 2, 50, "steady", 17, None),
        ("again5", AGAIN5, "backward", 3, 66, "down", 0, None),
        ("scattered22", SCATTERED22, "forward", 1, 62, "swing", 0, None),
        ("again8", AGAIN8, "optimizer", 3, 61, "steady", 0, 18),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first, last=last)
        after = "" if last is None else f" until {last}"
        found.append(
            fault(f"{name} {where} r{rank} {shape}{after}", program, changing(where, rank), delay)
        )
    for name, program, where, rank, ms, every in (
        ("served7", SERVED7, "saving", 0, 190, 6), ("started6", STARTED6, "pause", 2, 120, 3),
        ("towers6", TOWERS6, "between", 5, 135, 4),
    ):  # fmt: skip
        usual = at(where, rank)
        codes = (*usual.codes, *CHANGING_CODES, "TI002")
        truth = replace(usual, codes=usual.codes if usual.says else codes, every=every, phase=None)
        delay = Delay(where=where, ranks=(rank,), ms=ms, every=every)
        found.append(fault(f"{name} {where} r{rank} every {every}", program, truth, delay))
    return found


def list_several() -> list[Case]:
    several: tuple[tuple[str, Program, tuple[tuple[str, int, float], ...]], ...] = (
        ("towers6", TOWERS6, (("backward", 2, 42), ("saving", 5, 36))),
        ("neighbours4", NEIGHBOURS4, (("forward", 1, 34), ("data", 3, 34))),
        ("served7", SERVED7, (("data", 1, 44), ("optimizer", 6, 44))),
        ("started6", STARTED6, (("forward", 1, 40), ("optimizer", 3, 40), ("between", 5, 40))),
        ("again5", AGAIN5, (("data", 0, 38), ("between", 4, 38))),
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
        ("served7", SERVED7, "forward", (3, 4), 42), ("again8", AGAIN8, "between", (0, 6), 46),
    ):  # fmt: skip
        truth = at(where, *ranks, may_split=True)
        found.append(
            fault(f"{name} {where} of {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    return found


def list_causes() -> list[Case]:
    rows = replace(AGAIN3, options={"rows_of_rank": {}})
    metrics = replace(NEIGHBOURS5, layer_ms=3.5, options={"metrics": 55, "flat": True})
    many = replace(STARTED3, num_layers=12, layer_ms=0.8, num_steps=34)
    # Seven lengths, each once in seven batches of a rank: 56 steps have the work of the twin.
    lengths = replace(GATES, num_steps=56)
    small = Truth(kind="small operations", codes=("CO003",))
    nan = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(3,), first_step=15)
    more = Truth(kind="more microbatches", codes=(*SLOW_CODES, "IM001"), ranks=(0,))
    return [
        contrast("again3 batch of r2 is 15", cause("uneven batches", "batch", ranks=(2,)), rows,
                 rows_of_rank={2: 15}),
        contrast("gates batch of r0 is 20", cause("uneven batches", "batch", ranks=(0,)), GATES,
                 rows_of_rank={0: 20}),
        contrast("neighbours5 55 metrics one by one", small, metrics, flat=False),
        contrast("started3 waits for each parameter's sum", small, many, apart=True),
        contrast("held gates no no_sync", cause("no_sync", "no_sync"), HELD_GATES, sync=True),
        contrast("gates unused head", cause("unused parameters", "unused"), GATES, aux=7_000_000),
        contrast("sharded gates threads 10", cause("threads", "thread"), SHARDED_GATES, threads=10),
        contrast("held gates r0 accumulates 3 more", more, HELD_GATES, extra={0: 3}),
        contrast("gates random lengths",
                 Truth(kind="uneven lengths", codes=("IM001",), is_uneven=True), lengths,
                 lengths=37),
        fault("neighbours5 nan_batch r3", NEIGHBOURS5, nan,
              Delay(where="nan_batch", ranks=(3,), first=15, last=15), is_timed=False),
        fault("served4 leak r2", SERVED4, leak(2),
              Delay(where="leak", ranks=(2,), leak_bytes=1_000_000), is_timed=False),
    ]  # fmt: skip


def list_stages() -> list[Case]:
    found = []
    for name, program, where, stage, ms in (
        ("pp3", PP3, "backward", 1, 5), ("dp4pp2", DP4PP2, "forward", 0, 6),
        ("woven3", WOVEN3, "forward", 2, 4),
    ):  # fmt: skip
        ranks = list_ranks_of_stage(program, stage)
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks)
        found.append(
            fault(f"{name} stage {where} {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    return [
        *found,
        fault("pp3 between r2", PP3, *one("between", 2, 44)),
        fault("dp4pp2 backward r5", DP4PP2, *one("backward", 5, 9)),
        fault("woven3 data r0", WOVEN3, *one("data", 0, 51)),
    ]


def list_engine() -> list[Case]:
    found = []
    for name, config, where, rank, ms in (
        ("cube", ENGINE_CUBE, "forward", 2, 6), ("cube", ENGINE_CUBE, "optimizer", 5, 41),
        ("six", ENGINE_SIX, "backward", 3, 33), ("plane", ENGINE_PLANE, "forward", 4, 36),
        ("plane", ENGINE_PLANE, "data", 1, 39), ("model", ENGINE_MODEL, "backward", 0, 36),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        text = f"{kind} rank={rank} ms={ms}"
        found.append(with_faults(f"later {name} {where} r{rank}", at(where, rank), config, text))
    for name, config, stage, where, ms in (
        ("cube", ENGINE_CUBE, 0, "forward", 6), ("row", ENGINE_ROW, 2, "backward", 5),
        ("row", ENGINE_ROW, 1, "optimizer", 42), ("h1", ENGINE_H1, 2, "forward", 5),
    ):  # fmt: skip
        truth = Truth(
            kind="slow optimizer of a stage" if where == "optimizer" else "slow stage",
            codes=STAGE_CODES, ranks=list_stage_ranks(config, stage),
            phase="optimizer" if where == "optimizer" else None, may_split=True,
        )  # fmt: skip
        text = f"slow pp={stage} phase={where} ms={ms}"
        found.append(with_faults(f"later {name} stage {stage} {where}", truth, config, text))
    late = changed(at("forward", 1), is_uneven=True)
    return [
        *found,
        with_faults("later six forward r1 in 15-", late, ENGINE_SIX,
                    "slow rank=1 phase=forward ms=54 steps=15-"),
        make_uneven(),
        make_few(),
    ]  # fmt: skip


def make_uneven() -> Case:
    even = timed(
        dp=2, pp=3, microbatches=12, num_layers=6, layer_ms=1.1, num_steps=22, schedule="gpipe"
    )
    faulty = replace(even, parallel=replace(even.parallel, stage_sizes=(1, 4, 1)))
    return Case(
        name="later uneven (1, 4, 1) dp2 gpipe", truth=uneven(1, *list_stage_ranks(even, 1)),
        faulty=Trained(config=faulty), clean=Trained(config=even),
    )  # fmt: skip


def make_few() -> Case:
    """The twin cuts the same work into three times as many microbatches."""
    few, enough = (
        Trained(
            config=timed(
                dp=2, pp=3, microbatches=count, num_layers=3, layer_ms=42.0 / count, num_steps=20
            )
        )
        for count in (2, 6)
    )
    return Case(
        name="later 2 microbatches for 3 stages dp2", truth=TOO_FEW, faulty=few, clean=enough
    )


def list_links() -> list[Case]:
    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    return [
        with_link("later scattered22 group of 2-3", link("tp", 2, 3), Later(program=SCATTERED22),
                  Link(axis="tp", ms=6, pair=(2, 3))),
        with_link("later h1 link 0-1", link("pp", 0, 1), Trained(config=ENGINE_H1),
                  Link(axis="pp", ms=8, pair=(0, 1))),
        with_link("later plane group of 1-3-5", link("dp", 1, 3, 5), Trained(config=ENGINE_PLANE),
                  Link(axis="dp", ms=32, pair=(1, 3, 5))),
    ]  # fmt: skip


def list_healthy() -> list[Case]:
    """As programs are, and near misses: less than 1 % of a step, or nothing that could be saved."""

    def run(name: str, program: Program, *delays: Delay, **options: Any) -> Case:
        told = replace(program, delays=delays, options={**program.options, **options})
        return healthy(f"later near miss {name}", Later(program=told))

    others = (0, 1, 2, 3, 5, 6)
    return [
        run("towers3 all forward", TOWERS3, Delay(where="forward", ms=15)),
        run("towers6 r3 slower", TOWERS6, Delay(where="backward", ranks=(3,), ms=0.4)),
        run("neighbours4 drift", NEIGHBOURS4,
            Delay(where="forward", ranks=(2,), ms=0.6, shape="drift")),
        run("neighbours5 one pause", NEIGHBOURS5,
            Delay(where="between", ranks=(1,), ms=18, first=22, last=22)),
        run("served4 writes in a thread", SERVED4, background=60),
        run("served4 r0 optimizer", SERVED4, Delay(where="optimizer", ranks=(0,), ms=0.4)),
        run("served7 fast r4 forward", SERVED7, Delay(where="forward", ranks=others, ms=16)),
        run("started3 all optimizer", STARTED3, Delay(where="optimizer", ms=12)),
        run("started6 saves once", STARTED6,
            Delay(where="saving", ranks=(0,), ms=18, first=19, last=19)),
        run("started6 3 metrics in one sum", STARTED6, metrics=3, flat=True),
        run("again3 backward in one step of 10", AGAIN3,
            Delay(where="backward", ranks=(0,), ms=4, every=10)),
        run("again8 all backward", AGAIN8, Delay(where="backward", ms=18)),
        run("again5 jump", AGAIN5,
            Delay(where="leak", ranks=(1,), first=20, last=20, leak_bytes=20_000_000)),
        run("scattered22 long optimizer", replace(SCATTERED22, optimizer_ms=11.0)),
        run("gates large batches", GATES, rows_of_rank={0: 18, 1: 18}),
        run("held gates two", replace(HELD_GATES, num_microbatches=2)),
        run("sharded gates deeper", replace(SHARDED_GATES, num_layers=7)),
        run("pp3 other microbatches", replace(PP3, options={**PP3.options, "microbatches": 20})),
        healthy("later near miss engine row", Trained(config=replace(ENGINE_ROW, num_steps=26))),
        healthy("later near miss engine model",
                Trained(config=replace(ENGINE_MODEL, num_steps=44))),
    ]  # fmt: skip

"""A ninth part of the fault matrix: written while others changed rules, judged once after them.

Programs (`blind_programs`), layouts, amounts, places, phases and pairs that no earlier part has.
Whoever wrote it had not read the rules' code, and judged nothing before all of it was recorded.
Faults take 8 to 60 % of a step, most of them less than in earlier parts. Only programs of two ranks
with one thread each really compute, and no more than two ranks collect garbage at once. Near misses
cost less than 1 % of a step. Words for truths are those of `fault_cases_trials`.

Of unlike lengths the twin has the same work: lengths with one mean. That of a hot expert has none
of its padding. A stage's finding may name its ranks in any phase.
"""

from dataclasses import replace
from typing import Any

from benchmarks.blind_programs import Blind
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
from tests.distributed.fault_cases import (
    NAN,
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

UNET4 = plain("unet", 4, 40, num_layers=2, layer_ms=8.0, options={"clip": True, "ema": True})
UNET6 = plain("unet", 6, 34, num_layers=1, layer_ms=8.0, num_microbatches=3, options={"clip": True})
UNET8 = plain("unet", 8, 34, num_layers=1, layer_ms=21.0, options={"clip": True})
FETCHED3 = plain("unet", 3, 40, num_layers=1, layer_ms=17.0, options={"workers": 1})
MIXED3 = plain("mixed", 3, 38, num_layers=3, layer_ms=11.0, options={"clip": True})
MIXED5 = plain("mixed", 5, 34, num_layers=3, layer_ms=16.0)
COPIES4 = plain("copies", 4, 34, num_layers=2, layer_ms=9.0, num_microbatches=2)
COPIES6 = plain("copies", 6, 32, num_layers=1, layer_ms=24.0, num_microbatches=2)
SEQUENCES2 = plain("sequences", 2, 40, layout=Layout(tp=2), num_layers=2, layer_ms=13.0)
SEQUENCES22 = plain("sequences", 4, 36, layout=Layout(dp=2, tp=2), num_layers=1, layer_ms=30.0)
SEQUENCES32 = plain("sequences", 6, 32, layout=Layout(dp=3, tp=2), num_layers=1, layer_ms=42.0)
EXPERTS4 = plain("experts", 4, 38, layout=Layout(ep=4), num_layers=1, layer_ms=16.0)
EXPERTS6 = plain("experts", 6, 34, layout=Layout(dp=2, ep=3), num_layers=1, layer_ms=20.0)
EXPERTS8 = plain("experts", 8, 32, layout=Layout(ep=8), num_layers=1, layer_ms=24.0)
MOMENTUM3 = plain("momentum", 3, 42, num_layers=2, layer_ms=9.0, options={"keys": 13.0})
MOMENTUM7 = plain("momentum", 7, 36, num_layers=1, layer_ms=29.0, options={"keys": 17.0})
GAN2 = plain("gan", 2, 42, num_layers=2, layer_ms=7.0, options={"critic": 6.0})
GAN5 = plain("gan", 5, 36, num_layers=2, layer_ms=10.0, options={"critic": 9.0})
ROLLOUTS3 = plain("rollouts", 3, 38, num_layers=1, layer_ms=9.0, options={"rollout": 31.0})
ROLLOUTS6 = plain("rollouts", 6, 34, num_layers=1, layer_ms=13.0, options={"rollout": 36.0})
OWNED4 = plain("owned", 4, 38, num_layers=4, layer_ms=7.5)
OWNED7 = plain("owned", 7, 34, num_layers=7, layer_ms=6.0)
CENTRAL4 = plain("central", 4, 40, num_layers=2, layer_ms=13.0)
CENTRAL6 = plain("central", 6, 36, num_layers=2, layer_ms=17.0)
NORMED3 = plain("normed", 3, 42, num_layers=2, layer_ms=12.0)
NORMED6 = plain("normed", 6, 36, num_layers=2, layer_ms=17.0)
TURNED4 = plain("turned", 4, 38, layout=Layout(cp=4), num_layers=2, layer_ms=13.0)
TURNED22 = plain("turned", 4, 38, layout=Layout(dp=2, cp=2), num_layers=2, layer_ms=14.0)
TURNED8 = plain("turned", 8, 32, layout=Layout(cp=8), num_layers=1, layer_ms=36.0)
ADAPTERS2 = plain("adapters", 2, 42, num_layers=3, layer_ms=8.0)
ADAPTERS5 = plain("adapters", 5, 38, num_layers=2, layer_ms=15.0)
ADAPTERS8 = plain("adapters", 8, 34, num_layers=2, layer_ms=20.0, options={"barrier": True})
CONVOLUTIONS = plain(
    "convolutions", 2, 42, num_layers=3, num_microbatches=2,
    options={"fair": True, "clip": True, "ema": True},
)  # fmt: skip
BFS = plain(
    "stages", 4, 22, layout=Layout(pp=4), num_layers=8, layer_ms=3.5,
    options={"schedule": "ScheduleLoopedBFS", "chunks": 2, "microbatches": 8},
)  # fmt: skip
DP2PP4 = plain(
    "stages", 8, 22, layout=Layout(dp=2, pp=4), num_layers=4, layer_ms=6.0,
    options={"microbatches": 10},
)  # fmt: skip
PP5 = plain(
    "stages", 5, 22, layout=Layout(pp=5), num_layers=5, layer_ms=3.5,
    options={"microbatches": 18, "schedule": "ScheduleGPipe"},
)  # fmt: skip
ENGINE_WIDE = timed(dp=2, tp=4, num_layers=2, layer_ms=9.0, num_steps=32)
ENGINE_ZERO = timed(
    dp=4, data_parallel="fsdp", zero_stage=2, num_layers=2, layer_ms=9.0, num_steps=34
)
ENGINE_TORUS = timed(
    dp=2, pp=4, microbatches=14, num_layers=4, layer_ms=2.2, num_steps=20, schedule="1f1b"
)
ENGINE_H2 = timed(pp=4, microbatches=16, num_layers=4, layer_ms=2.4, num_steps=20, schedule="zb_h2")
ENGINE_V = timed(pp=2, microbatches=10, num_layers=4, layer_ms=2.0, num_steps=24, schedule="zb_v")
ENGINE_LOOPED = timed(
    dp=2, pp=3, microbatches=9, num_layers=6, layer_ms=1.8, num_steps=22, schedule="looped_bfs"
)
ENGINE_CUBE = timed(
    dp=2, tp=2, pp=2, order=("tp", "pp", "dp"), microbatches=9, num_layers=2, layer_ms=3.0,
    num_steps=24,
)  # fmt: skip
ENGINE_MODEL = engine(
    replace(SMALL, num_layers=3, hidden_size=128, ffn_hidden_size=256), tp=2,
    sequence_parallel=True, microbatch_size=3, num_steps=36,
)  # fmt: skip

PART = Part("blind", Blind)
fault, contrast = PART.fault, PART.contrast


def list_blind() -> list[Case]:
    return [
        *list_places(),
        *list_everyone(),
        *list_changes(),
        *list_several(),
        *list_causes(),
        *list_numbers(),
        *list_stages(),
        *list_engine(),
        *list_links(),
        *list_healthy(),
    ]


def list_places() -> list[Case]:
    """One rank, one place, every step. A delay comes in every microbatch, update or chunk."""
    found = []
    for name, program, where, rank, ms in (
        ("unet4", UNET4, "forward", 2, 9), ("unet4", UNET4, "saving", 1, 31),
        ("unet4", UNET4, "evaluation", 3, 4), ("unet6", UNET6, "backward", 4, 11),
        ("unet8", UNET8, "optimizer", 5, 16), ("mixed3", MIXED3, "backward", 1, 24),
        ("mixed5", MIXED5, "between", 3, 30), ("copies4", COPIES4, "forward", 2, 12),
        ("copies6", COPIES6, "optimizer", 1, 33), ("sequences2", SEQUENCES2, "forward", 0, 19),
        ("sequences22", SEQUENCES22, "backward", 3, 26),
        ("sequences32", SEQUENCES32, "data", 5, 36), ("experts4", EXPERTS4, "forward", 1, 23),
        ("experts6", EXPERTS6, "between", 4, 29), ("experts8", EXPERTS8, "backward", 3, 28),
        ("momentum3", MOMENTUM3, "backward", 0, 17), ("momentum7", MOMENTUM7, "data", 5, 27),
        ("gan5", GAN5, "optimizer", 3, 25), ("rollouts3", ROLLOUTS3, "forward", 1, 10),
        ("owned4", OWNED4, "forward", 3, 22), ("central4", CENTRAL4, "backward", 1, 18),
        ("central6", CENTRAL6, "data", 3, 25), ("normed6", NORMED6, "forward", 4, 30),
        ("turned22", TURNED22, "between", 1, 28), ("turned8", TURNED8, "forward", 6, 24),
        ("adapters8", ADAPTERS8, "data", 2, 33), ("convolutions", CONVOLUTIONS, "data", 1, 9),
    ):  # fmt: skip
        truth, delay = one(where, rank, ms)
        found.append(fault(f"{name} {where} r{rank}", program, truth, delay))
    # What a program marks itself, in the step; the encoder that follows is no phase of training.
    for name, program, where, rank, ms in (
        ("rollouts3", ROLLOUTS3, "rollout", 2, 21), ("rollouts6", ROLLOUTS6, "advantage", 4, 23),
        ("central4", CENTRAL4, "update", 3, 24), ("momentum3", MOMENTUM3, "keys", 1, 19),
    ):  # fmt: skip
        truth = at(where, rank, phase=None if where == "keys" else where)
        found.append(
            fault(f"{name} {where} r{rank}", program, truth,
                  Delay(where=where, ranks=(rank,), ms=ms))
        )  # fmt: skip
    export = Truth(
        kind="phase of its own", codes=("TI005", "ST001", "LT001", "TI002"), ranks=(3,),
        says=("export",),
    )  # fmt: skip
    slower = tuple(
        Delay(where=where, ranks=(6,), ms=ms)
        for where, ms in (("forward", 6.0), ("backward", 6.0), ("optimizer", 1.0))
    )
    return [
        *found,
        fault("adapters5 pause r2", ADAPTERS5, at("pause", 2),
              Delay(where="pause", ranks=(2,), ms=26)),
        fault("adapters5 export r3", replace(ADAPTERS5, options={"aside": "export"}), export,
              Delay(where="logging", ranks=(3,), ms=21)),
        fault("unet8 r6 slower in all phases", UNET8,
              Truth(kind="slower in all phases", codes=SLOW_CODES, ranks=(6,)), *slower),
    ]  # fmt: skip


def list_everyone() -> list[Case]:
    found = []
    for name, program, where, ms, every in (
        ("unet4", UNET4, "data", 19, 1), ("mixed3", MIXED3, "between", 25, 1),
        ("experts4", EXPERTS4, "saving", 130, 5),
        ("owned4", OWNED4, "evaluation", 95, 4), ("normed6", NORMED6, "data", 26, 1),
        ("turned8", TURNED8, "between", 31, 1),
    ):  # fmt: skip
        truth = replace(all_at(where, program.num_ranks), every=every)
        found.append(
            fault(f"{name} all {where} {every}", program, truth,
                  Delay(where=where, ms=ms, every=every))
        )  # fmt: skip
    for name, program, where, ranks, every in (
        ("unet6", UNET6, "gc", (5,), 4), ("momentum3", MOMENTUM3, "gc_between", (2,), 3),
        ("adapters2", ADAPTERS2, "gc", None, 4), ("mixed5", MIXED5, "gc_between", (1,), 5),
    ):  # fmt: skip
        truth = Truth(
            kind="gc", codes=("PA001",), ranks=ranks or tuple(range(program.num_ranks)),
            is_everyone=ranks is None, every=every,
        )  # fmt: skip
        delay = Delay(where=where, ranks=ranks, every=every)
        case = fault(f"{name} {where} {ranks or 'all'} {every}", program, truth, delay)
        clean = Blind(program=replace(program, delays=(replace(delay, first=NEVER),)))
        found.append(replace(case, clean=clean))
    return found


def list_changes() -> list[Case]:
    found = []
    for name, program, where, rank, ms, shape, first, last in (
        ("unet4", UNET4, "backward", 1, 44, "drift", 0, None),
        ("mixed5", MIXED5, "data", 2, 48, "steady", 18, None),
        ("copies4", COPIES4, "backward", 3, 30, "bursts", 0, None),
        ("experts8", EXPERTS8, "forward", 5, 52, "half", 0, None),
        ("gan5", GAN5, "backward", 4, 46, "swing", 0, None),
        ("owned7", OWNED7, "forward", 5, 50, "down", 0, None),
        ("turned22", TURNED22, "data", 3, 42, "drift", 0, None),
        ("normed6", NORMED6, "between", 5, 45, "steady", 0, 17),
        ("adapters8", ADAPTERS8, "forward", 3, 50, "steady", 16, None),
        ("sequences22", SEQUENCES22, "optimizer", 1, 47, "bursts", 0, None),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first, last=last)
        after = "" if last is None else f" until {last}"
        found.append(
            fault(f"{name} {where} r{rank} {shape}{after}", program, changing(where, rank), delay)
        )
    for name, program, where, rank, ms, every in (
        ("unet8", UNET8, "saving", 0, 150, 6), ("rollouts6", ROLLOUTS6, "rollout", 3, 95, 4),
        ("central6", CENTRAL6, "between", 1, 110, 5), ("adapters5", ADAPTERS5, "pause", 4, 85, 3),
    ):  # fmt: skip
        usual = at(where, rank)
        codes = (*usual.codes, *CHANGING_CODES, "TI002")
        truth = replace(usual, codes=usual.codes if usual.says else codes, every=every, phase=None)
        delay = Delay(where=where, ranks=(rank,), ms=ms, every=every)
        found.append(fault(f"{name} {where} r{rank} every {every}", program, truth, delay))
    return found


def list_several() -> list[Case]:
    several: tuple[tuple[str, Program, tuple[tuple[str, int, float], ...]], ...] = (
        ("unet8", UNET8, (("forward", 3, 28), ("saving", 7, 28))),
        ("mixed5", MIXED5, (("backward", 4, 31), ("between", 1, 31))),
        ("experts6", EXPERTS6, (("forward", 2, 26), ("optimizer", 5, 26))),
        ("momentum7", MOMENTUM7, (("backward", 1, 25), ("data", 4, 25))),
        ("owned7", OWNED7, (("backward", 6, 27), ("data", 3, 27))),
        ("normed6", NORMED6, (("forward", 1, 22), ("backward", 3, 22), ("between", 5, 22))),
        ("convolutions", CONVOLUTIONS, (("between", 0, 18), ("optimizer", 1, 18))),
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
        ("unet6", UNET6, "forward", (2, 3), 10), ("turned8", TURNED8, "data", (1, 4), 29),
        ("adapters8", ADAPTERS8, "backward", (0, 5, 6), 27),
    ):  # fmt: skip
        truth = at(where, *ranks, may_split=True)
        found.append(
            fault(f"{name} {where} of {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    return found


def list_causes() -> list[Case]:
    rows = replace(ADAPTERS5, options={"rows_of_rank": {}})
    pictures = replace(CONVOLUTIONS, options={**CONVOLUTIONS.options, "rows_of_rank": {}})
    metrics = replace(ADAPTERS5, layer_ms=3.5, options={"metrics": 60, "flat": True})
    small = Truth(kind="small operations", codes=("CO003",))
    many = plain("unet", 3, 34, num_layers=12, layer_ms=0.6, options={"fair": True})
    more = Truth(kind="more microbatches", codes=(*SLOW_CODES, "IM001"), ranks=(4,))
    # Seven lengths, each once in seven batches of a rank: 42 steps have the work of the twin.
    lines = plain("unet", 4, 42, num_layers=1, layer_ms=20.0, options={"lengths": 0})
    widths = replace(
        CONVOLUTIONS, num_microbatches=1, num_steps=56,
        options={**CONVOLUTIONS.options, "rows_of_rank": {0: 20, 1: 20}},
    )  # fmt: skip
    uneven_lengths = Truth(kind="uneven lengths", codes=("IM001",), is_uneven=True)
    hot = Truth(kind="hot expert", codes=(*SLOW_CODES, "IM001"), ranks=(2,))
    return [
        contrast("adapters5 batch of r1 is 12", cause("uneven batches", "batch", ranks=(1,)), rows,
                 rows_of_rank={1: 12}),
        contrast("convolutions batch of r0 is 14", cause("uneven batches", "batch", ranks=(0,)),
                 pictures, rows_of_rank={0: 14}),
        contrast("unet6 r4 accumulates 2 more", more, UNET6, extra={4: 2}),
        contrast("experts4 padding for r2", hot, EXPERTS4, padding={2: 4}),
        contrast("unet lengths of sequences", uneven_lengths, lines, lengths=43),
        contrast("convolutions widths of images", uneven_lengths, widths, lengths=47),
        contrast("adapters5 60 metrics one by one", small, metrics, flat=False),
        contrast("unet tiny buckets", small, many, bucket_mb=1e-4),
        contrast("convolutions no no_sync", cause("no_sync", "no_sync"),
                 replace(CONVOLUTIONS, num_microbatches=4,
                         options={**CONVOLUTIONS.options, "ballast": 1_500_000}), sync=True),
        contrast("convolutions unused head", cause("unused parameters", "unused"), CONVOLUTIONS,
                 aux=5_000_000),
        contrast("convolutions threads 7", cause("threads", "thread"),
                 replace(CONVOLUTIONS, num_microbatches=1, num_steps=26), threads=7),
        fault("fetched3 starved r1", FETCHED3,
              replace(at("data", 1), kind="starved loader"),
              Delay(where="data", ranks=(1,), ms=94)),
        fault("fetched3 starved all", FETCHED3,
              replace(all_at("data", 3), kind="starved loader"), Delay(where="data", ms=91)),
    ]  # fmt: skip


def list_numbers() -> list[Case]:
    """NaN from one rank's batch, a loss that jumps where the learning rate does, a leak."""
    found = []
    for name, program, rank, step in (
        ("unet4", UNET4, 2, 21), ("mixed3", MIXED3, 0, 16), ("adapters8", ADAPTERS8, 6, 19),
    ):  # fmt: skip
        truth = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(rank,), first_step=step)
        delay = Delay(where="nan_batch", ranks=(rank,), first=step, last=step)
        found.append(
            fault(f"{name} nan_batch r{rank} step {step}", program, truth, delay, is_timed=False)
        )
    jumps = replace(UNET4, num_steps=80, layer_ms=1.0, options={"rate": 36})
    return [
        *found,
        fault("unet4 spike at rate", jumps,
              cause("loss spike after a rate change", "learning rate"),
              Delay(where="spike", first=36, last=56), is_timed=False),
        fault("normed3 leak r2", NORMED3, leak(2),
              Delay(where="leak", ranks=(2,), leak_bytes=1_000_000), is_timed=False),
    ]  # fmt: skip


def list_stages() -> list[Case]:
    found = []
    for name, program, where, stage, ms in (
        ("bfs", BFS, "forward", 2, 2.5), ("dp2pp4", DP2PP4, "backward", 2, 4),
        ("pp5", PP5, "forward", 3, 3),
    ):  # fmt: skip
        ranks = list_ranks_of_stage(program, stage)
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks, may_split=True)
        found.append(
            fault(f"{name} stage {where} {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    optimizer = Truth(
        kind="slow optimizer of a stage", codes=STAGE_CODES, ranks=(1,), phase="optimizer"
    )
    return [
        *found,
        fault("pp5 optimizer of stage 1", PP5, optimizer,
              Delay(where="optimizer", ranks=(1,), ms=46)),
        fault("dp2pp4 forward r6", DP2PP4, *one("forward", 6, 6)),
        fault("bfs between r3", BFS, *one("between", 3, 48)),
    ]  # fmt: skip


def list_engine() -> list[Case]:
    found = []
    for name, config, where, rank, ms in (
        ("wide", ENGINE_WIDE, "backward", 6, 17), ("wide", ENGINE_WIDE, "data", 3, 22),
        ("zero", ENGINE_ZERO, "forward", 1, 24), ("torus", ENGINE_TORUS, "optimizer", 4, 42),
        ("cube", ENGINE_CUBE, "forward", 3, 3), ("model", ENGINE_MODEL, "optimizer", 1, 20),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        text = f"{kind} rank={rank} ms={ms}"
        found.append(with_faults(f"blind {name} {where} r{rank}", at(where, rank), config, text))
    for name, config, stage, where, ms in (
        ("torus", ENGINE_TORUS, 1, "forward", 3), ("h2", ENGINE_H2, 2, "weight_grad", 2.5),
        ("v", ENGINE_V, 1, "forward", 3), ("looped", ENGINE_LOOPED, 0, "backward", 3),
    ):  # fmt: skip
        truth = Truth(
            kind="slow stage", codes=STAGE_CODES, ranks=list_stage_ranks(config, stage),
            may_split=True,
        )  # fmt: skip
        text = f"slow pp={stage} phase={where} ms={ms}"
        found.append(with_faults(f"blind {name} stage {stage} {where}", truth, config, text))
    late = changed(at("backward", 2), is_uneven=True)
    pair = with_faults(
        "blind wide forward r1 and optimizer r5", at("forward", 1), ENGINE_WIDE,
        "slow phase=forward rank=1 ms=23", "slow phase=optimizer rank=5 ms=23",
    )  # fmt: skip
    return [
        *found,
        with_faults("blind zero backward r2 in 14-", late, ENGINE_ZERO,
                    "slow rank=2 phase=backward ms=40 steps=14-"),
        replace(pair, also=(at("optimizer", 5),)),
        with_faults("blind zero nan r3 step 18", replace(NAN, ranks=(3,), first_step=18),
                    ENGINE_ZERO, "nan rank=3 target=loss steps=18", is_timed=False),
        make_uneven(),
        make_few(),
    ]  # fmt: skip


def make_uneven() -> Case:
    even = timed(dp=2, pp=4, microbatches=14, num_layers=8, layer_ms=1.1, num_steps=20)
    faulty = replace(even, parallel=replace(even.parallel, stage_sizes=(2, 1, 2, 3)))
    return Case(
        name="blind uneven (2, 1, 2, 3) dp2", truth=uneven(3, *list_stage_ranks(even, 3)),
        faulty=Trained(config=faulty), clean=Trained(config=even),
    )  # fmt: skip


def make_few() -> Case:
    """The twin cuts the same work into twice as many, as the steady part does without dp."""
    few, enough = (
        Trained(
            config=timed(
                dp=2, pp=4, microbatches=count, num_layers=4, layer_ms=51.0 / count, num_steps=20
            )
        )
        for count in (3, 6)
    )
    return Case(
        name="blind 3 microbatches for 4 stages dp2", truth=TOO_FEW, faulty=few, clean=enough
    )


def list_links() -> list[Case]:
    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    return [
        with_link("blind turned22 group of 2-3", link("cp", 2, 3), Blind(program=TURNED22),
                  Link(axis="cp", ms=3, pair=(2, 3))),
        with_link("blind experts4 all of ep", link("ep"), Blind(program=EXPERTS4),
                  Link(axis="ep", ms=5)),
        with_link("blind torus link 2-4", link("pp", 2, 4), Trained(config=ENGINE_TORUS),
                  Link(axis="pp", ms=9, pair=(2, 4))),
        with_link("blind wide group of 1-5", link("dp", 1, 5), Trained(config=ENGINE_WIDE),
                  Link(axis="dp", ms=25, pair=(1, 5))),
    ]  # fmt: skip


def list_healthy() -> list[Case]:
    """As programs are, and near misses: less than 1 % of a step, or nothing that could be saved."""

    def run(name: str, program: Program, *delays: Delay, **options: Any) -> Case:
        told = replace(program, delays=delays, options={**program.options, **options})
        return healthy(f"blind near miss {name}", Blind(program=told))

    def others(program: Program, rank: int) -> tuple[int, ...]:
        return tuple(each for each in range(program.num_ranks) if each != rank)

    return [
        run("unet4 all backward", UNET4, Delay(where="backward", ms=14)),
        run("unet4 rate", replace(UNET4, num_steps=60, layer_ms=2.0), rate=30),
        run("unet6 two microbatches", replace(UNET6, num_microbatches=2)),
        run("unet8 r3 slower", UNET8, Delay(where="forward", ranks=(3,), ms=0.5)),
        run("fetched3 hidden", FETCHED3, Delay(where="data", ms=12)),
        run("fetched3 r2 hidden", FETCHED3, Delay(where="data", ranks=(2,), ms=16)),
        run("mixed3 fast r0 forward", MIXED3,
            Delay(where="forward", ranks=others(MIXED3, 0), ms=12)),
        run("mixed5 drift", MIXED5, Delay(where="backward", ranks=(4,), ms=0.8, shape="drift")),
        run("copies4 one microbatch", replace(COPIES4, num_microbatches=1, layer_ms=16.0)),
        run("copies6 all optimizer", COPIES6, Delay(where="optimizer", ms=11)),
        run("sequences2 one pause", SEQUENCES2,
            Delay(where="between", ranks=(1,), ms=14, first=23, last=23)),
        run("experts4 padding for all", EXPERTS4, padding={0: 2, 1: 2, 2: 2, 3: 2}),
        run("experts6 r5 optimizer", EXPERTS6, Delay(where="optimizer", ranks=(5,), ms=0.5)),
        run("momentum3 long keys", MOMENTUM3, keys=24.0),
        run("momentum7 saves once", MOMENTUM7,
            Delay(where="saving", ranks=(0,), ms=20, first=18, last=18)),
        run("gan2 all forward", GAN2, Delay(where="forward", ms=13)),
        run("gan5 long critic", GAN5, critic=15.0),
        run("rollouts3 long", ROLLOUTS3, rollout=60.0),
        run("rollouts6 fast r1 rollout", ROLLOUTS6,
            Delay(where="rollout", ranks=others(ROLLOUTS6, 1), ms=14)),
        run("owned4 jump", OWNED4,
            Delay(where="leak", ranks=(1,), first=19, last=19, leak_bytes=25_000_000)),
        run("owned7 backward in one step of 12", OWNED7,
            Delay(where="backward", ranks=(3,), ms=5, every=12)),
        run("central4 small update", CENTRAL4, Delay(where="update", ranks=(3,), ms=0.4)),
        run("central6 r2 slower", CENTRAL6, Delay(where="forward", ranks=(2,), ms=0.5)),
        run("normed3 4 metrics", NORMED3, metrics=4),
        run("normed6 writes in a thread", NORMED6, background=70),
        run("turned4 r3 data", TURNED4, Delay(where="data", ranks=(3,), ms=0.4)),
        run("turned8 all forward", TURNED8, Delay(where="forward", ms=16)),
        run("adapters5 evaluates once", replace(ADAPTERS5, layer_ms=16.0, num_steps=64),
            Delay(where="evaluation", ranks=(0,), ms=0.5, first=30, last=30)),
        run("adapters8 fast r7 backward", ADAPTERS8,
            Delay(where="backward", ranks=others(ADAPTERS8, 7), ms=15)),
        run("convolutions large batches", CONVOLUTIONS, rows_of_rank={0: 12, 1: 12}),
        run("convolutions deeper", replace(CONVOLUTIONS, num_layers=6)),
        run("convolutions four", replace(CONVOLUTIONS, num_microbatches=4, num_steps=30)),
        run("pp5 other microbatches", replace(PP5, options={**PP5.options, "microbatches": 24})),
        healthy("blind near miss engine v", Trained(config=replace(ENGINE_V, num_steps=28))),
        healthy("blind near miss engine h2", Trained(config=replace(ENGINE_H2, num_steps=24))),
        healthy("blind near miss engine model",
                Trained(config=replace(ENGINE_MODEL, num_steps=44))),
    ]  # fmt: skip

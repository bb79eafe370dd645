"""A sixth part of the fault matrix: scripts of other people, committed before rules were touched.

Recorded and judged once after the last change. `client_programs` has the scripts. New faults: a
rank that recovers, a drift downwards, pauses by chance, a noisy neighbour, a rank 10 % slow, two
slow ranks by different amounts, decoding that is slow half of the time, a large head on the last
stage, one rank that accumulates more, metrics summed one by one. Words for truths are those of
`fault_cases_trials`.
"""

from dataclasses import replace
from typing import Any

from benchmarks.client_programs import Client
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
from tests.distributed.fault_cases import healthy, timed, with_faults, with_link
from tests.distributed.fault_matrix import Case, Link
from tests.distributed.fault_verdict import Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout

IMAGES = plain("images", 2, 40, num_layers=3, options={"fair": True})
TEXT = plain("text", 2, 36, num_layers=2, num_microbatches=3, options={"fair": True})
SHARDED_TEXT = plain("text", 2, 36, num_layers=3, options={"fair": True, "sharded": True})
DDP3 = plain("blocks", 3, 44, num_layers=3, layer_ms=7.0, options={"ema": True, "bar": True})
DDP4 = plain("blocks", 4, 44, num_layers=2, layer_ms=11.0, options={"barrier": True})
DDP6 = plain("blocks", 6, 42, num_layers=2, layer_ms=12.0, optimizer_ms=3.0)
DDP8 = plain("blocks", 8, 40, num_layers=2, layer_ms=13.0, data_ms=2.0)
FSDP3 = plain("blocks", 3, 42, num_layers=2, layer_ms=11.0, options={"sharded": True})
FSDP4 = plain(
    "blocks", 4, 40, num_layers=2, layer_ms=13.0, options={"sharded": True, "barrier": True}
)
FETCHED = plain("fetched", 4, 44, num_layers=3, layer_ms=6.0)
LOCAL = plain("locally", 4, 48, num_layers=2, layer_ms=9.0)
DLRM4 = plain("recommender", 4, 42, layout=Layout(ep=4), num_layers=2, layer_ms=9.0)
DLRM6 = plain("recommender", 6, 40, layout=Layout(dp=2, ep=3), num_layers=2, layer_ms=10.0)
PP3 = plain(
    "stages", 3, 26, layout=Layout(pp=3), num_layers=3, layer_ms=3.0, options={"microbatches": 14}
)
PP4 = plain(
    "stages", 4, 24, layout=Layout(pp=4), num_layers=4, layer_ms=2.5,
    options={"microbatches": 18, "schedule": "ScheduleGPipe"},
)  # fmt: skip
DP2PP2 = plain(
    "stages", 4, 26, layout=Layout(dp=2, pp=2), num_layers=2, layer_ms=3.5,
    options={"microbatches": 9},
)  # fmt: skip
WOVEN = plain(
    "stages", 3, 24, layout=Layout(pp=3), num_layers=6, layer_ms=2.5,
    options={"schedule": "ScheduleInterleaved1F1B", "chunks": 2, "microbatches": 12},
)  # fmt: skip
ENGINE_SQUARE = timed(tp=2, pp=2, microbatches=7, num_layers=2, layer_ms=3.0, num_steps=24)
ENGINE_WOVEN = timed(
    pp=4, microbatches=12, num_layers=8, layer_ms=1.2, num_steps=22, schedule="interleaved_1f1b"
)
ENGINE_SHARDS = timed(dp=3, data_parallel="fsdp", num_layers=3, layer_ms=5.0, num_steps=36)

PART = Part("clients", Client)
fault, contrast = PART.fault, PART.contrast


def list_clients() -> list[Case]:
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
        ("images", IMAGES, "data", 1, 38), ("images", IMAGES, "between", 0, 34),
        ("text", TEXT, "forward", 0, 14), ("text", TEXT, "between", 1, 42),
        ("sharded text", SHARDED_TEXT, "optimizer", 1, 36),
        ("ddp3", DDP3, "optimizer", 2, 37), ("ddp4", DDP4, "saving", 0, 48),
        ("ddp6", DDP6, "data", 2, 52), ("ddp8", DDP8, "backward", 4, 47),
        ("fsdp3", FSDP3, "forward", 0, 39), ("fsdp4", FSDP4, "between", 3, 44),
        ("local", LOCAL, "data", 1, 33), ("dlrm4", DLRM4, "forward", 2, 35),
        ("dlrm6", DLRM6, "between", 5, 43), ("dlrm6", DLRM6, "data", 0, 37),
    ):  # fmt: skip
        truth, delay = one(where, rank, ms)
        if name == "local":
            truth = replace(truth, every=4)
        found.append(fault(f"{name} {where} r{rank}", program, truth, delay))
    # Two linear layers' work: a machine that is a tenth slower in all that it does.
    slower = tuple(Delay(where=where, ranks=(3,), ms=3.0) for where in ("forward", "backward"))
    local = replace(at("forward", 2), every=4)
    return [
        *found,
        fault("ddp8 r3 a tenth slower", DDP8, Truth(kind="a tenth slower", codes=SLOW_CODES,
              ranks=(3,)), *slower),
        fault("local forward r2", LOCAL, local, Delay(where="forward", ranks=(2,), ms=32)),
        fault("fetched decode r2", FETCHED,
              Truth(kind="slow fetching", codes=("IN001", "LT001", "ST001", "TI005"), ranks=(2,)),
              Delay(where="fetch", ranks=(2,), ms=85)),
        fault("ddp4 evaluation r0 every 6", DDP4, replace(at("evaluation", 0), every=6),
              Delay(where="evaluation", ranks=(0,), ms=190, every=6)),
        fault("images evaluation r0 every 5", IMAGES, replace(at("evaluation", 0), every=5),
              Delay(where="evaluation", ranks=(0,), ms=210, every=5)),
        fault("ddp6 saving r0 every 8", DDP6, replace(at("saving", 0), every=8),
              Delay(where="saving", ranks=(0,), ms=260, every=8)),
    ]  # fmt: skip


def list_everyone() -> list[Case]:
    found = []
    for name, program, where, ms, every in (
        ("images", IMAGES, "data", 31, 1), ("ddp3", DDP3, "evaluation", 170, 6),
        ("fsdp4", FSDP4, "saving", 46, 1), ("dlrm4", DLRM4, "between", 33, 1),
        ("text", TEXT, "between", 30, 1),
    ):  # fmt: skip
        truth = replace(all_at(where, program.num_ranks), every=every)
        found.append(
            fault(f"{name} all {where} {every}", program, truth,
                  Delay(where=where, ms=ms, every=every))
        )  # fmt: skip
    for name, program, where, ranks, every in (
        ("ddp4", DDP4, "gc_between", None, 5), ("fsdp3", FSDP3, "gc", (1,), 4),
        ("ddp6", DDP6, "gc_between", (5,), 3), ("dlrm4", DLRM4, "gc_between", None, 6),
    ):  # fmt: skip
        truth = Truth(
            kind="gc", codes=("PA001",), ranks=ranks or tuple(range(program.num_ranks)),
            is_everyone=ranks is None, every=every,
        )  # fmt: skip
        delay = Delay(where=where, ranks=ranks, every=every)
        case = fault(f"{name} {where} {ranks or 'all'} {every}", program, truth, delay)
        clean = Client(program=replace(program, delays=(replace(delay, first=NEVER),)))
        found.append(replace(case, clean=clean))
    return found


def list_changes() -> list[Case]:
    found = []
    for name, program, where, rank, ms, shape, first, last in (
        ("ddp4", DDP4, "forward", 2, 80, "down", 0, None),
        ("fsdp3", FSDP3, "backward", 1, 75, "down", 0, None),
        ("ddp6", DDP6, "backward", 1, 58, "steady", 0, 20),
        ("dlrm4", DLRM4, "forward", 3, 62, "steady", 0, 23),
        ("ddp8", DDP8, "data", 6, 70, "half", 0, None),
        ("ddp3", DDP3, "forward", 1, 42, "noisy", 0, None),
        ("fsdp4", FSDP4, "forward", 0, 40, "noisy", 0, None),
        ("text", TEXT, "between", 0, 55, "half", 0, None),
        ("ddp4", DDP4, "optimizer", 3, 75, "swing", 0, None),
    ):  # fmt: skip
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first, last=last)
        after = "" if last is None else f" until {last}"
        found.append(
            fault(f"{name} {where} r{rank} {shape}{after}", program, changing(where, rank), delay)
        )
    chance = Truth(kind="pauses by chance", codes=(*CHANGING_CODES, "TI002"), ranks=(1,),
                   is_uneven=True)  # fmt: skip
    nodes = replace(changing("data", 0), ranks=(0, 1), may_split=True)
    return [
        *found,
        fault("ddp6 pause r1 by chance", DDP6, chance,
              Delay(where="pause", ranks=(1,), ms=150, shape="chance")),
        fault("fsdp4 pause r1 by chance", FSDP4, chance,
              Delay(where="pause", ranks=(1,), ms=170, shape="chance")),
        fault("ddp4 data of (0, 1) half", DDP4, nodes,
              Delay(where="data", ranks=(0, 1), ms=64, shape="half")),
    ]  # fmt: skip


def list_several() -> list[Case]:
    several: tuple[tuple[str, Program, tuple[tuple[str, int, float], ...]], ...] = (
        ("ddp8", DDP8, (("forward", 2, 52), ("forward", 5, 34))),
        ("ddp6", DDP6, (("backward", 0, 46), ("saving", 4, 46))),
        ("ddp3", DDP3, (("data", 1, 34), ("between", 0, 34))),
        ("fsdp4", FSDP4, (("optimizer", 1, 40), ("data", 3, 40))),
        ("dlrm6", DLRM6, (("forward", 1, 41), ("optimizer", 3, 41))),
        ("images", IMAGES, (("data", 0, 36), ("optimizer", 1, 36))),
    )  # fmt: skip
    return [
        fault(
            f"{name} {' and '.join(f'{where} r{rank} {ms}' for where, rank, ms in parts)}",
            program,
            [one(*part)[0] for part in parts],
            *(one(*part)[1] for part in parts),
        )
        for name, program, parts in several
    ]


def list_causes() -> list[Case]:
    synced = replace(TEXT, num_microbatches=4)
    lengths = replace(SHARDED_TEXT, num_steps=56, options={**SHARDED_TEXT.options, "lengths": 0})
    metrics = replace(DDP6, layer_ms=2.0, options={"metrics": 60, "flat": True})
    rows = replace(DDP3, options={**DDP3.options, "rows_of_rank": {}})
    images = replace(IMAGES, options={**IMAGES.options, "rows_of_rank": {}})
    nan = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(1,), first_step=19)
    # The drawn lengths are 53.6 on average and the twin's are 48: it has a tenth less work as well,
    # so what it saves is not what even lengths do, and the case has no price.
    uneven = replace(
        contrast("sharded text lengths in buckets",
                 Truth(kind="uneven lengths", codes=("IM001",), is_uneven=True), lengths,
                 lengths=41),
        is_timed=False,
    )  # fmt: skip
    more = Truth(kind="more microbatches", codes=(*SLOW_CODES, "IM001"), ranks=(1,))
    leak = Truth(kind="leak", codes=("ME001",), ranks=(0,))
    return [
        contrast("text no no_sync 4", cause("no_sync", "no_sync"), synced, sync=True),
        contrast("images unused head", cause("unused parameters", "unused"), IMAGES,
                 aux=4_000_000),
        contrast("text threads 6", cause("threads", "thread"), TEXT, threads=6),
        contrast("ddp3 batch of r0 is 15", cause("uneven batches", "batch", ranks=(0,)), rows,
                 rows_of_rank={0: 15}),
        contrast("images batch of r1 is 24", cause("uneven batches", "batch", ranks=(1,)), images,
                 rows_of_rank={1: 24}),
        contrast("text r1 accumulates 2 more", more, TEXT, extra={1: 2}),
        uneven,
        contrast("ddp6 60 metrics one by one", Truth(kind="small operations", codes=("CO003",)),
                 metrics, flat=False),
        fault("images nan_batch r1", IMAGES, nan,
              Delay(where="nan_batch", ranks=(1,), first=19, last=19), is_timed=False),
        # What is kept is computed after the step, 5.5 ms of a convolution: a second thing to say.
        fault("images losses kept r0", IMAGES, (leak, at("between", 0)),
              Delay(where="leak", ranks=(0,)), is_timed=False),
    ]  # fmt: skip


def list_stages() -> list[Case]:
    found = []
    for name, program, where, stage, ms in (
        ("pp4", PP4, "forward", 3, 5), ("dp2pp2", DP2PP2, "backward", 0, 6),
        ("woven", WOVEN, "forward", 1, 5),
    ):  # fmt: skip
        ranks = list_ranks_of_stage(program, stage)
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks)
        found.append(
            fault(f"{name} stage {where} {ranks}", program, truth,
                  Delay(where=where, ranks=ranks, ms=ms))
        )  # fmt: skip
    head = Truth(kind="uneven stages", codes=STAGE_CODES, ranks=(2,))
    # The twin has no head: it says what removing that work saves (170 ms), not what balancing the
    # stages does, so the case has no price.
    uneven = replace(contrast("pp3 head of 6 ms", head, PP3, head=6.0), is_timed=False)
    return [
        *found,
        uneven,
        fault("pp3 saving r0", PP3, *one("saving", 0, 54)),
        fault("pp4 data r0", PP4, *one("data", 0, 56)),
        fault("woven between r2", WOVEN, *one("between", 2, 47)),
        fault("dp2pp2 backward r3", DP2PP2, *one("backward", 3, 9)),
    ]


def list_engine() -> list[Case]:
    found = []
    for name, config, where, rank, ms in (
        ("square", ENGINE_SQUARE, "optimizer", 3, 44), ("shards", ENGINE_SHARDS, "data", 2, 41),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        text = f"{kind} rank={rank} ms={ms}"
        found.append(with_faults(f"clients {name} {where} r{rank}", at(where, rank), config, text))
    stage = Truth(
        kind="slow stage", codes=STAGE_CODES, ranks=list_stage_ranks(ENGINE_WOVEN, 2),
        may_split=True,
    )  # fmt: skip
    recovers = changed(at("backward", 0), is_uneven=True)
    return [
        *found,
        with_faults("clients woven stage 2 backward", stage, ENGINE_WOVEN,
                    "slow pp=2 phase=backward ms=5"),
        with_faults("clients shards backward r0 until 17", recovers, ENGINE_SHARDS,
                    "slow rank=0 phase=backward ms=60 steps=0-17"),
    ]  # fmt: skip


def list_links() -> list[Case]:
    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    return [
        with_link("clients dlrm4 all of ep", link("ep"), Client(program=DLRM4),
                  Link(axis="ep", ms=11)),
        with_link("clients dlrm6 group of 3-5", link("ep", 3, 4, 5), Client(program=DLRM6),
                  Link(axis="ep", ms=12, pair=(3, 4, 5))),
    ]  # fmt: skip


def list_healthy() -> list[Case]:
    """As scripts are, and near misses: 2 % of a step or less, or nothing that could be saved."""

    def run(name: str, program: Program, *delays: Delay, **options: Any) -> Case:
        told = replace(program, delays=delays, options={**program.options, **options})
        return healthy(f"clients near miss {name}", Client(program=told))

    # Written as a near miss. With the model's own 22 ms it takes 29 in every 11th step, 4.6 % of a
    # step, which is no small thing: what has to be said is that it evaluates.
    evaluation = run("ddp4 short evaluation", DDP4,
                     Delay(where="evaluation", ranks=(0,), ms=6, every=11))  # fmt: skip
    others = (0, 1, 2, 4, 5)
    return [
        replace(evaluation, truth=at("evaluation", 0)),
        run("images profiled", IMAGES, profiled=True),
        run("ddp3 profiled", DDP3, profiled=True),
        run("ddp3 mixed buckets", DDP3, bucket_mb=0.004),
        run("ddp6 saves once", DDP6, Delay(where="saving", ranks=(0,), ms=30, first=20, last=20)),
        run("ddp8 r1 1 % slower", DDP8, Delay(where="forward", ranks=(1,), ms=0.5)),
        run("ddp6 fast r3 backward", DDP6, Delay(where="backward", ranks=others, ms=16)),
        run("fsdp3 all forward", FSDP3, Delay(where="forward", ms=18)),
        run("fetched hides 8 ms", FETCHED, Delay(where="fetch", ms=8)),
        run("local drift", LOCAL, Delay(where="forward", ranks=(3,), ms=0.8, shape="drift")),
        run("dlrm4 4 metrics", DLRM4, metrics=4),
        run("pp3 small head", PP3, head=0.1),
        run("text same microbatches more", TEXT, extra={0: 1, 1: 1}),
        run("images large batches", IMAGES, rows_of_rank={0: 20, 1: 20}),
    ]  # fmt: skip

"""The older half of the fault matrix: one steady fault, on many layouts, schedules and programs.

The test suite's cases (`tests/distributed/fault_cases.py`) are its beginning.
"""

from dataclasses import replace

from tests.distributed.fault_cases import (
    HEALTHY,
    NAN,
    NAN_GRADIENT,
    SMALL,
    TOO_FEW,
    engine,
    healthy,
    leak,
    pauses,
    slow,
    slow_link,
    slow_loader,
    slow_stage,
    timed,
    uneven,
    with_delays,
    with_faults,
    with_link,
)
from tests.distributed.fault_matrix import Case, Link, Scripted, Trained
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout


def list_steady() -> list[Case]:
    return [
        *list_simple(),
        *list_slow_ranks(),
        *list_mesh_ranks(),
        *list_stages(),
        *list_uneven(),
        *list_few_microbatches(),
        *list_links(),
        *list_loaders(),
        *list_pauses(),
        *list_memory(),
        *list_nan(),
        *list_models(),
        *list_plain_data_parallel(),
        *list_plain_models(),
        *list_rooted(),
        *list_healthy(),
    ]


def list_rooted() -> list[Case]:
    """Sums of gradients that go over one rank, whose own delay is the hardest to see."""
    found = []
    for via, ranks in (
        ("root", (1, 2)),
        ("gathered", (0, 3)),
        ("along", (1, 3)),
        ("anyone", (0, 3)),
    ):
        program = Program(
            loop="summed", num_ranks=4, layer_ms=4.0, options={"flat": True, "via": via}
        )
        for rank in ranks:
            truth = replace(slow(rank, "forward"), codes=("ST001", "LT001"))
            delay = Delay(where="forward", ranks=(rank,), ms=25)
            found.append(with_delays(f"forward r{rank} with sums {via}", truth, program, delay))
    return found


def list_simple() -> list[Case]:
    """One of each of a few kinds."""
    config = timed(dp=4, data_parallel="ddp", num_layers=2, layer_ms=4.0, num_steps=21)
    model = engine(SMALL, dp=2, data_parallel="ddp", microbatch_size=4, num_steps=20)
    tp = Program(loop="tp", num_ranks=4, layout=Layout(dp=2, tp=2), num_steps=20)
    row = Program(
        loop="pipeline", num_ranks=3, layout=Layout(pp=3), num_microbatches=12, num_steps=14
    )
    row = replace(row, num_layers=3, layer_ms=2.0, options={"schedule": "1f1b"})
    everyone = slow_loader(0, 1, 2, 3, all_ranks=True)
    return [
        with_faults("loaders", everyone, config, "stalled_loader ms=50"),
        with_faults("dp_model", slow(0, "forward"), model, "slow rank=0 phase=forward ms=80"),
        with_delays("plain_tp", slow(2, "forward"), tp, Delay(where="forward", ranks=(2,), ms=50)),
        with_delays("plain_stage", slow_stage(1, 1), row, Delay(where="forward", ranks=(1,), ms=7)),
    ]


def list_slow_ranks() -> list[Case]:
    """One slow rank among data-parallel ones."""
    cases = []
    for dp, kind, delays in (
        (2, "ddp", {"forward": 30, "backward": 60}),
        (3, "reducer", {"backward": 40, "optimizer": 30}),
        (4, "fsdp", {"forward": 60, "backward": 80}),
        (6, "ddp", {"forward": 40, "backward": 30, "optimizer": 50}),
        (8, "reducer", {"forward": 30, "backward": 50, "optimizer": 40}),
    ):
        config = timed(dp=dp, data_parallel=kind, num_steps=35)
        for place, (phase, ms) in enumerate(delays.items()):
            rank = (2 * place + 1) % dp
            text = f"slow rank={rank} phase={phase} ms={ms}"
            cases.append(
                with_faults(f"slow {kind} dp{dp} {phase}", slow(rank, phase), config, text)
            )
    return cases


def list_mesh_ranks() -> list[Case]:
    """One slow rank of a mesh with stages."""
    cases = []
    for dp, tp, pp, rank, phase, schedule in (
        (2, 1, 2, 3, "backward", "1f1b"),
        (2, 1, 2, 0, "forward", "gpipe"),
        (2, 1, 3, 4, "forward", "1f1b"),
        (4, 1, 2, 1, "forward", "1f1b"),
        (2, 2, 2, 6, "backward", "1f1b"),
        (2, 2, 2, 3, "forward", "zb_h1"),
        (2, 1, 4, 5, "backward", "interleaved_1f1b"),
    ):
        config = timed(
            dp=dp, tp=tp, pp=pp, microbatches=4 * pp, num_layers=8 if pp == 4 else 2 * pp,
            layer_ms=1.0, num_steps=25, schedule=schedule,
        )  # fmt: skip
        name = f"slow rank {rank} of {dp}x{tp}x{pp} {schedule} {phase}"
        text = f"slow rank={rank} phase={phase} ms=5"
        cases.append(with_faults(name, slow(rank, phase), config, text))
    return cases


def list_stages() -> list[Case]:
    """All ranks of a stage are slow."""
    cases = []
    for pp, dp, stage, phase, schedule, ms in (
        (2, 1, 1, "forward", "1f1b", 6),
        (2, 2, 0, "backward", "1f1b", 6),
        (3, 1, 2, "backward", "gpipe", 6),
        (4, 1, 1, "forward", "1f1b", 5),
        (4, 1, 3, "forward", "gpipe", 5),
        (4, 2, 2, "backward", "1f1b", 5),
        (4, 1, 2, "forward", "zb_h1", 6),
    ):
        config = timed(
            dp=dp, pp=pp, microbatches=4 * pp, num_layers=2 * pp, layer_ms=1.0, num_steps=25,
            schedule=schedule,
        )  # fmt: skip
        ranks = [rank for rank in range(dp * pp) if config.layout.coordinates(rank).pp == stage]
        name = f"slow stage {stage} of {dp}x1x{pp} {schedule} {phase}"
        text = f"slow pp={stage} phase={phase} ms={ms}"
        cases.append(with_faults(name, slow_stage(stage, *ranks), config, text))
    return cases


def list_uneven() -> list[Case]:
    """One stage holds more layers than the others."""
    cases = []
    for dp, sizes, schedule in (
        (1, (4, 2), "1f1b"),
        (1, (2, 6), "gpipe"),
        (2, (5, 1), "1f1b"),
        (1, (2, 5, 2), "1f1b"),
        (1, (1, 1, 1, 5), "1f1b"),
        (1, (4, 2, 1, 1), "gpipe"),
    ):
        pp = len(sizes)
        config = timed(
            dp=dp, pp=pp, microbatches=4 * pp, num_layers=sum(sizes), layer_ms=1.0, num_steps=25,
            schedule=schedule,
        )  # fmt: skip
        stage = sizes.index(max(sizes))
        ranks = [rank for rank in range(dp * pp) if config.layout.coordinates(rank).pp == stage]
        faulty = replace(config, parallel=replace(config.parallel, stage_sizes=sizes))
        cases.append(
            Case(
                name=f"uneven {sizes} dp{dp} {schedule}",
                truth=uneven(stage, *ranks),
                faulty=Trained(config=faulty),
                clean=Trained(config=config),
            )
        )
    return cases


def list_few_microbatches() -> list[Case]:
    """The clean twin cuts the same work into as many microbatches as the finding advises."""
    cases = []
    for dp, pp, few, enough, schedule in (
        (1, 2, 1, 3, "1f1b"),
        (1, 2, 2, 4, "gpipe"),
        (1, 3, 2, 6, "1f1b"),
        (2, 2, 1, 3, "1f1b"),
        (1, 4, 3, 6, "1f1b"),
    ):
        runs = [
            Trained(
                config=timed(
                    dp=dp, pp=pp, microbatches=count, num_layers=pp, layer_ms=48.0 / count,
                    num_steps=20, schedule=schedule,
                )
            )
            for count in (few, enough)
        ]  # fmt: skip
        name = f"{few} microbatches for {pp} stages dp{dp} {schedule}"
        cases.append(Case(name=name, truth=TOO_FEW, faulty=runs[0], clean=runs[1]))
    return cases


def list_links() -> list[Case]:
    """One link of an axis, a whole axis, and delays before operations by the engine's injector."""
    grid = timed(dp=2, pp=2, microbatches=8, layer_ms=1.0, num_steps=25)
    row = timed(pp=4, microbatches=16, num_layers=8, layer_ms=1.0, num_steps=25)
    tp = Program(loop="tp", num_ranks=4, layout=Layout(dp=2, tp=2), num_steps=30)
    return [
        with_link(
            "link 2-3 of dp", slow_link("dp", 2, 3), Trained(config=grid),
            Link(axis="dp", ms=40, pair=(2, 3)),
        ),
        with_link("all of dp", slow_link("dp"), Trained(config=grid), Link(axis="dp", ms=30)),
        with_link(
            "link 1-2 of pp", slow_link("pp", 1, 2), Trained(config=row),
            Link(axis="pp", ms=6, pair=(1, 2)),
        ),
        with_link(
            "link 0-1 of pp", slow_link("pp", 0, 1), Trained(config=row),
            Link(axis="pp", ms=8, pair=(0, 1)),
        ),
        with_link(
            "link 0-1 of tp, plain", slow_link("tp", 0, 1), Scripted(program=tp),
            Link(axis="tp", ms=5, pair=(0, 1)),
        ),
        with_link(
            "all of tp, model", slow_link("tp"),
            Trained(config=engine(SMALL, tp=2, microbatch_size=4)), Link(axis="tp", ms=2),
        ),
        with_faults("injected along dp", slow_link("dp"), grid, "slow_link axis=dp ms=20"),
        with_faults("injected 0-1", slow_link("dp", 0, 1), grid, "slow_link link=0-1 ms=20"),
    ]  # fmt: skip


def list_loaders() -> list[Case]:
    cases = []
    for dp, pp, ranks, ms in ((2, 1, (0,), 30), (6, 1, (4,), 20), (3, 1, (1,), 60)):
        config = timed(dp=dp, pp=pp, data_parallel="ddp", num_steps=35)
        text = f"stalled_loader rank={ranks[0]} ms={ms}"
        cases.append(with_faults(f"loader dp{dp}", slow_loader(*ranks), config, text))
    for dp, ms in ((2, 40), (6, 25)):
        config = timed(dp=dp, data_parallel="ddp", num_steps=35)
        truth = slow_loader(*range(dp), all_ranks=True)
        cases.append(with_faults(f"loaders dp{dp}", truth, config, f"stalled_loader ms={ms}"))
    return cases


def list_pauses() -> list[Case]:
    config = timed(dp=4, data_parallel="ddp", num_steps=41)
    cases = [
        with_faults(
            f"pauses of {ms} ms every {every}",
            pauses(rank, every, is_collection=False),
            config,
            f"gc_pause rank={rank} ms={ms} steps=*/{every}",
        )
        for rank, ms, every in ((2, 100, 4), (0, 150, 5), (3, 200, 8))
    ]
    for rank, phase, every in ((1, "forward", 5), (2, "optimizer", 4)):
        text = f"gc_pause rank={rank} objects=150000 steps=*/{every} phase={phase}"
        truth = pauses(rank, every, is_collection=True)
        cases.append(with_faults(f"collections in {phase}", truth, config, text))
    return cases


def list_memory() -> list[Case]:
    config = timed(dp=3, data_parallel="ddp", layer_ms=5.0, num_steps=60)
    return [
        with_faults(f"leak of {mb} MB", leak(rank), config, text, is_timed=False)
        for rank, mb, text in (
            (0, 1, "leak rank=0 mb=1"),
            (2, 0.6, "leak rank=2 mb=0.6"),
            (1, 2, "leak rank=1 mb=4 steps=*/2"),
        )
    ] + [
        with_faults(f"jump of {text}", HEALTHY, config, f"leak {text}", is_timed=False)
        for text in ("rank=0 mb=300 steps=20", "mb=80 steps=40", "rank=1 mb=120 steps=50")
    ]


def list_nan() -> list[Case]:
    config = timed(dp=2, pp=2, microbatches=4, layer_ms=1.0, num_steps=25)
    return [
        with_faults(f"nan {text}", truth, config, f"nan {text}", is_timed=False)
        for truth, text in (
            (NAN, "rank=2 target=loss steps=10"),
            (NAN, "pp=0 dp=1 target=activation steps=15"),
            (NAN_GRADIENT, "rank=1 target=gradient steps=5-"),
        )
    ]


def list_models() -> list[Case]:
    """Real transformers, as many ranks as the smallest machine has cores."""
    larger = replace(SMALL, num_layers=6, hidden_size=96, ffn_hidden_size=192)
    tp, dp = engine(larger, tp=2, microbatch_size=4), engine(larger, dp=2, microbatch_size=4)
    pp = engine(larger, pp=2, microbatches=8, microbatch_size=2)
    return [
        with_faults("model tp2 forward", slow(0, "forward"), tp, "slow rank=0 phase=forward ms=60"),
        with_faults(
            "model dp2 backward", slow(1, "backward"), dp, "slow rank=1 phase=backward ms=60"
        ),
        with_faults(
            "model dp2 optimizer", slow(0, "optimizer"), dp, "slow rank=0 phase=optimizer ms=60"
        ),
        with_faults("model pp2", slow_stage(1, 1), pp, "slow pp=1 phase=forward ms=15"),
    ]


def list_plain_data_parallel() -> list[Case]:
    """DDP and FSDP2 without the engine."""
    cases = []
    for loop, num_ranks, where, rank, ms, count in (
        ("ddp", 2, "forward", 1, 20, 1),
        ("ddp", 4, "backward", 2, 30, 1),
        ("ddp", 6, "optimizer", 5, 25, 1),
        ("ddp", 4, "forward", 3, 15, 3),
        ("ddp", 4, "backward", 0, 15, 4),
        ("fsdp", 3, "forward", 2, 40, 1),
        ("fsdp", 4, "backward", 1, 40, 1),
        ("fsdp", 2, "optimizer", 0, 40, 1),
    ):
        program = Program(
            loop=loop, num_ranks=num_ranks, num_steps=35, num_microbatches=count,
            layer_ms=3.0 / count,
        )  # fmt: skip
        name = f"plain {loop} {num_ranks} {where} m{count}"
        delay = Delay(where=where, ranks=(rank,), ms=ms)
        cases.append(with_delays(name, slow(rank, where), program, delay))
    program = Program(loop="ddp", num_ranks=4, num_steps=35)
    everyone = slow_loader(0, 1, 2, 3, all_ranks=True)
    return [
        *cases,
        with_delays(
            "plain loader", slow_loader(3), program, Delay(where="data", ranks=(3,), ms=30)
        ),
        with_delays("plain loaders", everyone, program, Delay(where="data", ms=30)),
        with_delays(
            "plain nan", NAN, program, Delay(where="nan", ranks=(1,), first=15, last=15),
            is_timed=False,
        ),
        with_delays(
            "plain pauses", pauses(2, 5, is_collection=False), replace(program, num_steps=41),
            Delay(where="pause", ranks=(2,), ms=120, every=5),
        ),
    ]  # fmt: skip


def list_plain_models() -> list[Case]:
    """Tensor parallel and pipelines by hand."""
    tp = Program(loop="tp", num_ranks=4, layout=Layout(dp=2, tp=2), num_steps=30)
    wide = replace(tp, layout=Layout(tp=4))
    untold = replace(tp, options={"untold": True})
    row = Program(
        loop="pipeline", num_ranks=4, layout=Layout(pp=4), num_microbatches=16, layer_ms=2.0,
        num_steps=20, options={"schedule": "1f1b"},
    )  # fmt: skip
    blocking = replace(row, options={})
    grid = replace(row, layout=Layout(dp=2, pp=2), num_microbatches=8, num_layers=4)
    cases = [
        with_delays(f"{name} {where}", slow(rank, where), program,
                    Delay(where=where, ranks=(rank,), ms=ms))
        for name, program, where, rank, ms in (
            ("plain tp 2x2", tp, "backward", 3, 40),
            ("plain tp 1x4", wide, "forward", 2, 40),
            ("plain tp 1x4", wide, "optimizer", 1, 40),
            ("plain tp untold", untold, "forward", 0, 40),
            ("plain grid", grid, "forward", 1, 8),
            ("plain grid", grid, "backward", 2, 8),
        )
    ]  # fmt: skip
    cases += [
        with_delays(f"{name} stage {stage} {where}", slow_stage(stage, stage), program,
                    Delay(where=where, ranks=(stage,), ms=5))
        for name, program, where, stage in (
            ("plain 1f1b", row, "backward", 1),
            ("plain gpipe", blocking, "forward", 2),
        )
    ]  # fmt: skip
    sizes = (3, 1, 1, 1)
    return [
        *cases,
        Case(
            name="plain 1f1b uneven",
            truth=uneven(0, 0),
            faulty=Scripted(program=replace(row, stage_sizes=sizes)),
            clean=Scripted(program=replace(row, stage_sizes=(2, 2, 1, 1))),
        ),
    ]


def list_healthy() -> list[Case]:
    """Layouts that no case above has; twins are judged besides."""
    runs = {
        "1x1x1": Trained(config=timed(num_steps=40)),
        "dp8": Trained(config=timed(dp=8, data_parallel="ddp")),
        "4x1x2": Trained(config=timed(dp=4, pp=2, microbatches=8, layer_ms=1.0, num_steps=25)),
        "1x2x2": Trained(config=timed(tp=2, pp=2, microbatches=8, layer_ms=1.0, num_steps=25)),
        "zb_v": Trained(
            config=timed(pp=2, microbatches=8, num_layers=8, layer_ms=1.0, schedule="zb_v")
        ),
        "model 1": Trained(config=engine(SMALL, microbatch_size=8)),
        "model zero1": Trained(
            config=engine(SMALL, dp=2, data_parallel="fsdp", zero_stage=1, microbatch_size=4)
        ),
        "plain 1": Scripted(program=Program(loop="ddp", num_ranks=1)),
        "plain ddp8": Scripted(program=Program(loop="ddp", num_ranks=8)),
        "plain fsdp6": Scripted(program=Program(loop="fsdp", num_ranks=6)),
    }
    return [healthy(f"healthy {name}", recipe) for name, recipe in runs.items()]

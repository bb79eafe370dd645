"""The newer half of the fault matrix on the engine: meshes, two faults at once, faults that change.

Written before any rule knew of them, as `fault_cases_trials`, which has the words for truths.
"""

from dataclasses import replace

from benchmarks.fault_cases_trials import CHANGING_CODES, STAGE_CODES, at
from tests.distributed.fault_cases import (
    SMALL,
    engine,
    healthy,
    timed,
    with_faults,
    with_link,
)
from tests.distributed.fault_matrix import Case, Link, Trained
from tests.distributed.fault_verdict import Truth

from meshscope.core.config.train_config import TrainConfig

CUBE = timed(dp=2, tp=2, pp=2, microbatches=8, layer_ms=1.0, num_steps=30)
GRID = timed(dp=2, pp=2, microbatches=8, layer_ms=1.0, num_steps=30)
TALL = timed(tp=2, pp=4, microbatches=16, num_layers=4, layer_ms=1.0, num_steps=20)
WIDE = timed(dp=4, tp=2, data_parallel="ddp", num_layers=2, layer_ms=4.0, num_steps=30)
ROW = timed(pp=4, microbatches=16, num_layers=4, layer_ms=1.5, num_steps=24)
COUPLE = timed(pp=2, microbatches=8, num_layers=4, layer_ms=1.5, num_steps=30)
FLAT = timed(dp=4, data_parallel="ddp", num_layers=2, layer_ms=4.0, num_steps=45)
SHARDED = timed(dp=4, data_parallel="fsdp", num_layers=2, layer_ms=4.0, num_steps=40)
TURNED = timed(
    dp=2, tp=2, pp=2, order=("dp", "tp", "pp"), microbatches=8, layer_ms=1.0, num_steps=24
)
"""Pipeline neighbours are consecutive ranks."""
MODEL = engine(SMALL, dp=2, data_parallel="ddp", microbatch_size=4, num_steps=40)
LINKED = timed(dp=2, tp=2, pp=2, microbatches=4, layer_ms=2.0, num_steps=24)


def list_engine_trials() -> list[Case]:
    return [
        *list_meshes(),
        *list_stage_faults(),
        *list_pairs(),
        *list_changes(),
        *list_links(),
    ]


def changed(truth: Truth, **values: object) -> Truth:
    """Of a fault that is not the same in every step."""
    codes = (*truth.codes, *CHANGING_CODES, "TI002")
    return replace(truth, codes=tuple(dict.fromkeys(codes)), **values)  # type: ignore[arg-type]


def list_meshes() -> list[Case]:
    """One slow rank of a mesh."""
    cases = []
    for name, config, where, rank, ms in (
        ("cube", CUBE, "forward", 1, 6), ("cube", CUBE, "backward", 6, 6),
        ("cube", CUBE, "optimizer", 3, 40), ("cube", CUBE, "data", 0, 40),
        ("turned", TURNED, "forward", 4, 6), ("turned", TURNED, "optimizer", 1, 40),
        ("wide", WIDE, "forward", 5, 40), ("wide", WIDE, "backward", 2, 40),
        ("wide", WIDE, "data", 6, 40), ("sharded", SHARDED, "optimizer", 2, 40),
        ("sharded", SHARDED, "data", 1, 40), ("model", MODEL, "forward", 1, 40),
    ):  # fmt: skip
        kind = "stalled_loader" if where == "data" else f"slow phase={where}"
        truth = at(where, rank)
        cases.append(
            with_faults(
                f"engine {name} {where} r{rank}", truth, config, f"{kind} rank={rank} ms={ms}"
            )
        )
    return cases


def list_stage_ranks(config: TrainConfig, stage: int) -> tuple[int, ...]:
    layout = config.layout
    return tuple(r for r in range(layout.world_size) if layout.coordinates(r).pp == stage)


def list_stage_faults() -> list[Case]:
    """A stage's forward, backward or optimizer, and two stages."""
    cases = []
    for name, config, stages, where, ms in (
        ("cube", CUBE, (1,), "forward", 6), ("tall", TALL, (2,), "forward", 4),
        ("tall", TALL, (1,), "backward", 4), ("turned", TURNED, (0,), "backward", 6),
        ("row", ROW, (1,), "optimizer", 40), ("couple", COUPLE, (0,), "optimizer", 40),
        ("cube", CUBE, (1,), "optimizer", 40), ("grid", GRID, (0,), "optimizer", 40),
        ("tall", TALL, (3,), "optimizer", 40), ("row", ROW, (1, 2), "forward", 6),
        ("row", ROW, (0, 3), "backward", 6), ("tall", TALL, (0, 2), "forward", 5),
    ):  # fmt: skip
        truths = [
            Truth(
                kind="two slow stages" if len(stages) > 1 else
                ("slow optimizer of a stage" if where == "optimizer" else "slow stage"),
                codes=STAGE_CODES, ranks=list_stage_ranks(config, stage),
                phase="optimizer" if where == "optimizer" else None, may_split=True,
            )
            for stage in stages
        ]  # fmt: skip
        texts = [f"slow pp={stage} phase={where} ms={ms}" for stage in stages]
        case = with_faults(f"engine {name} stage {stages} {where}", truths[0], config, *texts)
        cases.append(replace(case, also=tuple(truths[1:])))
    return cases


def list_pairs() -> list[Case]:
    """Two ranks, two places."""
    cases = []
    for name, config, first, second in (
        ("cube", CUBE, ("forward", 1, 6), ("data", 6, 45)),
        ("cube", CUBE, ("forward", 0, 6), ("optimizer", 7, 45)),
        ("flat", FLAT, ("forward", 1, 40), ("data", 3, 40)),
        ("flat", FLAT, ("backward", 0, 40), ("optimizer", 2, 40)),
        ("wide", WIDE, ("forward", 1, 40), ("backward", 6, 40)),
        ("sharded", SHARDED, ("forward", 0, 40), ("data", 3, 40)),
        ("grid", GRID, ("forward", 3, 6), ("data", 0, 45)),
    ):
        texts = [
            f"{'stalled_loader' if where == 'data' else f'slow phase={where}'} rank={rank} ms={ms}"
            for where, rank, ms in (first, second)
        ]
        name = f"engine {name} {first[0]} r{first[1]} and {second[0]} r{second[1]}"
        case = with_faults(name, at(first[0], first[1]), config, *texts)
        cases.append(replace(case, also=(at(second[0], second[1]),)))
    for name, config, where, ranks, ms in (
        ("flat", FLAT, "forward", (0, 2), 40),
        ("cube", CUBE, "forward", (2, 5), 6),
    ):
        texts = [f"slow phase={where} rank={rank} ms={ms}" for rank in ranks]
        truth = at(where, *ranks, may_split=True)
        cases.append(with_faults(f"engine {name} {where} of {ranks}", truth, config, *texts))
    return cases


def list_changes() -> list[Case]:
    """Onset, bursts, every n-th step, a drift in steps."""
    cases = []
    for name, config, rank, ms, steps in (
        ("cube", CUBE, 3, 8, "15-"), ("cube", CUBE, 5, 8, "5-9,18-22"),
        ("flat", FLAT, 2, 45, "20-"), ("flat", FLAT, 0, 60, "5-9,20-24,35-39"),
        ("sharded", SHARDED, 1, 45, "15-"), ("wide", WIDE, 4, 45, "12-"),
    ):  # fmt: skip
        truth = changed(at("forward", rank), is_uneven=True)
        text = f"slow rank={rank} phase=forward ms={ms} steps={steps}"
        cases.append(with_faults(f"engine {name} forward r{rank} in {steps}", truth, config, text))
    for name, config, rank, ms, every in (
        ("cube", CUBE, 4, 25, 5), ("flat", FLAT, 3, 150, 6), ("grid", GRID, 1, 25, 4),
    ):  # fmt: skip
        truth = changed(at("forward", rank), every=every, phase=None)
        text = f"slow rank={rank} phase=forward ms={ms} steps=*/{every}"
        cases.append(
            with_faults(f"engine {name} forward r{rank} every {every}", truth, config, text)
        )
    texts = [
        f"slow rank=1 phase=forward ms={4 + 5 * part} steps={5 * part}-{5 * part + 4}"
        for part in range(9)
    ]
    truth = changed(at("forward", 1), is_uneven=True)
    cases.append(with_faults("engine flat forward r1 drift", truth, FLAT, *texts))
    for rank, every in ((2, 5), (7, 4)):
        truth = Truth(kind="gc", codes=("PA001",), ranks=(rank,), every=every)
        text = f"gc_pause rank={rank} objects=150000 steps=*/{every}"
        cases.append(with_faults(f"engine cube gc r{rank} every {every}", truth, CUBE, text))
    return cases


def list_links() -> list[Case]:
    """Links of a cube, one of each axis."""

    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    recipe = Trained(config=LINKED)
    return [
        with_link(
            "engine cube link 0-2 of dp", link("dp", 0, 2), recipe,
            Link(axis="dp", ms=50, pair=(0, 2)),
        ),
        with_link(
            "engine cube link 1-5 of pp", link("pp", 1, 5), recipe,
            Link(axis="pp", ms=8, pair=(1, 5)),
        ),
        # The timed model has no operations along tp: a slow link that nothing uses costs nothing.
        healthy(
            "engine cube link 2-3 of tp",
            replace(recipe, link=Link(axis="tp", ms=4, pair=(2, 3))),
        ),
        with_link("engine cube all of dp", link("dp"), recipe, Link(axis="dp", ms=40)),
    ]  # fmt: skip

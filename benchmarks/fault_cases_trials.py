"""The newer half of the fault matrix on programs in plain torch: what trials showed to be missed.

Written before any rule knew of them. Where and when a rank is slow, two faults at once, causes that
people have, and a healthy near miss of each. What a fault costs is measured on its twin, never
chosen; delays are 25 ms and more in steps of 25 ms, and the near misses cost 2 % of a step or less.

A slow rank's finding may be of the rule that knows it, or the ledger's own (LT001) where nothing
names the cause. Causes (evaluation, saving, `no_sync`, …) are told by a finding's words, so that
rules that do not exist yet may name them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.distributed.fault_cases import healthy, with_link
from tests.distributed.fault_matrix import Case, Link, Scripted
from tests.distributed.fault_verdict import ANY_CODE, Truth
from tests.distributed.plain_torch_faults import Delay, Program

from meshscope.core.layout import Layout

SLOW_CODES = ("ST001", "ST002", "LT001")
CHANGING_CODES = ("ST001", "ST003", "LT001", "PA002")
STAGE_CODES = ("PP003", "PP002", "ST001", "ST002", "LT001")


def plain(loop: str, num_ranks: int, num_steps: int = 45, **values: Any) -> Program:
    return Program(loop=loop, num_ranks=num_ranks, num_steps=num_steps, **values)


@dataclass(frozen=True, slots=True)
class Part:
    """A later part of the matrix: names begin with its own, programs are recorded its way."""

    name: str
    make: Callable[..., Any]
    """From `program=`, a `Trained`."""

    def fault(
        self,
        name: str,
        clean: Program,
        truths: Truth | Sequence[Truth],
        *delays: Delay,
        **values: Any,
    ) -> Case:
        """Delays in a program; its twin has none."""
        told = (truths,) if isinstance(truths, Truth) else tuple(truths)
        return Case(
            name=f"{self.name} {name}", truth=told[0], also=told[1:],
            faulty=self.make(program=replace(clean, delays=delays)),
            clean=self.make(program=clean), **values,
        )  # fmt: skip

    def contrast(self, name: str, truth: Truth, clean: Program, **options: Any) -> Case:
        """A program with other options than its twin."""
        faulty = replace(clean, options={**clean.options, **options})
        return Case(
            name=f"{self.name} {name}", truth=truth, faulty=self.make(program=faulty),
            clean=self.make(program=clean),
        )  # fmt: skip


DDP2, DDP3, DDP4, DDP5, DDP7, DDP8 = (plain("ddp2", n) for n in (2, 3, 4, 5, 7, 8))
FSDP3, FSDP4 = (plain("fsdp2", n) for n in (3, 4))
# A layer of FSDP2 or DTensor takes each rank 2 to 10 ms of a core besides its sleep. With four
# layers 8 ranks waited for 2 cores, and a rank that slept made the others faster: what a fault cost
# by its twin was no longer the fault's. So there are few layers, which sleep longer.
FSDP8 = plain("fsdp2", 8, num_layers=2, layer_ms=8.0)
TP22 = plain("dtensor", 4, layout=Layout(dp=2, tp=2), num_layers=2, layer_ms=8.0)
TP24 = plain("dtensor", 8, 30, layout=Layout(dp=2, tp=4), num_layers=1, layer_ms=20.0)
TP14 = plain("dtensor", 4, layout=Layout(tp=4), num_layers=2, layer_ms=8.0)
CP3, CP4, EP4 = (
    plain("exchanging", n, layout=Layout(**{axis: n}))
    for axis, n in (("cp", 3), ("cp", 4), ("ep", 4))
)
DP2CP2 = plain("exchanging", 4, layout=Layout(dp=2, cp=2))
DP2EP2 = plain("exchanging", 4, layout=Layout(dp=2, ep=2))
PP3, PP4 = (
    plain("pipelining", n, 30, layout=Layout(pp=n), num_layers=n, layer_ms=2.0,
          options={"microbatches": 4 * n})
    for n in (3, 4)
)  # fmt: skip
DP2PP2 = plain(
    "pipelining", 4, 30, layout=Layout(dp=2, pp=2), layer_ms=2.0,
    options={"schedule": "ScheduleGPipe", "microbatches": 8},
)  # fmt: skip
LOOPED = plain(
    "pipelining", 2, 30, layout=Layout(pp=2), layer_ms=2.0,
    options={"schedule": "ScheduleInterleaved1F1B", "chunks": 2, "microbatches": 8},
)  # fmt: skip
LONG = plain("ddp2", 4, 60, layer_ms=6.0)
"""Steps of 50 ms, for drifts."""
LONG_FSDP = plain("fsdp2", 4, 60, layer_ms=6.0)
LONG_TP = plain("dtensor", 4, 50, num_layers=2, layer_ms=12.0, layout=Layout(dp=2, tp=2))
LONG_CP = plain("exchanging", 4, 60, layer_ms=6.0, layout=Layout(cp=4))
NAMES = {
    "ddp2": DDP2, "ddp3": DDP3, "ddp4": DDP4, "ddp5": DDP5, "ddp7": DDP7, "ddp8": DDP8,
    "fsdp3": FSDP3, "fsdp4": FSDP4, "fsdp8": FSDP8, "tp22": TP22, "tp24": TP24, "tp14": TP14,
    "cp3": CP3, "cp4": CP4, "ep4": EP4, "dp2cp2": DP2CP2, "dp2ep2": DP2EP2,
    "pp3": PP3, "pp4": PP4, "dp2pp2": DP2PP2, "looped": LOOPED,
    "long": LONG, "longfsdp": LONG_FSDP, "longtp": LONG_TP, "longcp": LONG_CP,
}  # fmt: skip


NEVER = 1_000_000
"""A step that no run reaches."""


# --- what has to be said -------------------------------------------------------------------------


def at(where: str, *ranks: int, **values: Any) -> Truth:
    """Some ranks take longer somewhere in every step."""
    known: dict[str, dict[str, Any]] = {
        "data": {"codes": ("IN001", "LT001"), "phase": "data"},
        "between": {"codes": ("TI005", "ST001", "LT001"), "phase": "between"},
        "pause": {"codes": SLOW_CODES},
        "logging": {"codes": ("TI005", "ST001", "LT001", "TI002"), "says": ("logging",)},
        "evaluation": {"codes": ANY_CODE, "says": ("eval",)},
        "saving": {"codes": ANY_CODE, "says": ("saving", "checkpoint", "torch.save")},
        "gc": {"codes": ("PA001",)},
        "gc_between": {"codes": ("PA001",)},
    }
    usual = known.get(where, {"codes": SLOW_CODES, "phase": where})
    return Truth(**{"kind": where, "ranks": ranks, **usual, **values})


def all_at(where: str, num_ranks: int, **values: Any) -> Truth:
    """All ranks do."""
    codes = {
        "data": ("IN002",), "between": ("TI005",), "logging": ("TI005", "TI002", "LT001"),
    }  # fmt: skip
    more = {"codes": codes[where]} if where in codes else {}
    return at(where, *range(num_ranks), is_everyone=True, **more, **values)


def changing(where: str, rank: int, **values: Any) -> Truth:
    """One rank is slow in some steps, or more and more."""
    usual = at(where, rank)
    codes = tuple(dict.fromkeys((*usual.codes, *CHANGING_CODES)))
    return replace(usual, codes=codes, is_uneven=True, **values)


def cause(kind: str, *words: str, ranks: tuple[int, ...] | None = None, **values: Any) -> Truth:
    return Truth(kind=kind, codes=ANY_CODE, ranks=ranks, advises=words, **values)


def fault(name: str, program: str | Program, *parts: tuple[Truth, Delay], **values: Any) -> Case:
    """A program with one or more faults."""
    clean = NAMES[program] if isinstance(program, str) else program
    truths, delays = zip(*parts, strict=True)
    return Case(
        name=name, truth=truths[0], also=truths[1:],
        faulty=Scripted(program=replace(clean, delays=delays)), clean=Scripted(program=clean),
        **values,
    )  # fmt: skip


def contrast(name: str, truth: Truth, clean: Program, **options: Any) -> Case:
    """The fault is an option of the program."""
    faulty = replace(clean, options={**clean.options, **options})
    return Case(
        name=name, truth=truth, faulty=Scripted(program=faulty), clean=Scripted(program=clean)
    )


def one(where: str, rank: int, ms: float, **values: Any) -> tuple[Truth, Delay]:
    return at(where, rank), Delay(where=where, ranks=(rank,), ms=ms, **values)


# --- cases ---------------------------------------------------------------------------------------


def list_trials() -> list[Case]:
    return [
        *list_places(),
        *list_pipelines(),
        *list_everyone(),
        *list_changes(),
        *list_periodic(),
        *list_pairs(),
        *list_collectives(),
        *list_loaders(),
        *list_uneven_work(),
        *list_fast(),
        *list_numbers(),
        *list_links(),
        *list_near_misses(),
    ]


def list_places() -> list[Case]:
    """One rank, one place, every step."""
    places = (
        ("ddp2", "forward", 1, 30), ("ddp2", "between", 0, 30), ("ddp2", "logging", 1, 30),
        ("ddp2", "evaluation", 0, 30), ("ddp3", "between", 2, 35), ("ddp3", "saving", 0, 30),
        ("ddp4", "forward", 2, 30), ("ddp4", "between", 0, 40), ("ddp4", "logging", 0, 35),
        ("ddp4", "evaluation", 0, 30), ("ddp4", "saving", 0, 40), ("ddp4", "pause", 3, 30),
        ("ddp5", "forward", 4, 30), ("ddp5", "data", 0, 35), ("ddp7", "backward", 3, 30),
        ("ddp7", "between", 6, 30), ("ddp8", "between", 5, 35), ("ddp8", "logging", 0, 30),
        ("ddp8", "evaluation", 0, 35), ("ddp8", "saving", 3, 40), ("ddp8", "optimizer", 7, 30),
        ("fsdp3", "between", 1, 30), ("fsdp4", "between", 0, 35), ("fsdp4", "logging", 2, 30),
        ("fsdp4", "forward", 3, 30), ("fsdp4", "optimizer", 1, 30), ("fsdp4", "data", 2, 30),
        ("fsdp8", "forward", 6, 40), ("fsdp8", "between", 0, 40), ("tp22", "forward", 1, 30),
        ("tp22", "backward", 2, 30), ("tp22", "optimizer", 3, 30), ("tp22", "between", 0, 40),
        ("tp22", "logging", 0, 30), ("tp22", "data", 2, 30), ("tp14", "forward", 2, 30),
        ("tp14", "between", 0, 35), ("tp24", "forward", 5, 40), ("tp24", "backward", 2, 40),
        ("tp24", "between", 7, 40), ("cp3", "forward", 2, 30), ("cp4", "forward", 1, 30),
        ("cp4", "backward", 3, 30), ("cp4", "between", 0, 35), ("cp4", "optimizer", 2, 30),
        ("dp2cp2", "forward", 2, 30), ("dp2cp2", "backward", 1, 30), ("dp2cp2", "data", 3, 30),
        ("ep4", "forward", 3, 30), ("ep4", "backward", 0, 30), ("ep4", "between", 1, 35),
        ("dp2ep2", "forward", 1, 30), ("dp2ep2", "optimizer", 2, 30), ("dp2ep2", "logging", 0, 30),
    )  # fmt: skip
    found = [fault(f"{name} {where} r{rank}", name, one(where, rank, ms))
             for name, where, rank, ms in places]  # fmt: skip
    untold = replace(TP22, options={"untold": True})
    everything = replace(DDP4, options={"everything": True})
    return [
        *found,
        fault("tp22 untold backward r1", untold, one("backward", 1, 35)),
        fault("watched ddp4 forward r1", everything, one("forward", 1, 30)),
        fault("watched ddp4 between r2", everything, one("between", 2, 35)),
    ]


def list_pipelines() -> list[Case]:
    """torch's own pipelines: a stage, its optimizer, what its rank does besides."""
    found = []
    for name, where, ranks, ms in (
        ("pp4", "forward", (1,), 5), ("pp4", "backward", (2,), 5), ("pp3", "forward", (2,), 5),
        ("pp3", "backward", (0,), 5), ("dp2pp2", "forward", (2, 3), 5),
        ("looped", "forward", (1,), 5),
    ):  # fmt: skip
        truth = Truth(kind="slow stage", codes=STAGE_CODES, ranks=ranks)
        delay = Delay(where=where, ranks=ranks, ms=ms)
        found.append(fault(f"torch {name} stage {where} {ranks}", name, (truth, delay)))
    for name, rank in (("pp4", 2), ("pp3", 0), ("looped", 1)):
        truth = Truth(
            kind="slow optimizer of a stage", codes=STAGE_CODES, ranks=(rank,), phase="optimizer"
        )
        delay = Delay(where="optimizer", ranks=(rank,), ms=35)
        found.append(fault(f"torch {name} optimizer r{rank}", name, (truth, delay)))
    return [
        *found,
        fault("torch dp2pp2 forward r1", "dp2pp2", one("forward", 1, 8)),
        fault("torch dp2pp2 optimizer r3", "dp2pp2", one("optimizer", 3, 35)),
        fault("torch dp2pp2 data r0", "dp2pp2", one("data", 0, 35)),
        fault("torch pp4 between r3", "pp4", one("between", 3, 40)),
        fault("torch pp4 logging r0", "pp4", one("logging", 0, 40)),
        fault("torch pp3 between r1", "pp3", one("between", 1, 40)),
    ]


def list_everyone() -> list[Case]:
    """All ranks do something else than train."""
    found = []
    for name, where, ms, every in (
        ("ddp4", "between", 40, 1), ("ddp8", "between", 30, 1), ("fsdp4", "between", 35, 1),
        ("tp22", "between", 35, 1), ("cp4", "between", 35, 1), ("ddp2", "logging", 30, 1),
        ("ddp4", "logging", 30, 1), ("ddp4", "evaluation", 100, 6), ("ddp8", "saving", 150, 8),
        ("fsdp4", "saving", 120, 6), ("ddp3", "saving", 40, 1), ("ddp4", "data", 30, 1),
        ("tp22", "data", 35, 1),
    ):  # fmt: skip
        truth = replace(all_at(where, NAMES[name].num_ranks), every=every)
        delay = Delay(where=where, ms=ms, every=every)
        found.append(fault(f"{name} all {where} {every}", name, (truth, delay)))
    truth = Truth(
        kind="between", codes=("TI002", "TI005"), ranks=(0, 1, 2, 3), is_everyone=True, every=9
    )
    return [
        *found,
        fault("ddp4 all pause 9", "ddp4", (truth, Delay(where="between", ms=200, every=9))),
    ]


def list_changes() -> list[Case]:
    """A rank that is not always slow alike; what is lost is a mean over the run."""
    found = []
    for name, where, rank, ms, shape, first in (
        ("long", "forward", 1, 15, "drift", 0), ("long", "forward", 2, 50, "drift", 0),
        ("long", "backward", 3, 60, "drift", 0), ("long", "forward", 0, 40, "steady", 30),
        ("long", "backward", 1, 40, "swing", 0), ("long", "forward", 3, 60, "bursts", 0),
        ("long", "between", 0, 60, "drift", 0), ("long", "between", 2, 40, "steady", 25),
        ("long", "data", 1, 50, "drift", 0), ("long", "data", 3, 40, "steady", 20),
        ("long", "optimizer", 2, 50, "swing", 0), ("longfsdp", "forward", 2, 50, "drift", 0),
        ("longfsdp", "backward", 0, 40, "steady", 30), ("longfsdp", "forward", 1, 60, "bursts", 0),
        ("longtp", "forward", 3, 50, "drift", 0), ("longtp", "backward", 1, 15, "drift", 0),
        ("longtp", "forward", 0, 40, "steady", 25), ("longcp", "forward", 2, 15, "drift", 0),
        ("longcp", "backward", 1, 50, "drift", 0), ("longcp", "forward", 3, 40, "swing", 0),
        ("ddp8", "forward", 4, 25, "drift", 0), ("ddp8", "backward", 6, 50, "bursts", 0),
        ("ddp2", "forward", 1, 40, "drift", 0), ("ddp2", "backward", 0, 40, "steady", 22),
        ("ep4", "forward", 1, 40, "steady", 20), ("dp2ep2", "backward", 3, 50, "drift", 0),
    ):  # fmt: skip
        truth = changing(where, rank)
        delay = Delay(where=where, ranks=(rank,), ms=ms, shape=shape, first=first)
        onset = f" from {first}" if first else ""
        found.append(fault(f"{name} {where} r{rank} {shape}{onset} {ms}", name, (truth, delay)))
    return found


def list_periodic() -> list[Case]:
    """A rank that is slow in every n-th step: by chance, by a collection, by what it does then."""
    found = []
    codes = (*CHANGING_CODES, "TI002")
    for name, where, rank, ms, every in (
        ("ddp4", "forward", 1, 120, 7), ("fsdp4", "forward", 2, 120, 5),
        ("tp22", "backward", 1, 120, 7), ("cp4", "forward", 3, 120, 5),
        ("ddp4", "between", 0, 150, 6), ("ddp4", "data", 2, 120, 4), ("ddp8", "logging", 0, 150, 5),
        ("ddp4", "evaluation", 0, 120, 5), ("ddp4", "saving", 0, 180, 6),
        ("ddp8", "saving", 0, 180, 6), ("ddp2", "evaluation", 1, 100, 4),
    ):  # fmt: skip
        usual = at(where, rank)
        usual = usual if usual.codes == ANY_CODE else replace(usual, codes=(*usual.codes, *codes))
        phase = "between" if where == "between" else None
        truth = replace(usual, every=every, phase=phase)
        delay = Delay(where=where, ranks=(rank,), ms=ms, every=every)
        found.append(fault(f"{name} {where} r{rank} every {every}", name, (truth, delay)))
    for name, where, rank, every in (
        ("ddp4", "gc_between", 2, 4), ("fsdp4", "gc_between", 0, 5), ("ddp8", "gc", 6, 5),
        ("tp22", "gc_between", 3, 4), ("ddp2", "gc", 1, 4), ("cp4", "gc", 2, 5),
    ):  # fmt: skip
        truth = replace(at(where, rank), every=every)
        delay = Delay(where=where, ranks=(rank,), every=every)
        # Both keep as many objects alive; one never collects them.
        clean = replace(NAMES[name], delays=(replace(delay, first=NEVER),))
        case = fault(f"{name} {where} r{rank} every {every}", name, (truth, delay))
        found.append(replace(case, clean=Scripted(program=clean)))
    return found


def list_pairs() -> list[Case]:
    """Two faults at once: on two ranks, in two places, or the same on both."""
    pairs = (
        ("ddp4", ("forward", 1, 40), ("data", 3, 40)),
        ("ddp4", ("forward", 1, 40), ("backward", 3, 40)),
        ("ddp4", ("forward", 0, 40), ("between", 2, 40)),
        ("ddp4", ("optimizer", 1, 40), ("logging", 3, 40)),
        ("ddp4", ("saving", 0, 40), ("forward", 2, 40)),
        ("ddp4", ("evaluation", 0, 40), ("backward", 1, 40)),
        ("ddp4", ("between", 0, 40), ("data", 1, 40)),
        ("ddp4", ("forward", 2, 25), ("backward", 2, 25)),
        ("ddp8", ("forward", 1, 40), ("data", 6, 40)),
        ("ddp8", ("between", 0, 40), ("backward", 4, 40)),
        ("ddp3", ("forward", 0, 30), ("optimizer", 2, 30)),
        ("ddp2", ("forward", 0, 30), ("backward", 1, 30)),
        ("fsdp4", ("forward", 1, 40), ("optimizer", 3, 40)),
        ("fsdp4", ("forward", 0, 40), ("data", 2, 40)),
        ("fsdp4", ("between", 1, 40), ("backward", 2, 40)),
        ("tp22", ("forward", 0, 40), ("optimizer", 3, 40)),
        ("tp22", ("forward", 1, 40), ("between", 2, 40)),
        ("cp4", ("forward", 1, 40), ("backward", 3, 40)),
        ("cp4", ("between", 0, 40), ("forward", 2, 40)),
        ("ep4", ("forward", 0, 40), ("data", 2, 40)),
        ("dp2pp2", ("forward", 0, 8), ("optimizer", 3, 35)),
    )  # fmt: skip
    found = [
        fault(
            f"{name} {first[0]} r{first[1]} and {second[0]} r{second[1]}", name,
            one(*first), one(*second),
        )
        for name, first, second in pairs
    ]  # fmt: skip
    for name, where, ranks, ms in (
        ("ddp4", "forward", (1, 3), 40), ("ddp4", "between", (0, 2), 40),
        ("ddp4", "data", (1, 2), 40), ("ddp8", "forward", (2, 5), 40),
        ("ddp8", "backward", (0, 3, 7), 40), ("fsdp4", "backward", (0, 2), 40),
        ("cp4", "forward", (0, 1), 40),
    ):  # fmt: skip
        truth = at(where, *ranks, may_split=True)
        found.append(
            fault(
                f"{name} {where} of {ranks}", name, (truth, Delay(where=where, ranks=ranks, ms=ms))
            )
        )
    stages = [
        (Truth(kind="slow stage", codes=STAGE_CODES, ranks=(rank,)), rank) for rank in (0, 1, 2, 3)
    ]
    for name, first, second in (("pp4", 1, 2), ("pp4", 0, 3), ("pp3", 0, 2)):
        parts = [
            (replace(stages[rank][0], may_split=True), Delay(where="forward", ranks=(rank,), ms=5))
            for rank in (first, second)
        ]
        found.append(fault(f"torch {name} stages {first} and {second}", name, *parts))
    return found


def list_collectives() -> list[Case]:
    """Too many sums, or sums of what need not be sent."""
    many = Truth(kind="small operations", codes=("CO003",))
    found = []
    for num_ranks, num_layers in ((2, 40), (4, 30), (6, 20), (8, 12)):
        clean = plain(
            "summed", num_ranks, 30, num_layers=num_layers, layer_ms=0.3, options={"flat": True}
        )
        found.append(contrast(f"summed {num_ranks} x {num_layers}", many, clean, flat=False))
    for num_ranks, num_layers in ((2, 40), (4, 30), (6, 20)):
        clean = plain(
            "ddp2", num_ranks, 30, num_layers=num_layers, layer_ms=0.3, options={"fair": True}
        )
        found.append(
            contrast(f"tiny buckets {num_ranks} x {num_layers}", many, clean, bucket_mb=1e-4)
        )
    for num_ranks, count in ((2, 8), (3, 4), (4, 4)):
        clean = plain(
            "ddp2",
            num_ranks,
            30,
            num_microbatches=count,
            layer_ms=1.0,
            options={"ballast": 500_000, "fair": True},
        )
        found.append(
            contrast(
                f"no no_sync {num_ranks} x {count}", cause("no_sync", "no_sync"), clean, sync=True
            )
        )
    for num_ranks, size in ((2, 6_000_000), (3, 4_000_000), (4, 3_000_000)):
        clean = plain("ddp2", num_ranks, 30, options={"fair": True})
        found.append(
            contrast(
                f"unused {num_ranks}", cause("unused parameters", "unused"), clean, unused=size
            )
        )
    for name, count in (("ddp4", 60), ("fsdp4", 60), ("ddp8", 40)):
        program = replace(NAMES[name], options={"subgroup": count})
        truth = at(
            "between",
            0,
            1,
            codes=("TI005", "LT001", "ST002", "ST001", "CO003"),
            may_split=True,
            phase=None,
        )
        delay = Delay(where="subgroup", ranks=(0, 1))
        found.append(
            fault(f"{name} subgroup sums", program, (replace(truth, kind="subgroup sums"), delay))
        )
    return found


def list_loaders() -> list[Case]:
    """Loaders whose worker cannot keep up, loaders that copy, and threads beyond the cores."""
    found = []
    for num_ranks, ranks in ((2, None), (4, None), (4, (1,)), (3, (2,))):
        clean = plain("ddp2", num_ranks, options={"workers": 1})
        truth = all_at("data", num_ranks) if ranks is None else at("data", *ranks)
        truth = replace(truth, kind="starved loader")
        found.append(
            fault(
                f"starved {num_ranks} {ranks or 'all'}",
                clean,
                (truth, Delay(where="data", ranks=ranks, ms=60)),
            )
        )
    for num_ranks, ranks in ((2, None), (2, (0,)), (4, (3,))):
        clean = plain("ddp2", num_ranks, options={"copied": 8_000_000})
        truth = all_at("data", num_ranks) if ranks is None else at("data", *ranks)
        truth = replace(truth, kind="copying loader")
        found.append(
            fault(
                f"copying {num_ranks} {ranks or 'all'}",
                clean,
                (truth, Delay(where="copy", ranks=ranks)),
            )
        )
    for num_ranks, threads in ((2, 16), (2, 8), (1, 16)):
        clean = plain("ddp2", num_ranks, 20, options={"width": 512, "rows": 256, "threads": 1})
        found.append(
            contrast(
                f"threads {num_ranks} x {threads}",
                cause("threads", "thread"),
                clean,
                threads=threads,
            )
        )
    return found


def list_uneven_work() -> list[Case]:
    """Ranks that have larger batches, or longer sequences, than others."""
    found = []
    for loop, num_ranks, rank, rows in (
        ("ddp2", 4, 2, 8), ("ddp2", 2, 0, 8), ("fsdp2", 4, 1, 9), ("ddp2", 8, 3, 10),
        ("fsdp2", 3, 2, 8),
    ):  # fmt: skip
        clean = plain(loop, num_ranks, options={"rows_of_rank": {}})
        truth = cause("uneven batches", "batch", ranks=(rank,))
        found.append(
            contrast(
                f"{loop} {num_ranks} batch of r{rank} is {rows}",
                truth,
                clean,
                rows_of_rank={rank: rows},
            )
        )
    lengths = Truth(kind="uneven lengths", codes=("IM001",))
    for loop, num_ranks in (("ddp2", 2), ("ddp2", 4), ("ddp2", 8), ("fsdp2", 4)):
        clean = plain(loop, num_ranks, 60, options={"lengths": 0})
        found.append(
            contrast(
                f"{loop} {num_ranks} random lengths",
                replace(lengths, is_uneven=True),
                clean,
                lengths=7,
            )
        )
    return found


def list_fast() -> list[Case]:
    """One rank is faster than its peers: nothing is to be gained."""
    found = []
    for name, where, rank in (
        ("ddp4", "forward", 1), ("ddp8", "backward", 5), ("fsdp4", "backward", 2),
        ("tp22", "forward", 3), ("cp4", "forward", 0), ("ddp3", "optimizer", 1),
    ):  # fmt: skip
        program = NAMES[name]
        others = tuple(other for other in range(program.num_ranks) if other != rank)
        delays = (Delay(where=where, ranks=others, ms=15),)
        found.append(
            healthy(
                f"{name} fast r{rank} {where}", Scripted(program=replace(program, delays=delays))
            )
        )
    for loop, num_ranks, rank in (("ddp2", 4, 2), ("fsdp2", 4, 0)):
        program = plain(loop, num_ranks, options={"rows_of_rank": {rank: 1}})
        found.append(healthy(f"{loop} {num_ranks} small batch r{rank}", Scripted(program=program)))
    return found


def list_numbers() -> list[Case]:
    """NaN from one rank's batch, and a loss that jumps where the learning rate does."""
    found = []
    for name, where, rank, step in (
        ("ddp4", "nan_batch", 2, 30), ("ddp8", "nan", 5, 12), ("fsdp4", "nan_batch", 1, 20),
        ("ddp2", "nan", 0, 25), ("ddp3", "nan_batch", 1, 18), ("cp4", "nan", 3, 22),
    ):  # fmt: skip
        truth = Truth(kind="nan", codes=("CV001", "CV005"), ranks=(rank,), first_step=step)
        delay = Delay(where=where, ranks=(rank,), first=step, last=step)
        found.append(
            fault(f"{name} {where} r{rank} step {step}", name, (truth, delay), is_timed=False)
        )
    for name in ("ddp4", "ddp2", "fsdp3"):
        program = replace(NAMES[name], num_steps=80, layer_ms=1.0, options={"rate": 30})
        truth = cause("loss spike after a rate change", "learning rate")
        delay = Delay(where="spike", first=30, last=50)
        found.append(fault(f"{name} spike at rate", program, (truth, delay), is_timed=False))
    return found


def list_links() -> list[Case]:
    """Sums that Python starts, along axes other than dp."""

    def link(axis: str, *ranks: int) -> Truth:
        return Truth(kind="slow link", codes=("LK001",), axis=axis, ranks=ranks or None)

    return [
        with_link("cp4 all of cp", link("cp"), Scripted(program=CP4), Link(axis="cp", ms=6)),
        with_link("ep4 all of ep", link("ep"), Scripted(program=EP4), Link(axis="ep", ms=6)),
        with_link(
            "dp2cp2 link 2-3", link("cp", 2, 3), Scripted(program=DP2CP2),
            Link(axis="cp", ms=6, pair=(2, 3)),
        ),
        with_link(
            "dp2ep2 link 0-1", link("ep", 0, 1), Scripted(program=DP2EP2),
            Link(axis="ep", ms=6, pair=(0, 1)),
        ),
    ]  # fmt: skip


def list_near_misses() -> list[Case]:
    """What looks like a fault and costs 2 % of a step or less, or what nobody could save."""
    found = []
    for name, where, ranks, ms, every in (
        ("ddp4", "between", (0,), 0.3, 1), ("ddp4", "logging", (0,), 0.3, 1),
        ("ddp8", "logging", (0,), 0.3, 1), ("fsdp4", "between", (1,), 0.3, 1),
        ("ddp4", "between", (0,), 4, 20), ("ddp4", "saving", (0,), 3, 20),
        ("ddp4", "evaluation", (0,), 0, 60), ("tp22", "logging", (0,), 0.3, 1),
        ("cp4", "forward", (1,), 0.3, 1), ("ddp4", "forward", None, 20, 1),
        ("fsdp4", "backward", None, 20, 1), ("cp4", "optimizer", None, 10, 1),
        ("pp4", "forward", None, 2, 1),
    ):  # fmt: skip
        delays = (Delay(where=where, ranks=ranks, ms=ms, every=every),)
        who = "all" if ranks is None else f"r{ranks[0]}"
        program = replace(NAMES[name], delays=delays)
        found.append(healthy(f"{name} near miss {where} {who} {every}", Scripted(program=program)))
    drift = (Delay(where="forward", ranks=(2,), ms=1, shape="drift"),)
    once = (Delay(where="forward", ranks=(1,), ms=25, first=20, last=20),)
    others = {
        "near miss drift": replace(LONG, delays=drift),
        "near miss one pause": replace(DDP4, delays=once),
        "near miss hidden loader": plain("ddp2", 2, data_ms=12.0, options={"workers": 1}),
        "near miss large batches": plain(
            "ddp2", 4, options={"rows_of_rank": dict.fromkeys(range(4), 8)}
        ),
        "near miss rate": replace(DDP4, num_steps=80, layer_ms=1.0, options={"rate": 30}),
        "near miss few sums": plain("summed", 4, num_layers=3, layer_ms=4.0),
        "near miss accumulation": plain("ddp2", 4, 30, num_microbatches=4, layer_ms=1.0),
        "near miss small unused": replace(DDP4, options={"unused": 1000, "fair": True}),
        "near miss subgroup": replace(
            DDP4, options={"subgroup": 1}, delays=(Delay(where="subgroup", ranks=(0, 1)),)
        ),
    }  # fmt: skip
    return [*found, *(healthy(name, Scripted(program=program)) for name, program in others.items())]

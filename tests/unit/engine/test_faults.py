"""Faults: read and written, wrong ones named, and each kind's effect where one process shows it.

Crashes, hangs and slow links need processes of their own: tests/distributed/test_engine_faults.py.
"""

import gc
import math
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")
import torch.distributed as dist  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from meshscope.core.config.timed_model_config import TimedModelConfig  # noqa: E402
from meshscope.core.layout import Coordinates, Layout  # noqa: E402
from meshscope.core.schedule import Action, ActionKind  # noqa: E402
from meshscope.core.schedule_builders import build_schedule  # noqa: E402
from meshscope.engine.faults import (  # noqa: E402
    FaultInjector,
    FaultLog,
    InjectedFault,
    fault_from_mapping,
    find_fault_problems,
    parse_fault,
)
from meshscope.engine.faults.kinds import Fault, FaultKind, Phase, StepRange  # noqa: E402
from meshscope.engine.faults.text import KEYS_OF, write_fault  # noqa: E402
from meshscope.engine.model.timed_model import build_timed_stage  # noqa: E402
from meshscope.engine.pipeline.pipeline import (  # noqa: E402
    ActionLog,
    NoRecorder,
    PipelineError,
    PipelineExecutor,
)
from meshscope.errors import UsageError  # noqa: E402

MS = 1_000_000
HERE = Coordinates(dp=1, tp=0, pp=2)
LAYOUT = Layout(dp=2, tp=2, pp=2)
INSTANT = TimedModelConfig(num_layers=4, forward_ms=0, input_grad_ms=0, weight_grad_ms=0)


def make_injector(*texts: str, rank: int = 5, attempt: int = 0) -> tuple[FaultInjector, FaultLog]:
    log = FaultLog()
    faults = [parse_fault(text) for text in texts]
    return FaultInjector(faults, rank, HERE, attempt, log), log


def list_steps(injector: FaultInjector, log: FaultLog, num_steps: int = 8) -> list[int]:
    """At which steps something was recorded, when every hook is called in each."""
    for step in range(num_steps):
        injector.begin_step(step)
        for name in ("data", "forward", "backward", "optimizer"):
            with injector.phase(name):
                pass
    return [span.step for span in log.spans]


def took_ns(log: FaultLog) -> list[int]:
    return [span.end_host_mono_ns - span.begin_host_mono_ns for span in log.spans]


# --- written form ---------------------------------------------------------------------------------


def test_a_written_fault_is_read() -> None:
    assert parse_fault("slow rank=5 phase=forward ms=20 steps=10-20") == Fault(
        kind=FaultKind.SLOW,
        ranks=(5,),
        phase=Phase.FORWARD,
        delay_ns=20 * MS,
        steps=(StepRange(10, 20),),
    )
    assert parse_fault("crash dp=1,tp=0 steps=3,9 how=sigsegv attempt=any") == Fault(
        kind=FaultKind.CRASH,
        coordinates=(("dp", 1), ("tp", 0)),
        steps=(StepRange(3, 3), StepRange(9, 9)),
        how="SIGSEGV",
        attempts=(),
    )


def test_a_table_of_toml_says_the_same() -> None:
    table = {"kind": "slow_link", "link": [0, 1], "ms": 5, "steps": ["2-", 1], "attempt": [0, 2]}
    assert fault_from_mapping(table) == parse_fault(
        "slow_link link=0-1 ms=5 steps=2-,1 attempt=0,2"
    )
    assert fault_from_mapping(
        {"kind": "slow", "pp": 2, "factor": 1.5, "burn": True}
    ) == parse_fault("slow pp=2 factor=1.5 burn=true")


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.integers(0, 9),
    "dp": st.integers(0, 3),
    "pp": st.integers(0, 3),
    "steps": st.sampled_from(["3", "1,2", "4-9", "4-", "*/5", "2-20/3", "*"]),
    "attempt": st.sampled_from(["any", "0", "1,2"]),
    "phase": st.sampled_from(["step", "data", "forward", "weight_grad", "optimizer"]),
    "ms": st.floats(0.001, 1e6).map(lambda value: f"{value:.3g}"),
    "mb": st.floats(0.001, 1e6).map(lambda value: f"{value:.3g}"),
    "link": st.sampled_from(["0-1", "3-2"]),
    "axis": st.sampled_from(["dp", "tp", "pp"]),
    "target": st.sampled_from(["gradient", "loss", "activation"]),
    "how": st.sampled_from(["SIGKILL", "exception", "exit"]),
}


@given(st.data())
def test_what_is_written_is_read_back(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(FaultKind)))
    keys = [key for key in KEYS_OF[kind] if key in VALUES]
    chosen = data.draw(st.lists(st.sampled_from(keys), unique=True))
    words = " ".join([kind, *(f"{key}={data.draw(VALUES[key])}" for key in chosen)])
    try:
        fault = parse_fault(words)
    except UsageError:
        return
    assert parse_fault(write_fault(fault)) == fault


@pytest.mark.parametrize(
    ("text", "steps"),
    [("3", [3]), ("1,4", [1, 4]), ("2-4", [2, 3, 4]), ("5-", [5, 6, 7]), ("*/3", [0, 3, 6]),
     ("1-6/2", [1, 3, 5]), ("*", list(range(8)))],
)  # fmt: skip
def test_steps_are_chosen(text: str, steps: list[int]) -> None:
    injector, log = make_injector(f"leak mb=0.001 steps={text}")
    assert list_steps(injector, log) == steps


def test_every_problem_of_a_fault_is_named_with_the_nearest_known_name() -> None:
    with pytest.raises(UsageError) as caught:
        parse_fault("slow ran=1 phase=foward ms=-3 forward steps=9-3")
    assert str(caught.value) == (
        "fault 'slow ran=1 phase=foward ms=-3 forward steps=9-3': 'forward' is not key=value; "
        "slow has no key 'ran' (did you mean rank?), use some of rank, ranks, dp, tp, pp, cp, ep, "
        "steps, attempt, phase, stage, microbatch, ms, factor, burn; phase is 'foward', expected "
        "step or data or forward or backward or input_grad or weight_grad or optimizer or send or "
        "collective; ms is '-3', expected milliseconds above 0; steps is '9-3', expected steps "
        "such as 7, 3,9, 10-20, 10-, 10-20/5 or */5, counted from 0"
    )
    with pytest.raises(UsageError, match=r"there is no fault 'crsh' \(did you mean crash\?\), use"):
        parse_fault("crsh rank=1")


def test_all_faults_of_a_run_are_checked_in_one_go() -> None:
    given_faults = [
        "slow rank=8 ms=1",
        "crash rank=3 how=exit",
        {"kind": "hang", "steps": 3, "dp": 2, "phase": "collective", "axis": "dp"},
        "slow_link ms=2",
        "slow rank=1 ms=5 factor=2",
        "nan rank=0 pp=1 steps=2",
        Fault(kind=FaultKind.LEAK),
        "slow rank=7 ms=5",
        "slow_link axis=cp mb_per_s=3",
        "nan rank=1 ranks=2 steps=1",
    ]
    assert find_fault_problems(given_faults, LAYOUT) == [
        "fault 0 (slow rank=8 ms=1): there is no rank 8 among 8",
        "fault 1: 'crash rank=3 how=exit': crash needs steps, such as steps=10",
        "fault 2 (hang dp=2 steps=3 phase=collective axis=dp): dp 2 is outside 0..1 of "
        f"{LAYOUT.describe()}",
        "fault 3: 'slow_link ms=2': slow_link needs link, axis or ranks to say which operations "
        "are slow",
        "fault 4: 'slow rank=1 ms=5 factor=2': slow needs either ms or factor",
        "fault 5 (nan rank=0 pp=1 steps=2): no rank is at all the places it names",
        "fault 6 (leak): leak needs mb, what it keeps in each step",
        "fault 8 (slow_link axis=cp mb_per_s=3): nothing is sent along cp, its degree is 1",
        "fault 9: 'nan rank=1 ranks=2 steps=1': rank and ranks are both given, use one",
    ]
    assert find_fault_problems(["slow rank=2 ms=1"], 2) == [
        "fault 0 (slow rank=2 ms=1): there is no rank 2 among 2"
    ]


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["rank=5", "ranks=1,5", "dp=1", "dp=1,tp=0", "pp=2", ""])
def test_a_fault_concerns_the_ranks_it_names(place: str) -> None:
    injector, log = make_injector(f"leak mb=0.001 {place} steps=2")
    assert list_steps(injector, log) == [2]


@pytest.mark.parametrize(
    "fault",
    ["leak mb=1 rank=4", "leak mb=1 pp=1", "leak mb=1 dp=1,tp=1", "leak mb=1 rank=5 dp=0",
     "leak mb=1 steps=100", "leak mb=1 attempt=1", "crash steps=1 rank=4",
     "nan steps=1 rank=4", "hang steps=100", "gc_pause rank=0"],
)  # fmt: skip
def test_a_fault_of_another_rank_step_or_attempt_does_nothing(fault: str) -> None:
    injector, log = make_injector(fault)
    assert list_steps(injector, log) == []
    loss = torch.ones(())
    assert injector.on_loss(loss) is loss
    assert injector.kept == []


def test_crashes_and_hangs_are_of_the_first_attempt_unless_told_otherwise() -> None:
    texts = ["crash steps=1", "hang steps=1", "slow ms=1"]
    assert [write_fault(f) for f in make_injector(*texts, attempt=1)[0].faults] == ["slow ms=1"]
    assert len(make_injector("crash steps=1 attempt=any", attempt=3)[0].faults) == 1
    assert len(make_injector("crash steps=1 attempt=1,2", attempt=0)[0].faults) == 0


def test_without_faults_nothing_is_touched() -> None:
    injector, log = make_injector("slow_link rank=4 ms=1", "nan rank=4 steps=1")
    methods = dict(vars(dist.ProcessGroup))
    stage = build_timed_stage(INSTANT)
    injector.watch_groups({})
    injector.attach({0: stage})
    record = ActionLog()
    assert not injector.faults
    assert injector.wrap_recorder(record) is record
    assert injector.phase("forward") is injector.action(ActionKind.FORWARD, 0, 0)
    assert dict(vars(dist.ProcessGroup)) == methods
    assert not stage._forward_hooks
    assert list_steps(injector, log) == []


def test_phases_that_nobody_knows_go_by() -> None:
    injector, log = make_injector("slow ms=1")
    injector.begin_step(0)
    with injector.phase("evaluate"):
        pass
    assert log.spans == []


# --- what happens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "step"])
def test_a_slow_phase_takes_its_time_inside_of_the_phase(phase: str) -> None:
    injector, log = make_injector(f"slow phase={phase} ms=5 steps=3")
    assert list_steps(injector, log) == [3]
    assert min(took_ns(log)) >= 5 * MS
    if phase == "step":
        return
    injector.begin_step(3)
    begin_ns = time.monotonic_ns()
    with injector.phase(phase):
        pass
    end_ns = time.monotonic_ns()
    span = log.spans[-1]
    assert begin_ns <= span.begin_host_mono_ns <= span.end_host_mono_ns <= end_ns


def test_a_factor_makes_a_phase_that_much_longer() -> None:
    injector, log = make_injector("slow phase=optimizer factor=3")
    injector.begin_step(0)
    begin_ns = time.monotonic_ns()
    with injector.phase("optimizer"):
        time.sleep(0.01)
    assert time.monotonic_ns() - begin_ns >= 30 * MS
    assert took_ns(log)[0] >= 20 * MS


def test_burning_uses_the_processor_and_sleeping_does_not() -> None:
    used_ns = {"true": 0, "false": 0}
    for burn in ["true", "false"] * 3:  # others may want the processor for one of them
        injector, _ = make_injector(f"slow phase=forward ms=20 burn={burn}")
        injector.begin_step(0)
        begin_ns = time.thread_time_ns()
        with injector.phase("forward"):
            pass
        used_ns[burn] += time.thread_time_ns() - begin_ns
    assert used_ns["true"] > 3 * used_ns["false"]


def test_a_stalled_loader_is_late_with_the_data() -> None:
    injector, log = make_injector("stalled_loader ms=5 steps=1-2")
    assert list_steps(injector, log) == [1, 2]
    assert min(took_ns(log)) >= 5 * MS
    assert {span.kind for span in log.spans} == {"stalled_loader"}


def test_a_leak_keeps_its_bytes_from_step_to_step() -> None:
    injector, log = make_injector("leak mb=0.5 steps=2-", "leak mb=0.25 device=true steps=4")
    assert list_steps(injector, log, 5) == [2, 3, 4, 4]
    sizes = [kept.nbytes if isinstance(kept, Tensor) else len(kept) for kept in injector.kept]
    assert sizes == [500_000, 500_000, 500_000, 250_000]
    injector.close()
    assert injector.kept == []


def test_a_gc_pause_is_one_collection_of_all_its_garbage() -> None:
    injector, log = make_injector("gc_pause objects=3000 steps=1 phase=forward")
    seen: list[int] = []

    def listen(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["collected"])

    gc.collect()
    gc.callbacks.append(listen)
    try:
        assert list_steps(injector, log, 3) == [1]
    finally:
        gc.callbacks.remove(listen)
    assert max(seen) >= 3000
    assert gc.isenabled()


def test_a_gc_pause_may_be_a_stated_sleep() -> None:
    injector, log = make_injector("gc_pause ms=5 steps=1")
    assert list_steps(injector, log, 3) == [1]
    assert took_ns(log)[0] >= 5 * MS


def test_a_crash_by_exception_is_recorded_before_it_is_raised() -> None:
    injector, log = make_injector("crash how=exception steps=2 phase=optimizer")
    with pytest.raises(InjectedFault, match="injected at step 2: crash steps=2"):
        list_steps(injector, log)
    assert [(span.kind, span.step, span.end_host_mono_ns) for span in log.spans] == [
        ("crash", 2, None)
    ]


def test_a_crash_by_exit_has_its_code() -> None:
    injector, log = make_injector("crash how=exit exit_code=7 steps=2")
    with pytest.raises(SystemExit) as caught:
        list_steps(injector, log)
    assert caught.value.code == 7


def test_a_gradient_becomes_nan_in_one_element_of_the_named_parameter() -> None:
    injector, log = make_injector("nan target=gradient parameter=layers.2 steps=1")
    stage = build_timed_stage(INSTANT)
    tokens = torch.ones(1, 8, dtype=torch.long)
    stage(tokens, tokens).backward()
    for step in (0, 1):
        injector.begin_step(step)
        injector.on_gradients([stage])
        nans = {n: int(p.grad.isnan().sum()) for n, p in stage.named_parameters()}
        assert nans == {name: int(step == 1 and name == "layers.2.weight") for name in nans}
    assert [span.detail for span in log.spans] == [
        "nan steps=1 target=gradient parameter=layers.2: gradient of layers.2.weight"
    ]


# --- in a pipeline --------------------------------------------------------------------------------


def run_pipeline(name: str, *texts: str) -> tuple[list[float], ActionLog, FaultLog]:
    """One step with all stages on one rank: losses, actions, faults."""
    schedule = build_schedule(name, 1, 3)
    stages = {i: build_timed_stage(INSTANT, i, schedule.num_stages)
              for i in range(schedule.num_stages)}  # fmt: skip
    injector, log = make_injector(*texts)
    injector.attach(stages)
    record = ActionLog()
    executor = PipelineExecutor(
        schedule,
        stages,
        record=injector.wrap_recorder(record),
        put_off={i: stage.put_off_weight_gradients() for i, stage in stages.items()},
    )
    tokens = torch.ones(1, 8, dtype=torch.long)
    injector.begin_step(4)
    losses = [loss.item() for loss in executor.run_step([(tokens, tokens)] * 3)]
    injector.close()
    assert not any(stage._forward_hooks for stage in stages.values())
    return losses, record, log


def find_slow(record: ActionLog, log: FaultLog) -> list[Action]:
    """The actions around which faults were recorded."""
    return [
        run.action
        for span in log.spans
        for run in record.runs
        if run.begin_host_mono_ns <= span.begin_host_mono_ns
        and span.end_host_mono_ns <= run.end_host_mono_ns
    ]


@pytest.mark.parametrize(
    ("fault", "schedule", "slowed"),
    [
        ("slow phase=forward ms=2 stage=1 steps=4", "zb_v", ["1F0", "1F1", "1F2"]),
        ("slow phase=forward ms=2 microbatch=1", "zb_v", ["0F1", "1F1"]),
        ("slow phase=backward ms=2 stage=0", "zb_v", ["0I0", "0I1", "0I2"]),
        ("slow phase=backward factor=2 stage=0 microbatch=1", "zb_v", ["0I1", "0W1"]),
        ("slow phase=weight_grad ms=2 stage=1 microbatch=2", "zb_v", ["1W2"]),
        ("slow phase=backward ms=2", "1f1b", ["0B0", "0B1", "0B2"]),
        ("gc_pause phase=backward objects=10", "1f1b", ["0B0"]),
        ("slow phase=input_grad ms=2", "1f1b", []),
        ("slow phase=forward ms=2 steps=5", "1f1b", []),
        ("slow phase=forward ms=2 stage=2", "zb_v", []),
    ],
)
def test_faults_are_inside_of_the_actions_they_name(
    fault: str, schedule: str, slowed: list[str]
) -> None:
    losses, record, log = run_pipeline(schedule, fault)
    assert sorted(str(action) for action in find_slow(record, log)) == sorted(slowed)
    assert len(log.spans) == len(slowed)
    assert not any(math.isnan(loss) for loss in losses)


@pytest.mark.parametrize(
    ("fault", "is_nan", "detail"),
    [
        ("nan target=loss steps=4", [True, False, False], "1F0"),
        ("nan target=loss microbatch=2 steps=4", [False, False, True], "1F2"),
        ("nan target=activation stage=0 microbatch=1 steps=4", [False, True, False], "0F1"),
        ("nan target=loss steps=3", [False, False, False], None),
    ],
)
def test_nan_comes_to_the_named_microbatch(
    fault: str, is_nan: list[bool], detail: str | None
) -> None:
    losses, _, log = run_pipeline("zb_v", fault)
    assert [math.isnan(loss) for loss in losses] == is_nan
    assert [span.detail.rpartition(": ")[2] for span in log.spans] == ([detail] if detail else [])


def test_an_exception_in_an_action_names_it() -> None:
    with pytest.raises(PipelineError, match=r"^0F2 .* failed .*InjectedFault: injected at step 4"):
        run_pipeline("1f1b", "crash how=exception phase=forward microbatch=2 steps=4")


def test_evaluation_is_left_alone() -> None:
    injector, _ = make_injector("nan target=loss steps=0")
    stage = build_timed_stage(INSTANT)
    injector.attach({0: stage})
    injector.begin_step(0)
    tokens = torch.ones(1, 8, dtype=torch.long)
    executor = PipelineExecutor(build_schedule("1f1b", 1, 1), {0: stage}, record=NoRecorder())
    assert not executor.evaluate([(tokens, tokens)])[0].isnan()
    assert executor.run_step([(tokens, tokens)])[0].isnan()
    injector.close()

"""When, where and what: schedules against torch's own, selectors on a mesh, texts."""

import itertools

import pytest

from meshscope.capture.profiling.rank_choice import RankChoice
from meshscope.capture.profiling.settings import (
    ProfilingSettings,
    change_settings,
    parse_settings,
    read_bytes,
)
from meshscope.capture.profiling.window_request import (
    WindowRequest,
    format_request,
    parse_request,
)
from meshscope.capture.profiling.window_schedule import WindowSchedule
from meshscope.core.layout import Layout
from meshscope.errors import UsageError

MESH = Layout(dp=2, tp=2, pp=2)


def traced_steps(schedule: WindowSchedule, num_steps: int) -> list[int]:
    """Steps in traces when windows are taken one after another."""
    found: list[int] = []
    for finished in range(1, num_steps):
        if schedule.is_begin(finished):
            first = finished + schedule.warmup
            found += range(first, first + schedule.active)
    return [step for step in found if step < num_steps]


def test_a_schedule_traces_the_steps_that_torchs_does():
    torch = pytest.importorskip("torch", reason="compared with torch.profiler.schedule")
    profiler = pytest.importorskip("torch.profiler")
    record = (
        profiler.ProfilerAction.RECORD,
        profiler.ProfilerAction.RECORD_AND_SAVE,
    )
    assert torch is not None
    for skip, wait, warmup, active, repeat in itertools.product(
        (1, 2, 5), (0, 1, 3), (1, 2), (1, 2, 3), (0, 1, 2)
    ):
        ours = WindowSchedule(skip=skip, wait=wait, warmup=warmup, active=active, repeat=repeat)
        theirs = profiler.schedule(
            skip_first=skip, wait=wait, warmup=warmup, active=active, repeat=repeat
        )
        expected = [step for step in range(30) if theirs(step) in record]
        assert traced_steps(ours, 30) == expected, ours


def test_a_schedule_is_over_after_its_last_cycle():
    schedule = WindowSchedule(skip=2, wait=1, warmup=1, active=1, repeat=2)
    assert [schedule.is_over(finished) for finished in (0, 7, 8, 100)] == [False, False, True, True]
    assert not WindowSchedule(repeat=0).is_over(10**9)


@pytest.mark.parametrize(
    "fields",
    [{"active": 0}, {"skip": -1}, {"skip": 0, "wait": 0}, {"repeat": 10**10}],
)
def test_a_schedule_that_makes_no_sense(fields):
    with pytest.raises(UsageError):
        WindowSchedule(**fields)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", {0, 1, 2, 3, 4, 5, 6, 7}),
        ("stages", {MESH.rank_of(pp=0), MESH.rank_of(pp=1)}),
        ("0,3", {0, 3}),
        ("2-4,7", {2, 3, 4, 7}),
        ("dp0.tp0", {MESH.rank_of(pp=0), MESH.rank_of(pp=1)}),
        ("tp1", {rank for rank in range(8) if MESH.coordinates(rank).tp == 1}),
        ("dp1.tp1.pp1,0", {0, MESH.rank_of(dp=1, tp=1, pp=1)}),
        ("99", set()),
    ],
)
def test_selectors_on_a_mesh(text, ranks):
    choice = RankChoice.parse(text)
    assert {rank for rank in range(8) if choice.has(rank, MESH)} == ranks
    assert RankChoice.parse(str(choice)) == choice


def test_without_a_mesh_stages_are_rank_0_and_coordinates_nobody():
    assert [rank for rank in range(4) if RankChoice.parse("stages").has(rank, None)] == [0]
    assert [rank for rank in range(4) if RankChoice.parse("dp0.tp0").has(rank, None)] == []


@pytest.mark.parametrize("text", ["", "dp0-tp0", "-1", "first", "0,,3", "xx0"])
def test_a_selector_that_makes_no_sense(text):
    with pytest.raises(UsageError, match="chooses no ranks"):
        RankChoice.parse(text)


def test_the_example_of_the_documentation():
    text = "skip=5,wait=1,warmup=1,active=1,repeat=1,ranks=stages,shapes,stack"
    assert parse_settings(text) == ProfilingSettings(shapes=True, stack=True)


@pytest.mark.parametrize("text", ["", "default"])
def test_the_default_is_light(text):
    assert parse_settings(text) == ProfilingSettings()


def test_off_is_nothing():
    assert parse_settings("off") is None


def test_a_list_of_ranks_goes_on_after_its_commas():
    settings = parse_settings("ranks=0,3,dp1.tp0,shapes,active=2")
    assert settings.ranks == RankChoice(("0", "3", "dp1.tp0"))
    assert (settings.shapes, settings.schedule.active) == (True, 2)


@pytest.mark.parametrize(
    "text",
    [
        "skip=3,repeat=0,ranks=0,3,modules,memory,cap=5000,plain",
        "triggered,ranks=all,anomaly,signal,cooldown=7,cooldown_s=30,limit=2",
    ],
)
def test_settings_read_back_from_their_text(text):
    settings = parse_settings(text)
    assert parse_settings(settings.to_text()) == settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torchrun", "'torchrun' is no setting; expected skip=, "),
        ("skip=many", "skip=many is no whole number"),
        ("skip=1,skip=2", "skip is given twice"),
        ("active=0", "active is 0; expected 1"),
        ("ranks=dp", "'dp' chooses no ranks"),
        ("shapes,3", "'3' is no setting"),
        ("cap=12 parsecs", "'12 parsecs' is no size"),
        ("triggered,active=2", "triggered leaves the schedule out"),
        ("speed=9", "'speed=9' is no setting"),
        ("x" * 3000, "3000 characters"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text, said):
    with pytest.raises(UsageError, match="trace windows") as caught:
        parse_settings(text)
    assert said in str(caught.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UsageError) as caught:
        parse_settings("fast,skip=x,ranks=none")
    assert all(part in str(caught.value) for part in ("'fast'", "skip=x", "'none'"))


def test_settings_by_name():
    changed = change_settings(ProfilingSettings(), active=3, ranks=[0, 3], stack=True)
    assert changed == parse_settings("active=3,ranks=0,3,stack")


@pytest.mark.parametrize(
    "changes", [{"aktive": 3}, {"active": "3"}, {"stack": 1}, {"max_bytes": -1}, {"ranks": "x"}]
)
def test_a_wrong_name_or_kind(changes):
    with pytest.raises(UsageError):
        change_settings(ProfilingSettings(), **changes)


@pytest.mark.parametrize(
    ("text", "size"), [("100", 100), ("1kB", 1000), ("2 MiB", 2 << 20), ("3GiB", 3 << 30)]
)
def test_sizes(text, size):
    assert read_bytes(text) == size


def test_a_request_reads_back():
    data = format_request(num_steps=2, first_step=120, ranks="0,3")
    expected = WindowRequest(
        reason="a trigger file", num_steps=2, first_step=120, ranks=RankChoice(("0", "3"))
    )
    assert parse_request(data) == expected
    assert parse_request(b"") == parse_request(b" \n") == WindowRequest(reason="a trigger file")


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"nonsense",
        b"[" * 4096,
        b'{"steps": 0}',
        b'{"steps": true}',
        b'{"steps": 1e9}',
        b'{"first_step": -1}',
        b'{"ranks": 3}',
        b'{"ranks": "x"}',
        b'{"other": 1}',
        b"\xff\xfe",
    ],
)
def test_a_request_that_makes_no_sense(data):
    with pytest.raises(UsageError):
        parse_request(data)

"""The screen of a run, drawn headless on runs with known content."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from builders import MS, START_MONO_NS, make_writer, put_scalar, put_step
from command_line import invoke
from hang_builders import Job as StuckJob
from late_runs import LateRun, noisy
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import build_schedule
from meshscope.page.heat.cells import METRICS
from meshscope.watch.app import WatchApp
from meshscope.watch.findings_list import name_findings
from meshscope.watch.screen import View, draw_screen
from meshscope.watch.watched import Watched
from pipeline_builders import Recipe, make_pipeline_run, stage_cost

SIZES = ((80, 24), (120, 40))
HOSTILE = "<b>x</b>\x1b]0;owned\x07\x1b[2J\u202e\nnext[red]line"
USUAL = noisy(1, num_ranks=32)


def make_slow(rank, step):
    """Rank 2 takes 20 ms longer in forward."""
    own = USUAL(rank, step)
    return own | {"forward": own["forward"] + (20 * MS if rank == 2 else 0)}


def record(path: Path, *, num_ranks: int = 4, num_steps: int = 30, **more) -> Path:
    LateRun(layout=Layout(dp=num_ranks), work=make_slow, num_steps=num_steps, **more).record(path)
    return path


def watch(path: Path) -> Watched:
    watched = Watched.of(path)
    watched.poll()
    watched.analyze(now=True)
    return watched


def draw(watched: Watched, size=(80, 24), mode="run") -> list[str]:
    lines = draw_screen(watched, View(mode=mode), *size)
    assert len(lines) == size[1]
    assert all(line.cell_len <= size[0] for line in lines)
    return [line.plain for line in lines]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return watch(record(tmp_path_factory.mktemp("watch") / "slow"))


@pytest.mark.parametrize("size", SIZES)
def test_the_screen_answers_what_and_who(slow, size):
    lines = draw(slow, size)
    assert lines[0].startswith("slow  finished  step 29")
    assert lines[1].startswith("▲ Rank 2 is slow in forward: saves")
    assert any(line.startswith("▲fast") for line in lines)
    rows = [line for line in lines if line.startswith("   2 dp2")]
    assert set(rows[0][18:47]) == {"+"}
    assert set(next(line for line in lines if line.startswith("   1 dp1"))[18:47]) == {"."}
    assert any("compute" in line and "wait" in line for line in lines)
    table = "dp" if size == SIZES[0] else "exposed wait"
    assert any(line.startswith(table) and "ms" in line for line in lines)
    assert lines[-1].startswith("q quit")


def test_lines_that_are_left_say_what_to_do_and_since_when(slow):
    text = "\n".join(draw(slow))
    assert "\nWhat to do: Look at the rank's host" in text
    assert "\nSince the first analysed step, 1 (" in text
    assert "   2 dp2 " in text  # the layout has no other axis
    assert not any(line.startswith("What to do") for line in draw(slow, (80, 13)))


def test_findings_that_do_not_fit_are_counted(slow):
    glance = replace(slow.glance, findings=slow.glance.findings[:1] * 20)
    line = name_findings(glance, 80).plain
    assert line.count("ST001") + int(line.rpartition("+")[2].split()[0]) == 20
    assert len(line) <= 80


def test_a_wide_screen_has_what_to_change_and_lanes(tmp_path):
    recipe = Recipe(
        schedule=build_schedule("1f1b", 2, 4), cost=stage_cost({0: (2, 4), 1: (3, 5)}), num_chains=2
    )
    watched = watch(make_pipeline_run(tmp_path / "run", recipe))
    lines = draw(watched, SIZES[1])
    at = next(i for i, line in enumerate(lines) if line.startswith("pipeline, step"))
    lane = lines[at + 1][18:].replace("·", "").replace(" ", "")
    # 1F1B on the first of two stages.
    assert "".join(dict.fromkeys(lane)) == "01a2b3cd"
    assert not any(line.startswith("pipeline, step") for line in draw(watched, SIZES[0]))


def test_a_wide_screen_has_the_lines_of_the_budget_by_axis(slow):
    """Its numbers are those of the budget; the narrow one has a row per axis instead."""
    lines = draw(slow, SIZES[1])
    at = next(i for i, line in enumerate(lines) if line.startswith("per step"))
    assert lines[at].split()[2:5] == ["time", "share", "dp"]
    budget = slow.glance.report.study.budget
    totals = dict(zip((one.name for one in budget.lines), budget.total_ns(), strict=True))
    mean_ns = totals["exposed wait dp"] / budget.wall_ns.size
    row = next(line for line in lines[at:] if line.startswith("exposed wait"))
    value, unit = row.split()[2:4]
    assert float(value) * {"ms": 1e6, "µs": 1e3}[unit] == pytest.approx(mean_ns, rel=0.01)
    assert row.split()[-2:] == [value, unit]  # all of it is along dp
    assert any(line.startswith("hidden behind compute") for line in lines[at:])
    assert not any(line.startswith("per step") for line in draw(slow, SIZES[0]))


@pytest.mark.parametrize("mode", ["rank", "findings", "keys"])
@pytest.mark.parametrize("size", [*SIZES, (30, 8), (5, 3)])
def test_every_view_fits_every_size(slow, mode, size):
    draw(slow, size, mode)
    draw(slow, size)


def test_many_ranks_show_those_that_stand_out(tmp_path):
    watched = watch(record(tmp_path / "run", num_ranks=32, num_steps=20))
    lines = draw(watched)
    first = next(i for i, line in enumerate(lines) if line.startswith("own work"))
    assert lines[first + 1].startswith("   2 dp2")
    assert any("ranks, at most" in line for line in lines)


def test_names_from_a_run_act_on_nothing(tmp_path):
    path = record(tmp_path / "we\x1b[31mird[b]name", host=lambda rank: HOSTILE, num_steps=12)
    watched = watch(path)
    for mode in ("run", "rank", "findings"):
        text = "".join(draw(watched, SIZES[1], mode))
        assert text.isprintable()
    assert "[b]" in draw(watched, SIZES[1])[0]


def test_a_live_run_grows_on_the_screen(tmp_path):
    path = tmp_path / "run"
    writers = [make_writer(path, rank, 2, layout={"dp": 2}) for rank in range(2)]

    def step(number):
        for writer in writers:
            begin = START_MONO_NS + number * 20 * MS
            put_scalar(writer, "loss", number, begin, 5.0 - number / 10)
            put_step(writer, number, begin, begin + 10 * MS, input_tokens=64)

    step(0)
    watched = watch(path)
    lines = draw(watched)
    assert "step 0" in lines[0]
    assert lines[1] == "? Too few steps to judge. There is no verdict before 5 steps."
    for number in range(1, 8):
        step(number)
    watched.poll()
    assert draw(watched)[0].startswith("run  live  step 7")
    assert [number for number, _ in watched.steps] == list(range(8))
    for writer in writers:
        writer.close(end_host_mono_ns=START_MONO_NS + 10_000 * MS, num_errors=0, errors={})
    watched.poll()
    assert "finished" in draw(watched)[0]


def test_missing_ranks_and_failures_are_said(tmp_path):
    path = tmp_path / "run"
    writer = make_writer(path, 0, 4)
    for number in range(6):
        begin = START_MONO_NS + number * 20 * MS
        put_step(writer, number, begin, begin + 10 * MS)
    writer.journal.write("exit", exception=f"ValueError: {HOSTILE}")
    writer.close(end_host_mono_ns=START_MONO_NS + 1000 * MS, num_errors=0, errors={})
    watched = watch(path)
    lines = draw(watched)
    assert "failed" in lines[0]
    assert "1 of 4 ranks" in lines[0]
    assert lines[1] == "▲ Rank 0 stopped with ValueError."
    assert any(line == "! of 1 of 4 ranks" for line in lines)


def test_a_stuck_run_leads_with_who_is_waited_for(tmp_path):
    job = StuckJob(tmp_path / "run", world_size=4)
    for rank in range(3):
        job.rank(rank).enters("all_reduce", job.world, ago_s=60)
    watched = watch(tmp_path / "run")
    lines = draw(watched)
    assert "stuck" in lines[0]
    assert "Rank 3 has recorded nothing" in lines[1]


def test_a_run_without_ranks_waits(tmp_path):
    path = tmp_path / "run"
    make_writer(path, 0, 1)
    for folder in path.glob("rank*"):
        folder.rename(tmp_path / "elsewhere")
    watched = Watched.of(path)
    watched.poll()
    lines = draw(watched)
    assert "no step yet" in lines[0]
    assert lines[1] == "? waiting for the first rank to record"
    assert "no rank has recorded" in " ".join(lines)


def test_keys(tmp_path):
    """In the real application: an event goes to the view it is for."""
    path = record(tmp_path / "run", num_steps=12)

    async def drive():
        app = WatchApp(watch(path))
        view = app.run_screen.view
        async with app.run_test(size=(80, 24)) as pilot:
            seen = [view.mode]
            for key in ("f", "f", "question_mark", "escape", "up", "up", "enter"):
                await pilot.press(key)
                seen.append(view.mode)
            shown = app.export_screenshot()
            await pilot.press("escape", "m", "p")
            state = (view.selected, view.is_paused, app.watched.metric)
            await pilot.press("q")
        return seen, shown, state

    seen, shown, state = asyncio.run(drive())
    assert seen == ["run", "findings", "run", "keys", "run", "run", "run", "rank"]
    assert "this&#160;rank" in shown
    assert state == (0, True, list(METRICS)[1])


def test_without_a_terminal_there_is_one_line(tmp_path):
    path = record(tmp_path / "run", num_steps=12)
    for flags in (["--once"], ["--plain"], []):
        result = invoke("watch", path, *flags)
        assert result.exit_code == 0, result.output
        (line,) = result.output.splitlines()
        assert " run finished step 11 " in line
        assert "4 ranks: Rank 2 is slow in forward" in line


def test_a_path_that_is_no_run_is_one_line(tmp_path):
    result = invoke("watch", tmp_path / "nothing")
    assert (result.exit_code, len(result.output.splitlines())) == (3, 1)

"""The communication part of the report, from recordings with known ground truth."""

import re
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from rich.cells import cell_len

from builders import HEADER_BYTES, MS, SECOND, flip_byte, make_run, table_path
from command_line import invoke
from communication_builders import Job, operation_words
from ended_process import run_process
from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.report.documents import DOCUMENTS
from meshscope.report.encode import describe
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run import communication
from meshscope.report.run.communication import CommunicationFacts
from meshscope.report.run.report import Detail, Report
from meshscope.report.screen import Screen
from meshscope.report.sections.run.communication import describe_communication
from meshscope.store.write.in_flight import InFlightWriter, channel_code
from meshscope.store.write.now_file import NOW_NAME, NowFile
from report_builders import document_of, render_report, report_of
from screens import find_widest

STEP_NS = 100 * MS
LATE_NS = 10 * MS
EVIL = "[bold]x[/bold]\x1b[31m\x1b]0;owned\x07\nsecond\u202eline\ud800[/]"


def facts_of(report: Report) -> CommunicationFacts:
    assert isinstance(report.communication, CommunicationFacts)
    return report.communication


def section_of(report: Report, *, is_full: bool = False, width: int = 100) -> str:
    """The section alone."""
    detail = Detail(shows_all_communication=is_full)
    without = ", without the first step"
    section = describe_communication(facts_of(report), detail, without=without)
    return render_terminal([section], Screen(width=width))


def make_late_run(
    path: Path,
    *,
    num_ranks: int = 4,
    num_steps: int = 20,
    late_buckets: tuple[int, ...] = (0, 1, 2),
) -> Path:
    """dp × pp; in each step three all-reduces, at some of which rank 1 is late, and messages."""
    job = Job(path, num_ranks=num_ranks, layout=Layout(dp=num_ranks // 2, pp=2))
    dp = [job.group(range(pp, num_ranks, 2), description="mesh_dp") for pp in range(2)]
    pp = [job.group((rank, rank + 1), description="mesh_pp") for rank in range(0, num_ranks, 2)]
    for step in range(num_steps):
        begin = step * STEP_NS
        for stage, group in enumerate(dp):
            members = range(stage, num_ranks, 2)
            for bucket in range(3):
                moment = begin + (40 + 20 * bucket) * MS
                arrivals = {rank: moment + rank * 10_000 for rank in members}
                if 1 in members and bucket in late_buckets:
                    arrivals[1] = moment + LATE_NS
                job.collective(
                    group,
                    arrivals,
                    transfer_ns=(1 << bucket) * MS,
                    size_bytes=(1 << bucket) << 20,
                    step=step,
                    phase="backward",
                )
        for place, group in enumerate(pp):
            source = 2 * place
            job.message(
                group,
                source,
                source + 1,
                sent_ns=begin + 10 * MS,
                asked_ns=begin + 5 * MS,
                latency_ns=2 * MS,
                size_bytes=1 << 18,
                step=step,
            )
        job.step(step, begin, begin + STEP_NS)
    job.close()
    return path


def make_disagreeing_run(path: Path) -> Path:
    job = Job(path, num_ranks=4, layout=Layout(dp=4))
    group = job.group(range(4), description="mesh_dp")
    for step in range(6):
        wrong = {3: {"kind": int(Kind.ALL_GATHER), "size_bytes": 512}} if step == 3 else None
        job.collective(
            group,
            {rank: step * STEP_NS + rank * MS for rank in range(4)},
            step=step,
            phase="backward",
            overrides=wrong,
        )
        job.step(step, step * STEP_NS, (step + 1) * STEP_NS)
    job.close()
    return path


def make_failing_run(path: Path, message: str = "gloo: connection closed by peer") -> Path:
    job = Job(path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    for step in range(5):
        failed = {
            0: {"outcome": int(Outcome.ERROR)},
            1: {"outcome": int(Outcome.TIMEOUT)},
        }
        keys = job.collective(
            group,
            {rank: step * STEP_NS + rank * MS for rank in range(2)},
            step=step,
            phase="backward",
            overrides=failed if step == 4 else None,
        )
        if step == 4:
            job.note_error(0, keys[0], message)
        job.step(step, step * STEP_NS, (step + 1) * STEP_NS)
    job.close()
    return path


# --- how it looks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [100, 60])
def test_the_head_of_the_section_looks_as_agreed(tmp_path, golden, width):
    report = report_of(make_late_run(tmp_path))
    golden(f"reports/communication-late-{width}.txt", section_of(report, width=width))


def test_the_page_shows_the_section_as_it_is():
    golden = Path(__file__).parents[2] / "golden" / "reports" / "communication-late-100.txt"
    page = Path(__file__).parents[3] / "docs" / "report.md"
    example = golden.read_text(encoding="utf-8").strip("\n")
    assert f"```\n{example}\n```" in page.read_text(encoding="utf-8")


def test_the_whole_section_looks_as_agreed(tmp_path, golden):
    report = report_of(make_late_run(tmp_path))
    golden("reports/communication-late-full.txt", section_of(report, is_full=True))


def test_a_disagreement_looks_as_agreed(tmp_path, golden):
    report = report_of(make_disagreeing_run(tmp_path))
    golden("reports/communication-disagreement.txt", section_of(report))


def test_failures_look_as_agreed(tmp_path, golden):
    report = report_of(make_failing_run(tmp_path))
    golden("reports/communication-failures.txt", section_of(report))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("is_full", [False, True])
def test_no_line_is_wider_than_the_terminal(tmp_path, width, is_full):
    text = section_of(report_of(make_late_run(tmp_path)), width=width, is_full=is_full)
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_the_head_of_an_ordinary_job_is_short(tmp_path):
    report = report_of(make_late_run(tmp_path, num_ranks=8))
    assert len(section_of(report).splitlines()) <= 25
    assert len(section_of(report, is_full=True).splitlines()) > 50


def test_many_axes_and_many_disagreements_do_not_fill_the_screen(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    for number in range(9):
        group = job.group(range(2), description=f"mesh_axis{number}")
        wrong = {1: {"size_bytes": 8}} if number < 4 else None
        job.collective(group, {0: 0, 1: MS}, step=0, overrides=wrong)
    job.step(0, 0, STEP_NS)
    job.close()
    report = report_of(tmp_path)
    text = section_of(report)
    assert "and 2 more disagreements (--communication)" in text
    assert "and 3 more axes (--communication)" in text
    assert "more" not in section_of(report, is_full=True)


def test_a_terminal_without_unicode_gets_ascii(tmp_path):
    report = report_of(make_late_run(tmp_path))
    text = render_report(report, Screen(is_unicode=False), shows_all_communication=True)
    assert text.isascii()
    assert "?" not in text


# --- numbers --------------------------------------------------------------------------------------


def test_a_late_rank_is_named_with_its_cost_and_phase(tmp_path):
    facts = facts_of(report_of(make_late_run(tmp_path)))
    late = [entry for entry in facts.last_arrivers if entry.is_beyond_chance]
    assert [(e.axis, e.rank) for e in late] == [("all", 1), ("dp", 1), ("all", 2), ("dp", 2)]
    assert (late[1].num_last, late[1].num_operations, late[1].phase) == (57, 57, "backward")
    assert late[1].cost_ns == 57 * (LATE_NS - 30_000)
    text = section_of(report_of(tmp_path), width=300)
    assert (
        "rank 1 arrived last in 57 of 57 dp operations (28.5 expected by chance) and cost 568 ms; "
        "others waited 568 ms; it is late in backward\n"
        "        and 1 that cost less (--communication)\n"
    ) in text


def test_a_rank_that_is_late_once_a_step_is_named_for_the_steps_it_held_up(tmp_path):
    report = report_of(make_late_run(tmp_path, late_buckets=(1,)))
    assert (
        "rank 1 held its dp group up most in 19 of 19 steps (9.5 expected by chance): it arrived "
        "last in 19 of 57 operations and cost 189 ms; others waited 189 ms; it is late in backward"
    ) in section_of(report, width=300)


def test_parts_add_up_and_means_are_sums_over_rank_steps(tmp_path):
    report = report_of(make_late_run(tmp_path))
    facts = facts_of(report)
    assert facts.num_rank_steps == 4 * 19
    for row in (facts, *facts.axes, *facts.kinds, *facts.ranks):
        total, mean = row.total, row.per_rank_step
        within = total.exposed_wait_ns + total.exposed_transfer_ns + total.exposed_unsplit_ns
        assert total.span_ns == total.wait_ns + total.transfer_ns + total.unsplit_ns
        assert total.span_ns == within + total.overlapped_ns
        assert total.exposed_ns == within + total.exposed_late_ns
        assert mean.exposed_ratio == pytest.approx(mean.exposed_ns / STEP_NS)
    assert facts.per_rank_step.wait_ns == facts.total.wait_ns / (4 * 19)
    assert sum(axis.total.exposed_ns for axis in facts.axes) == facts.total.exposed_ns
    assert sum(rank.total.exposed_ns for rank in facts.ranks) == facts.total.exposed_ns


def test_bandwidth_is_in_powers_of_1000_and_messages_are_counted_by_pair(tmp_path):
    facts = facts_of(report_of(make_late_run(tmp_path)))
    row = next(
        r
        for r in facts.found.bandwidth
        if r.kind is Kind.ALL_REDUCE and r.size_bucket_bytes == 4 << 20
    )
    assert row.median_transfer_ns == pytest.approx(4 * MS, rel=0.01)
    assert row.bus_bytes_per_s == pytest.approx((4 << 20) / 4e-3, rel=0.01)  # dp 2: factor 1
    assert [(m.source, m.target, m.num_messages) for m in facts.messages] == [
        (0, 1, 19),
        (2, 3, 19),
    ]
    assert facts.messages[0].mean_latency_ns == 2 * MS
    assert facts.messages[0].mean_wait_ns == 5 * MS


def test_pairs_beyond_the_limit_are_counted(tmp_path, monkeypatch):
    make_late_run(tmp_path)
    monkeypatch.setattr(communication, "MAX_MESSAGE_PAIRS", 1)
    facts = facts_of(report_of(tmp_path))
    assert (len(facts.messages), facts.num_message_pairs) == (1, 2)
    assert "and 1 more pair of ranks with less data (see --json)" in section_of(
        report_of(tmp_path), is_full=True
    )


def test_the_document_holds_what_the_analysis_says(tmp_path):
    for make in (make_late_run, make_disagreeing_run, make_failing_run):
        report = report_of(make(tmp_path / make.__name__))
        document, found = document_of(report)["communication"], report.study.communication
        assert document["total"]["exposed_ns"] == found.total.exposed_ns
        assert len(document["bandwidth"]) == len(found.bandwidth)
        assert document["health"]["num_failed"] == len(document["failures"])
        assert document["health"]["num_left_out"] == found.health.num_warmup


def test_both_sides_of_a_disagreement_are_in_the_document_and_said_first(tmp_path):
    report = report_of(make_disagreeing_run(tmp_path))
    (found,) = document_of(report)["communication"]["desynchronisations"]
    assert (found["sequence"], found["num_untrusted"]) == (3, 3)
    assert [(side["kind"], side["ranks"]) for side in found["sides"]] == [
        ("all_reduce", [{"first": 0, "last": 2}]),
        ("all_gather", [{"first": 3, "last": 3}]),
    ]
    lines = render_report(report, Screen(width=200)).splitlines()
    assert lines[1] == (
        "! Ranks disagree on what they communicate, first in operation #3 of the dp group of "
        "ranks 0-3 (--section communication)."
    )


def test_failures_have_their_message_or_say_that_there_is_none(tmp_path):
    facts = facts_of(report_of(make_failing_run(tmp_path)))
    assert facts.found.health.num_failed == 2
    assert [(failure.rank, failure.outcome) for failure in facts.failures] == [
        (0, Outcome.ERROR),
        (1, Outcome.TIMEOUT),
    ]
    assert facts.failures[0].message == "gloo: connection closed by peer"
    assert facts.failures[1].message.reason == "no message was recorded"


def test_clocks_are_there_only_when_there_are_several(tmp_path):
    assert facts_of(report_of(make_late_run(tmp_path / "one"))).clocks == ()
    clocks = {"node1": (5 * SECOND, 20.0)}
    job = Job(tmp_path / "two", num_ranks=4, host=lambda rank: f"node{rank // 2}", clocks=clocks)
    group = job.group(range(4))
    for step in range(40):
        begin = step * STEP_NS
        arrivals = {rank: begin + rank * MS for rank in range(4)}
        job.collective(group, arrivals, step=step, notice_ns=dict.fromkeys(range(4), 500))
        job.step(step, begin, begin + STEP_NS)
    job.close()
    report = report_of(tmp_path / "two")
    found = facts_of(report).clocks
    assert (found[0].host, found[0].method) == ("node0", "reference")
    assert found[1].offset_ns == pytest.approx(5 * SECOND, abs=MS)
    assert "Clocks" in section_of(report)
    assert "clock of" in section_of(report, is_full=True)


def test_without_steps_times_are_per_rank_and_means_are_not_known(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    job.collective(job.group(range(2)), {0: 0, 1: 4 * MS}, transfer_ns=2 * MS)
    job.close()
    report = report_of(tmp_path)
    facts = facts_of(report)
    assert facts.per_rank_step.reason == "no step finished"
    text = section_of(report)
    assert text.splitlines()[1] == "Communication  times per rank, because no step finished"
    row = next(line for line in text.splitlines() if line.startswith("  world")).split()
    assert row[:9] == ["world", "1", "4.00", "KiB", "2.00", "ms", "2.00", "ms", "4.00"]


def test_when_all_steps_are_warm_up_nothing_is_shown_as_zero(tmp_path):
    report = report_of(make_late_run(tmp_path, num_steps=4), warmup=4)
    text = section_of(report)
    assert "none of the 64 operations recorded is in a step after warm-up" in text
    assert "recognised 64 of 64 rank-operations;" in text


# --- what cannot be trusted -----------------------------------------------------------------------


def test_recognising_nothing_is_loud(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for step in range(5):
        moments = {0: step * STEP_NS, 1: step * STEP_NS}
        job.collective(group, moments, kind=Kind.CUSTOM, end_source=EndSource.WAIT, step=step)
        job.step(step, step * STEP_NS, (step + 1) * STEP_NS)
    job.close()
    text = render_report(report_of(tmp_path), Screen(width=200))
    assert text.splitlines()[1].startswith(
        "! None of the 10 communication operations is of a kind that this version knows"
    )
    assert "recognised 0 of 10 rank-operations;" in text


def test_hostile_names_have_no_effect(tmp_path):
    header = {"host": EVIL}
    job = Job(tmp_path, num_ranks=3, host=lambda rank: EVIL + str(rank), header=lambda rank: header)
    group = job.group((0, 1), name=EVIL, description=EVIL, backend=EVIL)
    for step in range(5):
        outcome = {1: {"outcome": int(Outcome.ERROR)}} if step == 4 else None
        keys = job.collective(
            group, {0: step * STEP_NS, 1: step * STEP_NS + MS}, step=step, phase=EVIL,
            overrides=outcome,
        )  # fmt: skip
    job.note_error(1, keys[1], EVIL)
    job.close()
    report = report_of(tmp_path)
    document_of(report)
    for is_full in (False, True):
        text = render_report(report, shows_all_communication=is_full)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "owned" not in text
        assert "failed" in text
        assert "([bold]x[/bold] secondline?[/])" in text
        assert find_widest(text, but=tmp_path) <= 100


def test_damage_in_the_table_of_operations_is_a_problem_of_the_rank(tmp_path):
    make_late_run(tmp_path)
    flip_byte(table_path(tmp_path / "rank00002/attempt000", "collectives"), HEADER_BYTES + 64 + 20)
    report = report_of(tmp_path)
    assert not report.study.health.is_complete
    assert [rank.num_problems for rank in report.study.ranks] == [0, 0, 1, 0]
    assert facts_of(report).found.health.num_unmatched == 1


def test_operations_that_nobody_left_are_there_even_if_they_are_the_first(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    job.group(range(2))
    for rank, writer in job.writers.items():
        begin = job.local_ns(rank, 0)
        words = operation_words(enqueue_ns=begin, outcome=Outcome.UNFINISHED)
        under_way = InFlightWriter(NowFile(writer.directory / NOW_NAME, mapped=False), begin)
        row = under_way.open_channel(channel_code(0, -1, 0))
        under_way.enter(row, 1, words[0], words[1], begin, words[5], words[6])
        under_way.close()
        writer.flush()
        writer.journal.close()
    report = report_of(tmp_path)
    assert facts_of(report).found.health.num_unfinished == 2
    assert "; 2 entered and not left" in section_of(report, width=200)


def test_an_error_of_the_analysis_is_not_swallowed(tmp_path, monkeypatch):
    make_late_run(tmp_path)

    def fail(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("meshscope.analyze.communication.communication.analyze_communication", fail)
    report = report_of(tmp_path)
    with pytest.raises(ZeroDivisionError):
        render_report(report)


# --- runs that do not communicate -----------------------------------------------------------------


def test_no_communication_is_said_for_several_ranks_and_not_for_one(tmp_path):
    make_run(tmp_path / "one", num_steps=4)
    make_run(tmp_path / "two", layout=Layout(dp=2), num_steps=4)
    one, two = report_of(tmp_path / "one"), report_of(tmp_path / "two")
    assert one.communication == two.communication
    assert isinstance(one.communication, Unavailable)
    assert "Communication" not in render_report(one, Screen())
    assert "Communication\n  n/a: no communication was recorded" in render_report(two, Screen())


def test_the_analysis_is_not_loaded_for_a_run_that_does_not_communicate(tmp_path):
    make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=4)
    code = (
        "import sys\n"
        "from meshscope.cli import main\n"
        "main(['report', sys.argv[1]], standalone_mode=False)\n"
        "loaded = [name for name in sys.modules if 'analyze.communication.communication' in name]\n"
        "sys.exit(str(loaded) if loaded else 0)\n"
    )
    done = run_process([sys.executable, "-c", code, str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr


def test_the_flag_shows_the_section_in_full(tmp_path):
    make_late_run(tmp_path / "run")

    def text_of(*flags):
        result = invoke("report", tmp_path / "run", *flags)
        assert result.exit_code == 0, result.output
        return result.stdout

    short, full = text_of("--all"), text_of("--all", "--communication")
    assert text_of("--communication") in full
    assert "last to arrive" not in short
    assert "last to arrive" in full
    assert re.search(r"^  dp all_reduce +\d", full, flags=re.MULTILINE)
    assert text_of("--json") == text_of("--json", "--communication")


def test_documents_with_communication_are_valid(tmp_path):
    schema = describe("meshscope-report", *DOCUMENTS["meshscope-report"])
    for make in (make_late_run, make_disagreeing_run, make_failing_run):
        document = document_of(report_of(make(tmp_path / make.__name__)))
        Draft202012Validator(schema).validate(document)

"""A run that grows under the eyes of a watcher: made-up ranks, real files, a clock of the test."""

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from synthetic_run import Fault, Job, append_steps, close_run

from meshscope.alarms.kept_book import KeptBook
from meshscope.alarms.settings import WatchSettings, read_settings
from meshscope.alarms.watcher import Watcher
from meshscope.errors import UsageError
from meshscope.report.alarm_event import AlarmEvent, EventKind
from meshscope.store.write.journal import JOURNAL_NAME, pack_extent, pack_line

NUM_RANKS, SLOW = 16, 11
STEP_S = 0.109


class Watched:
    """A job, its files and a watcher, on one clock."""

    def __init__(self, path: Path, *faults: Fault, settings: WatchSettings | None = None) -> None:
        self.path = path
        self.now_s = 0.0
        self.job = Job(num_ranks=NUM_RANKS, faults=faults)
        self.settings = settings or WatchSettings()
        self.watcher = Watcher(path, self.settings, clock=lambda: self.now_s)
        self.events: list[tuple[float, AlarmEvent]] = []
        self.notes: list[str] = []

    def run(self, num_steps: int) -> None:
        for _ in append_steps(self.path, self.job, num_steps, chunk_steps=40):
            self.now_s = self.job.step * STEP_S
            self.look()

    def look(self) -> None:
        look = self.watcher.look()
        self.events += [(self.now_s, event) for event in look.events]
        self.notes += look.notes

    @property
    def told(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(one.event.value, one.code, one.ranks) for _, one in self.events]


def test_a_watcher_that_is_started_again_does_not_tell_what_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, settings = tmp_path / "run", WatchSettings()
    watched = Watched(run, Fault(rank=SLOW, end_step=700))
    kept = KeptBook(run, settings)
    watched.watcher = Watcher(run, settings, clock=lambda: watched.now_s, kept=kept)
    watched.run(400)
    watched.watcher.keep_told()
    assert watched.told[0][:2] == ("raised", "ST001")
    raised = watched.events[0][1].id
    beside = KeptBook(run, settings)  # a second watcher beside it begins without
    assert beside.problem is not None
    kept.close()
    watched.events.clear()
    watched.watcher = Watcher(
        run, settings, clock=lambda: watched.now_s - 1000.0, kept=(again := KeptBook(run, settings))
    )
    watched.run(200)
    assert f"told before, and standing: {raised} " in watched.notes[0]
    assert not [one for one in watched.told if one[0] == "raised"]
    watched.run(1000)
    watched.watcher.keep_told()
    again.close()
    assert [(one.event.value, one.id) for _, one in watched.events][-1] == ("cleared", raised)
    last = Watched(run)
    last.watcher = Watcher(run, settings, kept=(empty := KeptBook(run, settings)))
    last.look()
    empty.close()
    assert (last.notes, last.events) == ([], [])


def test_what_stood_in_an_earlier_launch_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, settings = tmp_path / "run", WatchSettings()
    watched = Watched(run, Fault(rank=SLOW))
    kept = KeptBook(run, settings)
    watched.watcher = Watcher(run, settings, clock=lambda: watched.now_s, kept=kept)
    watched.run(400)
    watched.watcher.keep_told()
    kept.close()
    assert watched.told[0][0] == "raised"
    shutil.rmtree(run)
    other = Watched(run)
    other.watcher = Watcher(
        run, settings, clock=lambda: other.now_s, kept=(again := KeptBook(run, settings))
    )
    for _ in append_steps(run, other.job, 40, start_unix_ns=1_800_000_000_000_000_000):
        other.look()
    again.close()
    assert [(one.event.value, one.reason) for _, one in other.events] == [
        ("cleared", "the job was launched again")
    ]


def test_a_slow_rank_is_told_with_its_price_once_and_cleared(tmp_path: Path) -> None:
    first, end = 400, 800
    watched = Watched(tmp_path, Fault(rank=SLOW, first_step=first, end_step=end))
    watched.run(1600)
    # Its severity may rise while the window fills with slow steps.
    (raised_s, raised), *risen, (cleared_s, cleared) = watched.events
    assert {one.event for _, one in risen} <= {EventKind.CHANGED}
    assert (raised.event, raised.ranks) == (EventKind.RAISED, (SLOW,))
    assert raised.hosts == ("node1",)
    assert 0 < raised_s - first * STEP_S <= 30
    # Forward takes 15 ms more on one of 16 ranks, of a step of about 109 ms: a bound from above.
    assert 0.05 < raised.saved_ratio < 0.15
    assert raised.saved_ns == pytest.approx(raised.saved_ratio * raised.step_ns)
    assert (cleared.event, cleared.id) == (EventKind.CLEARED, raised.id)
    assert end * STEP_S < cleared_s
    assert not watched.watcher.book.standing


def test_a_healthy_run_rings_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.run(1200)
    close_run(tmp_path, watched.job, 1200)
    watched.now_s += 20
    watched.look()
    assert watched.events == []
    assert watched.watcher.num_diagnoses > 2


def test_a_run_that_is_over_is_told_in_one_look(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Fault(rank=SLOW, first_step=40))
    list(append_steps(tmp_path, watched.job, 400, chunk_steps=40))
    close_run(tmp_path, watched.job, 400)
    watched.look()
    assert [one[0] for one in watched.told] == ["raised", "cleared"]
    assert {one[2] for one in watched.told} == {(SLOW,)}


def test_a_stall_is_told_and_cleared_when_steps_come_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.run(120)
    for _ in range(4):
        watched.now_s += 15
        watched.look()
    assert watched.told == [("raised", "stall", ())]
    for _ in append_steps(tmp_path, watched.job, 160, chunk_steps=40):
        watched.now_s += 4
        watched.look()
    assert watched.told == [("raised", "stall", ()), ("cleared", "stall", ())]


def test_a_rank_that_fails_is_told_at_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.run(80)
    journal = tmp_path / "rank00003" / "attempt000" / JOURNAL_NAME
    text = json.dumps({"kind": "exit", "exception": "ValueError: \x1b[31mbad"}).encode()
    with journal.open("r+b") as file:
        file.seek(0, 2)
        file.write(pack_line(text))
        size = file.tell()
        file.seek(0)
        file.write(pack_extent(size))
    watched.now_s += 12
    watched.look()
    ((_, event),) = watched.events
    assert (event.code, event.ranks, event.severity.word) == ("failed", (3,), "critical")
    assert event.summary == "rank 3 ended with ValueError: bad"


def test_a_rank_that_falls_silent_is_told(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.run(80)
    ranks = watched.job.num_ranks - 1  # the last one's files no longer grow
    for _ in range(4):
        first, moments = watched.job.step, watched.job.draw(40)
        from synthetic_run import WORDS_PER_STEP, append_records, rank_folder, table_words

        for rank in range(ranks):
            for name, words in table_words(moments, rank, first).items():
                path = rank_folder(tmp_path, rank) / f"{name}.tbl"
                append_records(path, words, first * WORDS_PER_STEP[name])
        watched.now_s += 40 * STEP_S
        watched.look()
    assert ("raised", "behind", (15,)) in watched.told


def test_a_trace_is_asked_for_where_ranks_listen(tmp_path: Path) -> None:
    settings = read_settings(None, {"trace": {"steps": 2, "min_severity": "medium"}})
    watched = Watched(tmp_path, Fault(rank=SLOW, first_step=200), settings=settings)
    watched.run(480)
    # Nobody records with --profiling here: it says so, and the alarm is told all the same.
    assert [note for note in watched.notes if "no rank of" in note and "--profiling" in note]
    # Its severity may rise while the window fills with slow steps.
    assert [event for event, _, _ in watched.told if event != "changed"] == ["raised"]
    assert not (tmp_path / "trigger").exists()


def test_many_ranks_are_looked_at_in_turn_and_the_slow_one_at_once(tmp_path: Path) -> None:
    settings = read_settings(None, {"watch": {"max_ranks": 8}})
    watched = Watched(tmp_path, Fault(rank=SLOW, first_step=300), settings=settings)
    watched.run(700)
    assert [one.ranks for _, one in watched.events] == [(SLOW,)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[alarms]\nmin_severty = 'low'", "min_severty"),
        ("[alarms]\nmin_severity = 'loud'", "'loud' is no severity"),
        ("[watch]\nmax_ranks = 'all'", "$.watch.max_ranks"),
        ("[webhook\n", "is not TOML"),
        ("[slack]", r"\[slack\] has no url"),
        ("[on_finding]\ncommand = ''", r"\[on_finding\] has no command"),
        ("[prometheus]\nhost = '0.0.0.0'", r"\[prometheus\] has no port"),
        ("[alarms]\nignore = ['ST001', 'XX9']", "there is no code 'XX9'"),
        ("[thresholds]\nfail_slow = 0.2", "watch.toml: .thresholds.: there is no threshold"),
        ("[thresholds]\nfail_slow_min_shift_ratio = -1", "it takes 0.1 or more"),
    ],
)
def test_settings_that_make_no_sense_are_told_with_their_place(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "watch.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=expected.replace("$", r"\$")):
        read_settings(path, {})


def test_the_settings_that_the_page_shows_are_those_without_a_file(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "watching.md"
    shown = page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "watch.toml"
    path.write_text(shown, encoding="utf-8")
    settings, unset = read_settings(path, {}), WatchSettings()
    assert settings.alarms.ignore == ("CO002",)
    assert settings.watch == unset.watch
    assert replace(settings.alarms, ignore=()) == unset.alarms
    assert (settings.trace, settings.log) == (unset.trace, unset.log)


def test_flags_stand_above_the_file(tmp_path: Path) -> None:
    path = tmp_path / "watch.toml"
    path.write_text("[prometheus]\nport = 1\n[alarms]\nconfirm = 3\n")
    settings = read_settings(path, {"prometheus": {"port": 0}})
    assert (settings.prometheus.port, settings.alarms.confirm) == (0, 3)

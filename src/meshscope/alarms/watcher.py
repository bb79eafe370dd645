"""Watches one run: reads what is new, screens every rank, diagnoses the last steps.

    watcher = Watcher(path, settings)
    while not (look := watcher.look()).is_over:
        …                                   # look.events, look.sample
        time.sleep(watcher.wait_s)

Three things of rising cost: a screening of all ranks (every look); journals and curves, by a
follower of a few ranks (every 10 s); and a diagnosis of the last steps of some ranks: those that
stand out and others in turn, at once when somebody new stands out or the pace changed. All together
take the share of a core that the settings give. Where no step is new for long, `hang` says whom the
job waits for.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshscope.alarms.book import AlarmBook, Change
from meshscope.alarms.kept_book import KeptBook
from meshscope.alarms.rank_choice import choose_ranks
from meshscope.alarms.recent import take_recent
from meshscope.alarms.sample import Sample, StandingAlarm
from meshscope.alarms.screening import Screening
from meshscope.alarms.settings import WatchSettings
from meshscope.alarms.sighting import Sighting, note_finding
from meshscope.alarms.stalls import WATCH_CODES, look_for_hang, see_behind, see_failed
from meshscope.analyze.study import Study
from meshscope.core.unavailable import known
from meshscope.core.verdict.severity import parse_severity
from meshscope.core.verdict.thresholds import choose_thresholds
from meshscope.diagnose.context import Context
from meshscope.diagnose.registry import list_thresholds
from meshscope.diagnose.runner import diagnose
from meshscope.errors import MeshscopeError, RunEmpty, RunError
from meshscope.live.follower import Follower
from meshscope.live.moment import Moment
from meshscope.live.pace import Pace
from meshscope.live.run_name import name_run
from meshscope.live.trace_request import request_trace
from meshscope.report import format as form
from meshscope.report.alarm_event import AlarmEvent, EventKind
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.run import Attempt

_MIN_STEPS = 20
"""Before that there is no diagnosis: first steps are none of a run."""
_DIAGNOSIS_LEAST_S, _URGENT_LEAST_S = 20.0, 4.0
_LOOK_PART, _POLL_PART, _DIAGNOSIS_PART = 0.4, 0.2, 0.4
"""Of the CPU share."""
_POLL_LEAST_S = 10.0
_FOLLOWED_RANKS = 8
"""Whose steps and curves the follower reads: those of all are screened."""
_MAX_URGENT = 6
_URGENT_EVERY_S = 60.0
"""An urgent diagnosis goes above the share; so many are saved up, one more in so many seconds."""
_CHANGE_RATIO = 1.05
"""The job's steps take so much longer than before: worth a look at once."""
_NEW_STEPS, _OLD_STEPS = 20, 200
_OF_LIFE = ("HE002",)
"""Findings about ranks that ended: who failed, is stuck or dead is watched for by itself."""
_STALL_PACES = 10
_HANG_LEAST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """What one look gave."""

    moment: Moment | None
    """None while nothing was recorded yet."""
    sample: Sample | None
    events: tuple[AlarmEvent, ...]
    notes: tuple[str, ...] = ()
    """What else a log should say: a trace that was asked for, what cannot be read."""

    @property
    def is_over(self) -> bool:
        return self.moment is not None and self.moment.is_over


class Watcher:
    def __init__(
        self,
        path: Path,
        settings: WatchSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptBook | None = None,
    ) -> None:
        """`kept`: what an earlier watcher told, and where this one notes what it does."""
        self.path = path
        self._kept = kept
        self._settings = settings
        self._clock = clock
        self._thresholds = choose_thresholds(
            list_thresholds(), assignments=[f"{k}={v}" for k, v in settings.thresholds.items()]
        )
        self._follower = Follower(path, max_ranks=_FOLLOWED_RANKS)
        self._moment: Moment | None = None
        self.book = AlarmBook(settings.alarms)
        self._screening: Screening | None = None
        self._moved_s = clock()
        self._wait_s = settings.watch.every_s
        share = settings.watch.cpu_share
        self._look_cpu_ratio = 1 / (share * _LOOK_PART)
        poll_ratio, ratio = 1 / (share * _POLL_PART), 1 / (share * _DIAGNOSIS_PART)
        self._poll_pace = Pace(least_s=_POLL_LEAST_S, cpu_ratio=poll_ratio, clock=clock)
        self._diagnosis_pace = Pace(least_s=_DIAGNOSIS_LEAST_S, cpu_ratio=ratio, clock=clock)
        self._urgent_pace = Pace(least_s=_URGENT_LEAST_S, cpu_ratio=0.0, clock=clock)
        self._hang_pace = Pace(least_s=_HANG_LEAST_S, cpu_ratio=ratio, clock=clock)
        self._urgent_left, self._urgent_s = _MAX_URGENT, clock()
        self._turn = 0
        self._diagnosed_step = -1
        self._known_suspects: frozenset[int] = frozenset()
        self._durations: deque[int] = deque(maxlen=_NEW_STEPS + _OLD_STEPS)
        self._signals: dict[str, float] = {}
        self._traces_left, self._next_trace_s = settings.trace.limit, clock()
        self._hang: tuple[Sighting, ...] = ()
        self.num_diagnoses = 0

    @property
    def wait_s(self) -> float:
        """How long to wait before the next look."""
        return self._wait_s

    def look(self) -> Look:
        """Raises RunError where there is no run to watch."""
        begun = self._clock()
        changes: list[Change] = []
        is_first = self._moment is None
        try:
            moment = self._poll(changes)
        except RunError as error:
            if self._screening is None and not isinstance(error, RunEmpty):
                raise
            note = form.clean_text(str(error))
            return Look(moment=None, sample=None, events=(), notes=(note,))
        attempt = self._follower.attempt
        assert attempt is not None
        told = self._take_over(attempt, changes) if is_first else ()
        cpu = time.thread_time()
        screening, new_ns = self._screen(attempt)
        looked_s = time.thread_time() - cpu
        changes += self._watch_life(attempt, moment, screening)
        changes += self._diagnose(attempt, moment, screening)
        if moment.is_over:
            changes += self._end(moment)
        events = tuple(self._describe(one, attempt, moment) for one in changes)
        notes = (*told, *self._ask_for_traces(events, attempt))
        wait_s = max(self._settings.watch.every_s, looked_s * self._look_cpu_ratio)
        self._wait_s = max(wait_s - (self._clock() - begun), wait_s / 4)
        return Look(moment=moment, sample=self._sample(moment, new_ns), events=events, notes=notes)

    def keep_told(self) -> None:
        """Notes what was told, after it was: the next watcher does not tell it again."""
        attempt = self._follower.attempt
        if self._kept is not None and attempt is not None and self._moment is not None:
            self._kept.save(self.book, _name_attempt(attempt), self._clock())

    def _take_over(self, attempt: Attempt, changes: list[Change]) -> tuple[str, ...]:
        """What an earlier watcher told and what still stands of it, as notes."""
        if self._kept is None:
            return ()
        notes = [] if self._kept.problem is None else [self._kept.problem]
        named = self._kept.load(self.book, self._clock())
        if named is not None and named != _name_attempt(attempt):
            changes += self.book.clear_all(self._clock(), "the job was launched again")
        standing = self.book.standing
        notes += [f"told before, and standing: {one.id} {one.seen.title}" for one in standing]
        return tuple(notes)

    # --- what is new ------------------------------------------------------------------------------

    def _poll(self, changes: list[Change]) -> Moment:
        """The run's state and curves, read now where that is due."""
        is_stalled = self._clock() - self._moved_s > self._settings.alarms.stall_s / 2
        if self._moment is not None and not (self._poll_pace.is_due or is_stalled):
            return self._moment
        begun, cpu = self._clock(), time.thread_time()
        moment = self._moment = self._follower.poll()
        self._poll_pace.note(begun, time.thread_time() - cpu)
        if moment.is_other_attempt:
            changes += self.book.clear_all(self._clock(), "the job was launched again")
            self._screening, self._diagnosed_step, self._hang = None, -1, ()
            self._known_suspects = frozenset()
            self._durations.clear()
            self._signals.clear()
        for points in moment.series:
            self._signals[form.clean_text(points.key, 60)] = float(points.value[-1])
        return moment

    def _screen(self, attempt: Attempt) -> tuple[Screening, Int64s]:
        """All ranks, and how long each new step took."""
        if self._screening is None or self._screening.ranks != tuple(attempt.ranks):
            self._screening = Screening(attempt)
        new_ns = self._screening.look()
        if len(new_ns):
            self._moved_s, self._hang = self._clock(), ()
        self._durations.extend(new_ns.tolist())
        return self._screening, new_ns

    def _end(self, moment: Moment) -> list[Change]:
        """What a watcher saw of the end itself stands."""
        changes = self.book.clear_all(self._clock(), f"the run is over: {moment.state.text}")
        return [one for one in changes if one.alarm.seen.code not in WATCH_CODES]

    # --- does it live -----------------------------------------------------------------------------

    def _watch_life(self, attempt: Attempt, moment: Moment, screening: Screening) -> list[Change]:
        now_s = self._clock()
        settings = self._settings.alarms
        stalled_s = now_s - self._moved_s
        limit_s = max(settings.stall_s, _STALL_PACES * (moment.pace_ns or 0) / 1e9)
        sightings = [*see_failed(attempt)]
        if not moment.is_over and stalled_s > limit_s:
            if self._hang_pace.is_due:
                cpu = time.thread_time()
                self._hang = look_for_hang(attempt, stalled_s)
                self._hang_pace.note(now_s, time.thread_time() - cpu)
            sightings += self._hang
        elif not moment.is_over:
            sightings += see_behind(attempt, screening, settings.behind_steps)
        return self.book.update(
            sightings, now_s, covers=lambda seen: seen.code in WATCH_CODES and not moment.is_over
        )

    # --- diagnosis --------------------------------------------------------------------------------

    def _diagnose(self, attempt: Attempt, moment: Moment, screening: Screening) -> list[Change]:
        """At the end of a run at any rate, and without waiting for a second look: none follows."""
        is_last = moment.is_over
        if screening.step is None or (screening.step == self._diagnosed_step and not is_last):
            return []
        if screening.num_steps < _MIN_STEPS and not is_last:
            return []
        suspects = frozenset(screening.find_suspects())
        is_urgent = self._is_urgent(suspects)
        if not (self._diagnosis_pace.is_due or is_urgent or is_last):
            return []
        begun, cpu = self._clock(), time.thread_time()
        look = self._settings.watch
        wanted = [*sorted(suspects), *sorted(self.book.known_ranks - suspects)]
        ranks = choose_ranks(attempt, wanted, max_ranks=look.max_ranks, turn=self._turn)
        # Half of the window is of now twice as soon: what is new need not fill all of it.
        is_early = is_urgent and not is_last
        num_steps = max(look.window_steps // 2, _MIN_STEPS) if is_early else look.window_steps
        found = self._find(attempt, ranks, num_steps)
        self._turn += 1
        self._diagnosed_step = screening.step
        self._known_suspects = suspects
        cpu_s = time.thread_time() - cpu
        if is_urgent and not self._diagnosis_pace.is_due:
            self._urgent_left -= 1
        self._diagnosis_pace.note(begun, cpu_s)
        self._urgent_pace.note(begun, cpu_s)
        chosen = frozenset(ranks)
        return self.book.update(
            found,
            self._clock(),
            covers=lambda seen: seen.code not in WATCH_CODES and chosen.issuperset(seen.ranks),
            is_last=is_last,
        )

    def _is_urgent(self, suspects: frozenset[int]) -> bool:
        """Somebody new stands out, a finding waits for a second look, or steps got longer."""
        now_s = self._clock()
        if now_s - self._urgent_s >= _URGENT_EVERY_S:
            self._urgent_s = now_s
            self._urgent_left = min(self._urgent_left + 1, _MAX_URGENT)
        if self._urgent_left <= 0 or not self._urgent_pace.is_due:
            return False
        return bool(suspects - self._known_suspects) or self.book.has_unconfirmed or self._slowed()

    def _slowed(self) -> bool:
        if len(self._durations) < 2 * _NEW_STEPS:
            return False
        durations = np.array(self._durations)
        old, new = durations[:-_NEW_STEPS], durations[-_NEW_STEPS:]
        return bool(np.median(new) > _CHANGE_RATIO * np.median(old))

    def _find(self, attempt: Attempt, ranks: Iterable[int], num_steps: int) -> list[Sighting]:
        recent = take_recent(attempt, ranks, num_steps)
        if recent is None or not recent.ranks:
            return []
        self.num_diagnoses += 1
        found = diagnose(Context(Study(recent), thresholds=self._thresholds))
        return [note_finding(one) for one in found.findings if one.code not in _OF_LIFE]

    # --- what is told -----------------------------------------------------------------------------

    def _describe(self, change: Change, attempt: Attempt, moment: Moment) -> AlarmEvent:
        alarm, seen, now_s = change.alarm, change.alarm.seen, self._clock()
        told_unix_ns = time.time_ns()
        hosts = [attempt.ranks[rank].header.get("host") for rank in seen.ranks[:16]
                 if rank in attempt.ranks]  # fmt: skip
        return AlarmEvent(
            event=change.kind,
            id=alarm.id,
            run=str(self.path),
            name=name_run(self.path),
            attempt=moment.attempt,
            code=seen.code,
            severity=seen.severity,
            title=seen.title,
            summary=seen.summary,
            change=seen.change,
            ranks=seen.ranks,
            hosts=tuple(dict.fromkeys(form.clean_text(str(host), 60) for host in hosts if host)),
            saved_ns=seen.saved_ns,
            step_ns=seen.step_ns,
            saved_ratio=seen.saved_ratio,
            confidence=seen.confidence,
            step=self._step,
            since_unix_ns=told_unix_ns - int((now_s - alarm.first_s) * 1e9),
            told_unix_ns=told_unix_ns,
            reason=change.reason,
        )

    def _ask_for_traces(self, events: Iterable[AlarmEvent], attempt: Attempt) -> tuple[str, ...]:
        trace = self._settings.trace
        wanted = [
            event
            for event in events
            if event.event is EventKind.RAISED
            and event.severity >= parse_severity(trace.min_severity)
        ]
        is_due = self._clock() >= self._next_trace_s and self._traces_left > 0
        if not (trace.steps and wanted and is_due):
            return ()
        ranks = ",".join(str(rank) for rank in wanted[0].ranks[:4]) or None
        try:
            first = request_trace(self.path, attempt, num_steps=trace.steps, ranks=ranks)
        except MeshscopeError as error:
            return (f"no trace for {wanted[0].id}: {form.clean_text(str(error))}",)
        self._next_trace_s = self._clock() + trace.cooldown_s
        self._traces_left -= 1
        who = "the job's ranks" if ranks is None else f"ranks {ranks}"
        when = "as soon as ranks see it" if first is None else f"from step {first} on"
        return (f"asked {who} for a trace of {form.plural(trace.steps, 'step')}, {when}",)

    @property
    def _step(self) -> int | None:
        return None if self._screening is None else self._screening.step

    def _sample(self, moment: Moment, new_ns: Int64s) -> Sample:
        return Sample(
            name=name_run(self.path),
            unix_ns=time.time_ns(),
            state=moment.state.kind.value,
            attempt=moment.attempt,
            step=self._step,
            step_ns=float(np.median(new_ns)) if len(new_ns) else None,
            steps_per_s=1e9 / moment.pace_ns if moment.pace_ns else None,
            tokens_per_s=moment.tokens_per_s,
            age_s=None if self._step is None else self._clock() - self._moved_s,
            num_ranks=moment.num_ranks,
            world_size=moment.world_size,
            signals=dict(self._signals),
            alarms=tuple(
                StandingAlarm(
                    code=one.seen.code,
                    severity=one.seen.severity,
                    rank=one.seen.ranks[0] if one.seen.ranks else None,
                    saved_ratio=known(one.seen.saved_ratio),
                )
                for one in self.book.standing
            ),
            watcher_cpu_s=time.process_time(),
        )


def _name_attempt(attempt: Attempt) -> str:
    starts = [recording.start_unix_ns for recording in attempt]
    return f"{attempt.launch_id} {attempt.restart_count} {min(starts, default=0)}"

"""Which alarms stand: every cause is told once, and once more when it is gone.

A sighting becomes an alarm when it was seen in so many looks one after another (`confirm`), at
once where it is certain. An alarm is cleared when so many looks that would have seen it did not
(`clear`). What comes back within the cool-down after that stands again without being told anew, so
that a cause at the edge of its threshold does not ring all day.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from meshscope.alarms.settings import AlarmSettings
from meshscope.alarms.sighting import Sighting
from meshscope.core.unavailable import known
from meshscope.core.verdict.severity import Severity, parse_severity
from meshscope.report.alarm_event import EventKind


@dataclass(slots=True, kw_only=True)
class Alarm:
    """A cause that was seen, told or not."""

    seen: Sighting
    """As it is now."""
    id: str
    """Of the rule and rank by which it was first seen."""
    first_s: float
    """When it was first seen, on the watcher's clock."""
    num_seen: int = 0
    num_missed: int = 0
    is_told: bool = False
    told_severity: Severity = Severity.LOW
    told_s: float = 0.0
    cleared_s: float | None = None
    """Since when it is gone; None while it stands."""
    is_silent: bool = False
    """It came back within the cool-down: its end is not told either."""

    @property
    def stands(self) -> bool:
        return self.is_told and self.cleared_s is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be told."""

    kind: EventKind
    alarm: Alarm
    reason: str = ""


class AlarmBook:
    """All alarms of one run."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._least = parse_severity(settings.min_severity)
        self._alarms: list[Alarm] = []
        self._number = 0

    def restore(self, alarms: Iterable[Alarm], number: int, shift_s: float) -> None:
        """Takes over what another watcher told; `shift_s` leads from its clock to this one."""
        self._alarms += [_shift(alarm, shift_s) for alarm in alarms]
        self._number = max(self._number, number)

    def list_told(self, shift_s: float) -> tuple[tuple[Alarm, ...], int]:
        """What was told and is not forgotten, on another clock; and the number of the last one."""
        return tuple(_shift(one, shift_s) for one in self._alarms if one.is_told), self._number

    def describe_told(self) -> tuple[object, ...]:
        """Another value where `list_told` would matter to the next watcher."""
        return tuple(
            (one.id, one.told_severity, one.told_s, one.cleared_s, one.is_silent, one.seen.ranks)
            for one in self._alarms
            if one.is_told
        )

    @property
    def standing(self) -> list[Alarm]:
        return [alarm for alarm in self._alarms if alarm.stands]

    @property
    def known_ranks(self) -> set[int]:
        """Culprits of alarms that stand or wait for a second look."""
        known_alarms = (alarm for alarm in self._alarms if alarm.cleared_s is None)
        return {rank for alarm in known_alarms for rank in alarm.seen.ranks}

    @property
    def has_unconfirmed(self) -> bool:
        return any(not alarm.is_told for alarm in self._alarms)

    def update(
        self,
        sightings: Iterable[Sighting],
        now_s: float,
        *,
        covers: Callable[[Sighting], bool] = lambda seen: True,
        is_last: bool = False,
    ) -> list[Change]:
        """A look was made; `covers` says whether it would have seen a cause. After the last one
        nothing can be confirmed: what it saw is told."""
        self._forget(now_s)
        found = [one for one in sightings if self._counts(one)]
        changes: list[Change] = []
        for one in found:
            changes += self._note(one, now_s, is_last=is_last)
        for alarm in list(self._alarms):
            if any(alarm.seen.is_same_cause(one) for one in found) or not covers(alarm.seen):
                continue
            changes += self._miss(alarm, now_s)
        return changes

    def clear_all(self, now_s: float, reason: str) -> list[Change]:
        """The run is over, or another one."""
        standing = self.standing
        for alarm in standing:
            alarm.cleared_s = now_s
        self._alarms = []
        return [Change(kind=EventKind.CLEARED, alarm=one, reason=reason) for one in standing]

    def _counts(self, one: Sighting) -> bool:
        settings = self._settings
        if one.severity < self._least or one.code in settings.ignore:
            return False
        share = known(one.saved_ratio)
        return share is None or share >= settings.min_saved_ratio

    def _note(self, one: Sighting, now_s: float, *, is_last: bool) -> list[Change]:
        alarm = next((a for a in self._alarms if a.seen.is_same_cause(one)), None)
        if alarm is None:
            self._number += 1
            rank = f"-{one.ranks[0]}" if one.ranks else ""
            alarm = Alarm(seen=one, id=f"{one.code}{rank}-{self._number}", first_s=now_s)
            self._alarms.append(alarm)
        has_returned = alarm.cleared_s is not None
        alarm.num_seen, alarm.num_missed = alarm.num_seen + 1, 0
        before, alarm.seen = alarm.seen, one
        if not alarm.is_told:
            is_sure = one.is_certain or is_last
            if alarm.num_seen < self._settings.confirm and not is_sure:
                return []
            return [self._tell(alarm, EventKind.RAISED, now_s)]
        alarm.cleared_s = None
        alarm.is_silent = alarm.is_silent or has_returned
        if one.severity > alarm.told_severity:
            return [
                self._tell(alarm, EventKind.RAISED if has_returned else EventKind.CHANGED, now_s)
            ]
        alarm.seen = replace(one, ranks=before.ranks) if set(one.ranks) < set(before.ranks) else one
        remind_s = self._settings.remind_s
        if remind_s and now_s - alarm.told_s >= remind_s:
            return [self._tell(alarm, EventKind.REMINDED, now_s)]
        return []

    def _tell(self, alarm: Alarm, kind: EventKind, now_s: float) -> Change:
        alarm.is_told, alarm.told_s, alarm.told_severity = True, now_s, alarm.seen.severity
        alarm.is_silent = False
        return Change(kind=kind, alarm=alarm)

    def _miss(self, alarm: Alarm, now_s: float) -> list[Change]:
        alarm.num_missed += 1
        if not alarm.is_told:
            alarm.num_seen = 0
            return []
        if alarm.cleared_s is not None or alarm.num_missed < self._settings.clear:
            return []
        alarm.cleared_s = now_s
        if alarm.is_silent:
            return []
        return [Change(kind=EventKind.CLEARED, alarm=alarm, reason="it is no longer seen")]

    def _forget(self, now_s: float) -> None:
        """What was not confirmed, and what was cleared longer ago than the cool-down."""
        cooldown_s = self._settings.cooldown_s
        self._alarms = [
            alarm
            for alarm in self._alarms
            if (alarm.is_told or alarm.num_seen)
            and (alarm.cleared_s is None or now_s - alarm.cleared_s < cooldown_s)
        ]


def _shift(alarm: Alarm, shift_s: float) -> Alarm:
    cleared_s = None if alarm.cleared_s is None else alarm.cleared_s + shift_s
    return replace(
        alarm,
        first_s=alarm.first_s + shift_s,
        told_s=alarm.told_s + shift_s,
        cleared_s=cleared_s,
        num_missed=0,
    )

from meshscope.alarms.book import AlarmBook
from meshscope.alarms.settings import AlarmSettings
from meshscope.alarms.sighting import Sighting
from meshscope.core.verdict.severity import Severity


def see(code: str = "ST001", *ranks: int, severity: Severity = Severity.HIGH) -> Sighting:
    return Sighting(code=code, severity=severity, title="slow", summary="", ranks=ranks)


def told(book: AlarmBook, now_s: float, *sightings: Sighting) -> list[str]:
    return [change.kind.value for change in book.update(sightings, now_s)]


def test_a_finding_is_told_at_the_second_look_and_cleared_after_two_without_it() -> None:
    book = AlarmBook(AlarmSettings())
    looks = [see("ST001", 5)], [see("ST001", 5)], [see("ST001", 5)], [], [], []
    assert [told(book, at, *one) for at, one in enumerate(looks)] == [
        [], ["raised"], [], [], ["cleared"], [],
    ]  # fmt: skip


def test_what_the_last_look_sees_is_told_without_a_second_one() -> None:
    (change,) = AlarmBook(AlarmSettings()).update([see("ST001", 5)], 0.0, is_last=True)
    assert change.kind.value == "raised"


def test_what_is_seen_once_and_again_much_later_is_not_confirmed() -> None:
    book = AlarmBook(AlarmSettings())
    assert [told(book, at, *one) for at, one in enumerate(([see()], [], [see()], []))] == [[]] * 4


def test_what_comes_back_within_the_cool_down_is_not_told_unless_it_is_worse() -> None:
    book = AlarmBook(AlarmSettings(confirm=1, clear=1, cooldown_s=100))
    assert told(book, 0, see("ST001", 5)) == ["raised"]
    assert told(book, 10) == ["cleared"]
    assert told(book, 20, see("ST001", 5)) == []
    assert told(book, 30) == []
    assert told(book, 40, see("ST001", 5, severity=Severity.CRITICAL)) == ["raised"]
    assert told(book, 50) == ["cleared"]
    assert told(book, 200, see("ST001", 5)) == ["raised"]


def test_one_cause_under_two_rules_of_a_subject_is_one_alarm() -> None:
    book = AlarmBook(AlarmSettings(confirm=1))
    assert told(book, 0, see("ST003", 5)) == ["raised"]
    assert told(book, 1, see("ST001", 5, 6)) == []
    assert told(book, 2, see("ST001", 5), see("ST001", 7)) == ["raised"]
    assert told(book, 3, see("ST001", 5), see("ST001", 7), see("CO001", 5)) == ["raised"]


def test_only_looks_that_would_have_seen_it_clear_an_alarm() -> None:
    book = AlarmBook(AlarmSettings(confirm=1, clear=1))
    told(book, 0, see("ST001", 5))
    assert book.update([], 1, covers=lambda seen: 5 not in seen.ranks) == []
    assert len(book.update([], 2)) == 1


def test_quiet_ones_are_ignored_and_standing_ones_remind() -> None:
    book = AlarmBook(AlarmSettings(confirm=1, ignore=("CO002",), remind_s=60))
    assert told(book, 0, see("CO002"), see("ST001", 1, severity=Severity.LOW)) == []
    assert told(book, 1, see("ST001", 1)) == ["raised"]
    assert told(book, 30, see("ST001", 1)) == []
    assert told(book, 61, see("ST001", 1)) == ["reminded"]
    assert told(book, 62, see("ST001", 1, severity=Severity.CRITICAL)) == ["changed"]

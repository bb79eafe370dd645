"""Exact sums of records, as rows of table `aggregates`. Standard library only."""

from collections.abc import Callable, Iterable, Iterator

from meshscope.store.retention_tables import (
    AGGREGATE_STEPS,
    NO_DURATION,
    THINNED_TABLES,
    WINDOW_STEPS,
    bucket_of,
)
from meshscope.store.schema import BUILTIN_NAMES, SpanFlag

Words = tuple[int, int, int, int, int, int, int]
Part = tuple[int, int, int, int]
"""Of one record: kind, group and phase as in word 1 of `aggregates`; duration or -1; bytes; self
time."""

_PHASE = 0x7FFF << 48
_WINDOWS_PER_ROW = AGGREGATE_STEPS // WINDOW_STEPS


def _collective(words: Words) -> Part:
    head, _, _, start_ns, end_ns, size_bytes, _ = words
    code = (head & 0xFF) << 8 | head & 0xFFFF << 32 | head & _PHASE
    is_timed = start_ns >= 0 and end_ns >= start_ns
    return code, end_ns - start_ns if is_timed else -1, max(size_bytes, 0), 0


def _wait(words: Words) -> Part:
    return (words[0] & 0xFF) << 8 | words[0] & _PHASE, words[3], 0, 0


def _name(head: int) -> int:
    name_id = head & 0xFFFF
    return name_id << 48 if name_id < 1 << 15 else 0


def is_phase(head: int) -> bool:
    """Whether a record of `spans` with this first word is a part of the time line's partition."""
    return not (head >> 24 & SpanFlag.DETAIL or head >> 32 & 0xFFFF)


def _span(words: Words) -> Part:
    return is_phase(words[0]) << 8 | _name(words[0]), words[2], 0, words[3]


def _device_span(words: Words) -> Part:
    return _name(words[0]), words[3], 0, 0


def _action(words: Words) -> Part:
    return (words[0] & 0xFF) << 8, words[4], 0, 0


def _step(words: Words) -> Part:
    return 0, words[2] - words[1], max(words[5], 0), 0


def _scalar(words: Words) -> Part:
    return _name(words[0]), -1, 0, 0


def _counted(words: Words) -> Part:
    return 0, -1, 0, 0


_STAMPED = tuple(1 << 8 | BUILTIN_NAMES[name] << 48 for name in ("data", "forward", "backward"))
_OPTIMIZER = 1 << 8 | BUILTIN_NAMES["optimizer"] << 48


def _usual_phases(words: Words) -> Iterable[Part]:
    """The phases that one record holds; see `schema.PHASES`."""
    for index, code in enumerate(_STAMPED):
        begin_ns, end_ns = words[2 * index : 2 * index + 2]
        if begin_ns:
            yield code, end_ns - begin_ns, 0, end_ns - begin_ns
    if words[6]:
        optimizer_ns = words[6] & 0xFFFFFFFF
        yield _OPTIMIZER, optimizer_ns, 0, optimizer_ns


PART_OF: dict[str, Callable[[Words], Part]] = {
    "collectives": _collective,
    "waits": _wait,
    "spans": _span,
    "device_spans": _device_span,
    "actions": _action,
    "steps": _step,
    "scalars": _scalar,
}
"""Records of other tables but `phases` are counted."""


class RecordSums:
    """Of one table, in one round of thinning."""

    def __init__(self, table: str) -> None:
        self._source = THINNED_TABLES.index(table)
        part_of = PART_OF.get(table, _counted)
        self._parts_of: Callable[[Words], Iterable[Part]] = (
            _usual_phases if table == "phases" else lambda words: (part_of(words),)
        )
        self._sums: dict[tuple[int, int], list[int]] = {}

    def add(self, window: int, words: Words) -> None:
        for code, duration_ns, size_bytes, self_ns in self._parts_of(words):
            bucket = bucket_of(duration_ns) if duration_ns >= 0 else NO_DURATION
            key = (window // _WINDOWS_PER_ROW, code | bucket << 16)
            found = self._sums.get(key)
            if found is None:
                found = self._sums[key] = [0, 0, 0, 0]
            found[0] += 1
            found[1] += max(duration_ns, 0)
            found[2] += size_bytes
            found[3] += self_ns

    def rows(self, round_number: int) -> Iterator[Words]:
        for (block, code), (count, total_ns, total_bytes, self_ns) in sorted(self._sums.items()):
            first_step = block * AGGREGATE_STEPS
            yield (
                code | self._source, first_step, round_number, count, total_ns, total_bytes, self_ns
            )  # fmt: skip


_LEVEL = 0xFF << 24


def merge_rows(rows: Iterable[Words], level: int) -> list[Words]:
    """Rows of `aggregates` by blocks of 512 · 2^level steps; those of longer ones stay."""
    sums: dict[tuple[int, int], list[int]] = {}
    for code, first_step, round_number, *totals in rows:
        own = max(code >> 24 & 0xFF, level)
        block = first_step // (AGGREGATE_STEPS << own) * (AGGREGATE_STEPS << own)
        found = sums.setdefault((block, code & ~_LEVEL | own << 24), [0, 0, 0, 0, 0])
        found[0] = max(found[0], round_number)
        for index, value in enumerate(totals):
            found[index + 1] += value
    return [(code, block, *found) for (block, code), found in sorted(sums.items())]  # type: ignore[misc]

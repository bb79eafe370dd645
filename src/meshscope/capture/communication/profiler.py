"""The communication profiler: what a program and automatic capture talk to.

Operations come from blocks (`timed`), by hand (`record`) or from automatic capture (`observe`).
Each is appended to a list and no more; every 128 of them, or at a query, the list is folded
into the `Ledger`. One lock is held for that, and training does not wait for it.

Durations are what the caller measured: on the host, around an asynchronous call, that is the time
to issue it, and in a collective it includes the wait for the last rank. Nothing here raises into
the program, but for a UsageError when a setting, a decorated function or a file is wrong.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from meshscope.capture.communication.blocks import OpenOperation, TimedOperation
from meshscope.capture.communication.config import CommunicationConfig
from meshscope.capture.communication.events import (
    CommunicationEvent,
    Details,
    describe_failure,
    number_or_missing,
    operation_label,
    plain_details,
    resolve_kind,
    short_text,
    whole_number,
)
from meshscope.capture.communication.groups import GroupInfo
from meshscope.capture.communication.ledger import Ledger
from meshscope.capture.communication.stats import OperationStats
from meshscope.capture.communication.text import render_summary
from meshscope.capture.config import check_names
from meshscope.capture.guard import Guard
from meshscope.capture.identity import initialized_distributed, resolve_identity
from meshscope.capture.lifetime import remember
from meshscope.core.operations import Kind, Outcome
from meshscope.errors import MeshscopeError, UsageError

_EXPORT_VERSION = 1
FOLD_EVERY = 128
"""Records that wait at most, unless another thread holds the lock."""

Listener = Callable[[Details, int, int, Outcome], object]
"""Takes an operation that the program timed: what it is, begin, duration (-1: unknown), outcome."""

T = TypeVar("T")


class CommunicationProfiler:
    """Counts and times the communication of this process. Safe to use from any thread."""

    def __init__(
        self,
        config: CommunicationConfig | None = None,
        *,
        rank: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.guard = Guard()
        self.find_step: Callable[[], int] | None = None
        """Gives the step of operations that the program times; -1 when there is none."""
        self.before_asking: Callable[[], None] | None = None
        """Called before every query: automatic capture hands over what it holds back."""
        self.on_event: Listener | None = None
        """Called with every operation the program times: a recorder writes it into its run."""
        self._config = config or CommunicationConfig()
        self._is_enabled = self._config.enabled
        self._clock = clock
        self._wall_clock = wall_clock
        self._rank = rank
        self._lock = threading.RLock()
        self._is_busy = False
        self._pending: list[tuple[Any, ...]] = []
        self._ledger = Ledger(self._config)
        self._start_ns = clock()
        self._finish = self.guard.protect("timed operation", self._put_timed)
        remember(self)

    # --- recording ------------------------------------------------------------------------

    def timed(
        self,
        kind: Kind | str,
        *,
        size_bytes: int = 0,
        group: str = "",
        axis: str = "",
        group_size: int | None = None,
        rank: int | None = None,
        sequence: int | None = None,
        name: str = "",
        dtype: object = "",
        peer: int | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> TimedOperation:
        """A block, or a decorator, that records how long an operation took and how it ended.

        What is no known kind is a custom operation of that name. An exception is recorded with its
        message and goes on unchanged. `with … as operation` gives `operation.note(key, value)` and
        `operation.size_bytes`. Without a `sequence` the operations of a group are counted here.
        """
        details = Details(
            kind=kind,
            name=name,
            size_bytes=size_bytes,
            group=group,
            axis=axis,
            group_size=group_size,
            rank=rank,
            sequence=sequence,
            dtype=dtype,
            peer=peer,
            metadata=metadata,
        )
        return TimedOperation(details, self._clock, self._is_on, self._finish)

    def _is_on(self) -> bool:
        return self._is_enabled

    def _put_timed(
        self, details: Details, operation: OpenOperation, end_ns: int, error: BaseException | None
    ) -> None:
        outcome, message = (Outcome.OK, "") if error is None else describe_failure(error)
        start_ns = end_ns if operation.start_ns is None else operation.start_ns
        details = plain_details(details, operation.size_bytes, message, operation.notes)
        self._put(details, start_ns, end_ns - start_ns, outcome)

    def record(
        self,
        kind: Kind | str,
        duration_ns: int | None,
        *,
        size_bytes: int = 0,
        group: str = "",
        axis: str = "",
        group_size: int | None = None,
        rank: int | None = None,
        sequence: int | None = None,
        name: str = "",
        dtype: object = "",
        is_async: bool = False,
        peer: int | None = None,
        step: int | None = None,
        start_host_mono_ns: int | None = None,
        outcome: Outcome = Outcome.OK,
        message: str = "",
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """An operation timed elsewhere; None as its duration when no end was seen.

        Without `start_host_mono_ns` it is taken to have ended now.
        """
        if not self._is_enabled:
            return
        now_ns = self._clock()
        details = Details(
            kind=kind,
            name=name,
            size_bytes=size_bytes,
            group=group,
            axis=axis,
            group_size=group_size,
            rank=rank,
            sequence=sequence,
            dtype=dtype,
            is_async=is_async,
            peer=peer,
            step=step,
            metadata=metadata,
        )

        def put() -> None:
            start_ns = start_host_mono_ns
            if start_ns is None:
                start_ns = now_ns - max(number_or_missing(duration_ns), 0)
            plain = plain_details(details, size_bytes, short_text(message))
            self._put(plain, start_ns, duration_ns, outcome)

        self.guard.run("record", put)

    def _put(
        self, details: Details, start_ns: int, duration_ns: int | None, outcome: Outcome
    ) -> None:
        """Appends the program's details as numbers; a mistake raises here, not in the fold."""
        step = details.step
        if step is None and self.find_step is not None:
            step = self.find_step()
        self._pending.append(
            (
                int(details.kind),
                0,
                number_or_missing(details.sequence),
                details.size_bytes,
                whole_number(start_ns),
                number_or_missing(duration_ns),
                int(Outcome(outcome)),
                number_or_missing(step),
                0,
                int(details.is_async),
                number_or_missing(details.peer),
                details,
            )
        )
        if self.on_event is not None:
            self.on_event(details, start_ns, number_or_missing(duration_ns), outcome)
        if len(self._pending) >= FOLD_EVERY:
            self._fold_if_free()

    def observe(
        self,
        kind: int,
        group_id: int,
        sequence: int,
        size_bytes: int,
        start_ns: int,
        duration_ns: int,
        outcome: int,
        step: int,
        dtype_code: int,
        is_async: int,
        peer: int,
    ) -> None:
        """An operation seen by automatic capture. Integers only; -1 is what is not known.

        `group_id` is that of `set_group`, `start_ns` is of the profiler's clock (monotonic),
        `dtype_code` an index into `core.operations.DTYPES`. Flat: this runs for every operation.
        """
        if self._is_enabled:
            pending = self._pending
            pending.append(
                (kind, group_id, sequence, size_bytes, start_ns, duration_ns, outcome,
                 step, dtype_code, is_async, peer)
            )  # fmt: skip
            if len(pending) >= FOLD_EVERY:
                self._fold_if_free()

    def set_group(self, group_id: int, name: str, axis: str, ranks: Iterable[int]) -> None:
        """Says which group an id of `observe` means; again when its axis becomes known.

        What was recorded before then counts for the axis as well.
        """

        def register() -> None:
            known_ranks = tuple(int(rank) for rank in ranks)
            group = GroupInfo(str(name), str(axis), len(known_ranks) or None, known_ranks)
            with self._lock:
                self._fold()
                self._ledger.groups.set(group_id, group)

        self.guard.run("group", register)

    # --- folding --------------------------------------------------------------------------

    def _fold_if_free(self) -> None:
        """Training does not wait for a thread that folds or asks: a later call folds."""
        if self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    def _fold(self) -> None:
        """Moves what is pending into the ledger. The lock is held."""
        if self._is_busy:  # a signal handler in the middle of it, on the same thread
            return
        self._is_busy = True
        try:
            # Other threads go on appending: what is taken is cut off the front, the list stays.
            pending = self._pending
            num_taken = len(pending)
            batch = pending[:num_taken]
            del pending[:num_taken]
            if batch:
                self.guard.run("statistics", lambda: self._fold_batch(batch))
        finally:
            self._is_busy = False

    def _fold_batch(self, batch: list[tuple[Any, ...]]) -> None:
        self._ledger.fold(batch)
        self._learn_rank()

    def _ask(self, question: Callable[[Ledger], T]) -> T:
        if self.before_asking is not None:
            self.guard.run("capture", self.before_asking)
        with self._lock:
            self._fold()
            was_busy, self._is_busy = self._is_busy, True
            try:
                return question(self._ledger)
            finally:
                self._is_busy = was_busy

    # --- statistics -----------------------------------------------------------------------

    def operation_stats(self, kind: Kind | str) -> OperationStats | None:
        """Statistics of a kind, or of a custom operation by its name; None if there was none."""
        return self.all_operation_stats().get(operation_label(*resolve_kind(kind)))

    def all_operation_stats(self) -> dict[str, OperationStats]:
        """Statistics per operation, the one with the most time first."""
        return self._ask(lambda ledger: ledger.by_operation())

    def rank_stats(self, rank: int) -> dict[str, OperationStats]:
        """Statistics per operation of one rank; empty if there was none."""
        return self._ask(lambda ledger: ledger.by_rank(self.rank).get(rank, {}))

    def axis_stats(self, axis: str) -> OperationStats | None:
        """All operations along one axis of the mesh together; "" for those without one."""
        return self.all_axis_stats().get(axis)

    def all_axis_stats(self) -> dict[str, OperationStats]:
        """Statistics per axis, the one with the most time first."""
        return self._ask(lambda ledger: ledger.by_axis())

    def size_stats(self, kind: Kind | str) -> dict[int, OperationStats]:
        """Statistics of an operation by the lower end of the size bucket in bytes, ascending."""
        label = operation_label(*resolve_kind(kind))
        return self._ask(lambda ledger: ledger.by_size().get(label, {}))

    def total_stats(self) -> OperationStats:
        return self._ask(lambda ledger: ledger.total())

    @property
    def num_failed(self) -> int:
        """Operations that ended in an error or a timeout, since the start."""
        return self._ask(lambda ledger: ledger.num_failed)

    @property
    def num_observed(self) -> int:
        """Operations in the statistics, since the start; those sampled out are not."""
        return self._ask(lambda ledger: ledger.num_observed)

    @property
    def num_sampled_out(self) -> int:
        """Operations that the sample left out."""
        return self._ask(lambda ledger: ledger.num_sampled_out)

    @property
    def num_below_minimum(self) -> int:
        """Operations in the statistics that were too short to be events."""
        return self._ask(lambda ledger: ledger.num_below_minimum)

    @property
    def num_evicted(self) -> int:
        """Events that the ring had to forget."""
        return self._ask(lambda ledger: ledger.num_evicted)

    # --- events ---------------------------------------------------------------------------

    def events(self) -> list[CommunicationEvent]:
        """What is in the ring, oldest first."""
        return self._ask(lambda ledger: ledger.events(self.rank, self._unix_offset_ns()))

    def recent_events(self, number: int) -> list[CommunicationEvent]:
        """The last `number` events, oldest first."""
        return self._ask(lambda ledger: ledger.events(self.rank, self._unix_offset_ns(), number))

    def failed_operations(self) -> list[CommunicationEvent]:
        """The last 1000 failures, oldest first, also those that the ring has forgotten."""
        return self._ask(lambda ledger: ledger.failed_events(self.rank, self._unix_offset_ns()))

    def _unix_offset_ns(self) -> int:
        """From this clock to the wall clock as it is set now."""
        return self._wall_clock() - self._clock()

    # --- control --------------------------------------------------------------------------

    @property
    def config(self) -> CommunicationConfig:
        return self._config

    def configure(self, **changes: Any) -> None:
        """Changes settings from now on; a wrong name or value is a UsageError, and no change."""
        check_names(CommunicationConfig, changes)
        with self._lock:
            config = replace(self._config, **changes)
            self._fold()  # what came before is counted by the settings it came under
            self._config = config
            self._is_enabled = config.enabled
            self._ledger.configure(config)

    @property
    def enabled(self) -> bool:
        """Whether operations are recorded; may be set."""
        return self._is_enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self.configure(enabled=enabled)

    @property
    def rank(self) -> int | None:
        """This process's rank; None when its launcher does not say. May be set."""
        self.guard.run("rank", self._learn_rank)
        if self._rank is not None:
            return self._rank
        try:
            return resolve_identity(os.environ).placement.rank
        except MeshscopeError:
            return None

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank

    def _learn_rank(self) -> None:
        """Also looked for while recording: at the end of a program its process group is gone."""
        if self._rank is None:
            dist = initialized_distributed()
            if dist is not None:
                self._rank = int(dist.get_rank())

    def clear(self) -> None:
        """Forgets events, statistics, counts and ids.

        Settings stay, and so do the groups and the numbering of their operations: ranks agree on
        it without talking, so none may begin anew alone.
        """
        if self.before_asking is not None:
            self.guard.run("capture", self.before_asking)
        with self._lock:
            self._fold()  # what is pending has numbers to take
            self._ledger.clear()
            self.guard.forget()
            self._start_ns = self._clock()

    def close(self) -> None:
        """The process ends. Nothing is open, so nothing is to be done."""

    def disarm_after_fork(self) -> None:
        """In a forked child: begins anew, for what is there is the parent's, maybe half written."""
        self._lock = threading.RLock()
        self._is_busy = False
        self._pending = []
        self._ledger = Ledger(self._config, self._ledger.groups)
        self._start_ns = self._clock()

    # --- exchange -------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything, with string keys and JSON's types; None for what is not known.

        `cells` are the statistics in their finest division: what `merge` reads.
        """
        return self._ask(self._export)

    def _export(self, ledger: Ledger) -> dict[str, Any]:
        rank, offset_ns = self.rank, self._unix_offset_ns()
        failures = ledger.failed_events(rank, offset_ns)
        by_rank, by_size = ledger.by_rank(rank), ledger.by_size()
        return {
            "version": _EXPORT_VERSION,
            "rank": rank,
            "config": asdict(self._config),
            "num_observed": ledger.num_observed,
            "num_failed": ledger.num_failed,
            "num_sampled_out": ledger.num_sampled_out,
            "num_below_minimum": ledger.num_below_minimum,
            "num_evicted": ledger.num_evicted,
            "num_own_errors": self.guard.num_errors,
            "total_stats": ledger.total().to_dict(),
            "operation_stats": _to_dicts(ledger.by_operation()),
            "rank_stats": {
                "unknown" if its_rank is None else str(its_rank): _to_dicts(found)
                for its_rank, found in by_rank.items()
            },
            "axis_stats": _to_dicts(ledger.by_axis()),
            "size_stats": {label: _to_dicts(found) for label, found in by_size.items()},
            "events": [event.to_dict() for event in ledger.events(rank, offset_ns)],
            "failed_operations": [event.to_dict() for event in failures],
            "cells": ledger.cells_to_list(rank),
        }

    def export_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """`to_dict` as strict JSON; also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), allow_nan=False, indent=1)
        if path is not None:
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise UsageError(
                    f"{path} cannot be written ({error.strerror}); give a file in a folder that "
                    "exists and has room, or no path to get the text"
                ) from error
        return text

    def merge(self, other: "CommunicationProfiler | Mapping[str, Any]") -> None:
        """Adds the statistics and counts of another profiler, or of a rank's export, to these.

        Events are not taken over. Set `per_rank=False` to merge thousands of ranks.
        """
        export = other.to_dict() if isinstance(other, CommunicationProfiler) else other
        try:
            if export["version"] != _EXPORT_VERSION:
                raise ValueError(f"its version is {export['version']}, not {_EXPORT_VERSION}")
            counts = [int(export[name]) for name in ("num_sampled_out", "num_below_minimum")]
            self._ask(lambda ledger: ledger.merge(export["cells"], *counts))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"merge got something that is no export of a communication profiler ({error!r}); "
                "give a CommunicationProfiler, or what its to_dict or export_json made"
            ) from error

    def summary(self) -> str:
        """Text: what was counted and what was left out, then a table per axis and operation."""
        elapsed_ns = self._clock() - self._start_ns
        return self._ask(lambda ledger: render_summary(ledger, elapsed_ns, self.guard.num_errors))


def _to_dicts(stats: Mapping[Any, OperationStats]) -> dict[str, Any]:
    return {str(name): found.to_dict() for name, found in stats.items()}

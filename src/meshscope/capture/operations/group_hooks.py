"""The second way to see operations: hooks of the process groups themselves, torch 2.14 and later.

Used when the dispatcher tap cannot be installed. They have to be attached to every group, tell
nothing of a send's tag, and are told nothing when a call raises; apart from that they give the
same records.
"""

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from meshscope.capture.operations.operation_log import Blocking, Operation
from meshscope.capture.operations.operation_shapes import add_up, dtype_codes_of, kind_of
from meshscope.capture.operations.process_groups import GroupBook, GroupEntry
from meshscope.core.operations import POINT_TO_POINT, Kind
from meshscope.errors import CaptureError
from meshscope.store.schema import MISSING

HOOK_ID = 0x6D657368
"""Ours among a group's hooks."""
NOT_OPERATIONS = frozenset(("SPLIT", "NEW_WINDOW"))


class Follower(Protocol):
    """What is done with an operation once it is known; see `collectives`."""

    sees_all: bool
    """Whether it needs no telling any more."""

    def enter_operation(
        self, group: GroupEntry, kind: Kind, name: str, peer: int, tag: int, size_bytes: int,
        dtype: int, tensor: Any, now_ns: int, *, is_async: bool,
    ) -> Operation | None:  # fmt: skip
        """It is called."""

    def follow(
        self, operation: Operation, get_work: Callable[[], Any] | None, output: Any, frame: Any
    ) -> None:
        """torch has taken it."""

    def is_ready(self) -> bool:
        """Whether it can be recorded."""

    def hold_blocking(self, blocking: Blocking, work: Any) -> None:
        """torch has taken a blocking one, and its caller waits for it at once."""

    def fail_operation(self, operation: Operation | None, error: BaseException) -> None:
        """The call itself raised."""


class GroupHooks:
    """Hooks on all process groups, those made later included."""

    def __init__(
        self,
        torch: Any,
        book: GroupBook,
        follower: Follower,
        clock: Callable[[], int],
        caught: Callable[[str, BaseException], None],
    ) -> None:
        self._dist = torch.distributed
        self._book = book
        self._follower = follower
        self._clock = clock
        self._caught = caught
        self._codes = dtype_codes_of(torch)
        self._groups: list[Any] = []
        self._open: dict[tuple[int, int], tuple[Operation, Any]] = {}

    def install(self) -> None:
        """Attaches to the groups there are. CaptureError when torch has no such hooks."""
        if not hasattr(self._dist.ProcessGroup, "register_pre_hook"):
            raise CaptureError(
                "this torch offers neither _dispatch_keyset_full_after nor hooks on process groups"
            )
        for group in list(self._dist.distributed_c10d._world.pg_map):
            self.attach(group)

    def attach(self, group: Any) -> None:
        """Watches one group."""
        if any(known is group for known in self._groups):
            return
        group.register_pre_hook(HOOK_ID, lambda details: self._before(group, details))
        group.register_post_hook(HOOK_ID, self._after)
        self._groups.append(group)

    def remove(self) -> None:
        """Takes the hooks off again."""
        for group in self._groups:
            group.unregister_pre_hook(HOOK_ID)
            group.unregister_post_hook(HOOK_ID)
        self._groups.clear()

    def _before(self, group: Any, details: Any) -> None:
        now_ns = self._clock()
        try:
            name = details.name.name
            if name in NOT_OPERATIONS or not self._follower.is_ready():
                return
            entry = self._book.find(group)
            kind = kind_of(name.lower())
            inputs, outputs = list(details.input_tensors), list(details.output_tensors)
            size_bytes, dtype, tensor = self._measure(kind, inputs, outputs, entry.size)
            root = int(details.root)
            peer = entry.global_rank(root) if root >= 0 else MISSING
            operation = self._follower.enter_operation(
                entry, kind, name, peer, 0, size_bytes, dtype, tensor, now_ns,
                is_async=bool(details.async_op) or kind in POINT_TO_POINT,
            )  # fmt: skip
            if operation is not None:
                output = (outputs or inputs or [None])[0]
                self._open[get_ident(), details.op_id] = (operation, output)
        except Exception as error:  # noqa: BLE001 - the guard's
            self._caught("operation begin", error)

    def _measure(
        self, kind: Kind, inputs: list[Any], outputs: list[Any], num_ranks: int
    ) -> tuple[int, int, Any]:
        if kind is Kind.BARRIER:
            return 0, 0, None
        if kind is Kind.ALL_GATHER:
            return add_up(outputs, self._codes)
        if kind is Kind.SCATTER and outputs:
            size_bytes, dtype, tensor = add_up(outputs, self._codes)
            return size_bytes * num_ranks, dtype, tensor
        size_bytes, dtype, tensor = add_up(inputs or outputs, self._codes)
        return size_bytes * (num_ranks if kind is Kind.GATHER else 1), dtype, tensor

    def _after(self, details: Any) -> None:
        try:
            found = self._open.pop((get_ident(), details.op_id), None)
            if found is None:
                return
            work = details.work
            get_work = None if work is None else lambda: work
            self._follower.follow(found[0], get_work, found[1], sys._getframe(0).f_back)
        except Exception as error:  # noqa: BLE001 - the guard's
            self._caught("operation issued", error)

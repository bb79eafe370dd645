"""Has a fault injector asked before each operation that Python starts on a process group.

Methods of `ProcessGroup` are replaced, which everything in `torch.distributed` ends in, whatever
name a module has imported it by. Not seen: what C++ starts (DDP's reducer, functional collectives
and so DTensor and FSDP2), receives, and waiting.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

COLLECTIVE_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced",
    "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier",
)  # fmt: skip
"""Methods that this torch does not have are left out."""


class _OperationListener(Protocol):
    """Called before an operation is handed to torch; ranks are global ones."""

    @property
    def is_waiting(self) -> bool:
        """Whether operations are delayed now."""

    def before_send(self, peer: int, size_bytes: int, axis: str | None) -> None: ...

    def before_collective(
        self, ranks: Sequence[int], size_bytes: int, axis: str | None
    ) -> None: ...


def watch_groups(
    listener: _OperationListener, groups: Mapping[str, dist.ProcessGroup | None]
) -> Callable[[], None]:
    """Starts to call the listener; returns a function that stops it. `groups`: by axis."""
    axes = {id(group): axis for axis, group in groups.items() if group is not None}
    undo = [
        _wrap_method(listener, name, axes)
        for name in (*COLLECTIVE_METHODS, "send")
        if name in vars(dist.ProcessGroup)
    ]

    def end() -> None:
        for one in undo:
            one()

    return end


def _wrap_method(
    listener: _OperationListener, name: str, axes: Mapping[int, str]
) -> Callable[[], None]:
    stored = vars(dist.ProcessGroup)[name]
    original = getattr(dist.ProcessGroup, name)
    is_ended = False

    def wrapped(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if listener.is_waiting and not is_ended:
            _ask(listener, name, group, (*args, *kwargs.values()), axes.get(id(group)))
        return original(group, *args, **kwargs)

    def undo() -> None:
        nonlocal is_ended
        # A later wrapper keeps ours, which then does nothing.
        is_ended = True
        if vars(dist.ProcessGroup).get(name) is wrapped:
            setattr(dist.ProcessGroup, name, stored)

    wrapped.__name__, wrapped.__doc__ = name, original.__doc__
    setattr(dist.ProcessGroup, name, wrapped)
    return undo


def _ask(
    listener: _OperationListener,
    name: str,
    group: dist.ProcessGroup,
    values: Sequence[Any],
    axis: str | None,
) -> None:
    ranks = dist.get_process_group_ranks(group)
    # The larger of what goes in and what comes out.
    size_bytes = max((_count_bytes(value) for value in values[:2]), default=0)
    if name == "send":
        listener.before_send(ranks[values[1]], size_bytes, axis)
    else:
        listener.before_collective(ranks, size_bytes, axis)


def _count_bytes(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.nbytes
    return sum(_count_bytes(one) for one in given) if isinstance(given, list | tuple) else 0

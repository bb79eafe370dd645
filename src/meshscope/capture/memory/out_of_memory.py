"""When the device is full: what filled it, in one sentence, with attribution and snapshot on disk.

torch tells an observer before it raises, after it has given back what it could. An observer cannot
be taken out, so one per process is installed and asks the current watcher. The stacks of a snapshot
are there only if the program called `torch.cuda.memory._record_memory_history`; what is in use is
there anyway. Nothing here changes what the program sees: the error comes as it would.
"""

import json
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.memory.holdings import Holdings
from meshscope.capture.memory.memory_profile import MemoryProfile
from meshscope.capture.memory.storages import Ledger
from meshscope.core.unit_text import memory, ratio
from meshscope.store.write.access import make_folder

logger = logging.getLogger(__name__)

MAX_DUMPS = 3
"""A program that catches the error and tries again must not fill the disk."""
_NUM_NAMED = 3
_REPORT_NAME = "out_of_memory.json"
_SNAPSHOT_NAME = "out_of_memory.pickle"

_watchers: list["OutOfMemoryWatch"] = []
_attached: list[bool] = []


class OutOfMemoryWatch:
    """Writes down what filled a device."""

    def __init__(
        self,
        torch: Any,
        guard: Guard,
        *,
        find_folder: Callable[[], Path | None],
        find_training: Callable[[], tuple[Sequence[Any], Sequence[Any]]],
        find_profile: Callable[[], MemoryProfile | None],
        note: Callable[[str, Path | None], None],
    ) -> None:
        """`find_training` gives models and optimizers, `note` takes the sentence and where the
        report will be."""
        self._torch = torch
        self._guard = guard
        self._find_folder = find_folder
        self._find_training = find_training
        self._find_profile = find_profile
        self._note = note
        self._num_dumps = 0
        self.protected_observe = guard.protect("out of memory", self.observe)

    def install(self) -> bool:
        """Whether torch has such an observer and will call us."""
        attach = getattr(self._torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is None or not self._torch.cuda.is_available():
            return False
        if not _attached:
            self._torch.cuda.init()  # the observer needs the allocator
            attach(_tell_watchers)
            _attached.append(True)
        _watchers.append(self)
        return True

    def remove(self) -> None:
        if self in _watchers:
            _watchers.remove(self)

    def observe(self, device: int, requested: int, total: int, free: int) -> None:
        """Called by torch, just before it raises."""
        if self._num_dumps >= MAX_DUMPS:
            return
        self._num_dumps += 1
        stats = self._torch.cuda.memory_stats(device)
        categories = self._attribute(device)
        facts = {
            "device": f"cuda:{device}",
            "requested_bytes": requested,
            "total_bytes": total,
            "free_bytes": free,
            "allocated_bytes": stats.get("allocated_bytes.all.current", -1),
            "reserved_bytes": stats.get("reserved_bytes.all.current", -1),
            "categories_bytes": categories,
        }
        sentence = describe_out_of_memory(facts)
        logger.error("meshscope: %s", sentence)
        self._note(sentence, self._choose_path(_REPORT_NAME))
        self._guard.run("out of memory", lambda: self._dump({**facts, "sentence": sentence}))

    def _attribute(self, device: int) -> dict[str, int]:
        profile = self._find_profile()
        point = None if profile is None else profile.point("out_of_memory", layouts="all")
        if profile is not None and point is not None:
            profile.flush()  # the program may not come much further
            return point.categories_bytes
        models, optimizers = self._find_training()
        ledger = Ledger(f"cuda:{device}")
        if models:
            Holdings(self._torch, models, optimizers).claim(ledger)
        return {name: sum(paths.values()) for name, paths in ledger.categories.items()}

    def _dump(self, report: Mapping[str, Any]) -> None:
        report_path, snapshot_path = (
            self._choose_path(_REPORT_NAME),
            self._choose_path(_SNAPSHOT_NAME),
        )
        if report_path is None or snapshot_path is None:
            return
        make_folder(report_path.parent)
        with open(report_path, "w", encoding="utf-8") as out:
            json.dump({**report, "unix_ns": time.time_ns()}, out)
        snapshot = self._torch.cuda.memory._snapshot()
        with open(snapshot_path, "wb") as file:
            pickle.dump(snapshot, file)

    def _choose_path(self, name: str) -> Path | None:
        """Path of this dump's file; later ones are numbered."""
        folder = self._find_folder()
        suffix = f".{self._num_dumps}" if self._num_dumps > 1 else ""
        return None if folder is None else folder / f"{name}{suffix}"


def _tell_watchers(device: int, requested: int, total: int, free: int) -> None:
    for watch in tuple(_watchers):
        watch.protected_observe(device, requested, total, free)


def describe_out_of_memory(facts: Mapping[str, Any]) -> str:
    """One sentence: how full, of what, and why the request did not fit."""
    allocated = max(int(facts["allocated_bytes"]), 0)
    sizes = sorted(facts["categories_bytes"].items(), key=lambda item: -item[1])
    shares = [
        f"{name.replace('_', ' ')} {memory(num_bytes)} ({ratio(num_bytes / max(allocated, 1))})"
        for name, num_bytes in sizes[:_NUM_NAMED]
    ]
    rest = allocated - sum(num_bytes for _, num_bytes in sizes[:_NUM_NAMED])
    if rest > 0:
        what = "other" if shares else "not attributed, since no model was given to the recorder:"
        shares.append(f"{what} {memory(rest)}")
    unused = max(int(facts["reserved_bytes"]) - allocated, 0)
    return (
        f"{facts['device']} is full: {memory(allocated)} of {memory(facts['total_bytes'])} are "
        f"allocated, {', '.join(shares)}; {memory(facts['requested_bytes'])} were asked for, with "
        f"{memory(facts['free_bytes'])} free on the device and {memory(unused)} reserved in pieces "
        "that are not in use"
    )

"""torch.profiler over one window of steps, and its trace as a file.

A window is one profile with a schedule of torch's own form, moved on by `step` where a training
step ends: the way every program uses it. Starting and stopping profiles by hand instead crashed
CUDA programs in two runs of three (2.11). Start, steps and stop come from one thread, the training
thread: torch would not stop what another thread has started. While the profile is only prepared,
as it is during warm-up, another profiler of the process that starts and stops makes it crash
(2.13), so none is begun beside one of the program's.

Every traced step is marked `ProfilerStep#n`, with the step's number in the recording. Where steps
are inferred a mark ends inside the optimizer's own (`Optimizer.step#…`), whose last microseconds
lie after it.
"""

import contextlib
import gc
import gzip
import importlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshscope.capture.profiling.settings import ProfilingSettings
from meshscope.errors import CaptureError

_STEP_MARK = "ProfilerStep#"
COMPRESSION = 3
"""gzip level: a third of the default's time, a tenth larger."""
_CHUNK_BYTES = 1 << 20
_EMPTY_MARK = "_is_meshscopes_and_empty"


class TorchWindow:
    """One window. Errors of torch go to the caller, which the guard protects."""

    def __init__(self, torch: Any, settings: ProfilingSettings) -> None:
        self._torch = torch
        self._settings = settings
        self._profile: Any = None
        self._plain: Path | None = None
        """Where the trace is written when its last step ends."""
        self._thread = 0

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that started it."""
        return self._thread == threading.get_ident()

    def start(self, first_step: int, *, num_warmup: int, num_active: int) -> None:
        """Begins with this step: so many to warm up, then so many that are traced."""
        module = importlib.import_module("torch.profiler")
        if not module.kineto_available():
            raise CaptureError("this torch was built without Kineto: it makes no traces")
        settings = self._settings
        profile = module.profile(
            activities=_find_activities(self._torch, module),
            schedule=_make_schedule(module.ProfilerAction, first_step, num_warmup, num_active),
            on_trace_ready=self._export,
            record_shapes=settings.shapes,
            with_stack=settings.stack,
            with_modules=settings.modules,
            profile_memory=settings.memory,
        )
        profile.step_num = first_step
        self._thread = threading.get_ident()
        self._profile = profile
        profile.start()

    def end_step(self) -> None:
        """A step is over; after the last one the trace is made."""
        self._profile.step()

    def prepare(self, path: Path) -> None:
        """Says where the trace goes, before its last step ends."""
        self._plain = path.with_name(f".{path.name}.part")

    def _export(self, profile: Any) -> None:
        if self._plain is not None:
            profile.export_chrome_trace(str(self._plain))

    def stop(self) -> None:
        """Ends the profile; a trace that has steps and was not written yet is written now."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            # Freed after another one has begun, what it saw crashes now and then (2.13, Kineto's
            # MemoryTraceLogger); the empty object may be in a cycle and stay for a while.
            profile.profiler = None
            setattr(profile, _EMPTY_MARK, True)

    def write(self, path: Path) -> tuple[int, int]:
        """Writes the trace, whole or not at all; returns its size and that of its JSON.

        CaptureError when it holds no step: another profiler has ended this one.
        """
        plain = path.with_name(f".{path.name}.part")
        packed = path.with_name(f".{path.name}.gz.part")
        try:
            if not plain.exists():
                raise CaptureError("torch made no trace: another profiler ended it early")
            json_bytes, has_steps = _read_through(plain, packed if path.suffix == ".gz" else None)
            if not has_steps:
                raise CaptureError("the trace holds no step: another profiler ended it early")
            os.replace(packed if path.suffix == ".gz" else plain, path)
        finally:
            for part in (plain, packed):
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
        return path.stat().st_size, json_bytes


def _make_schedule(
    action: Any, first_step: int, num_warmup: int, num_active: int
) -> Callable[[int], Any]:
    last = num_warmup + num_active - 1

    def choose(step: int) -> Any:
        index = max(0, step - first_step)  # torch asks for step 0 first of all
        if index < num_warmup:
            return action.WARMUP
        if index < last:
            return action.RECORD
        return action.RECORD_AND_SAVE if index == last else action.NONE

    return choose


def _find_activities(torch: Any, module: Any) -> list[Any]:
    """What torch can watch, but no device the program has not used: that would set it up."""
    found = set(module.supported_activities())
    cuda = module.ProfilerActivity.CUDA
    if cuda in found and not torch.cuda.is_initialized():
        found.discard(cuda)
    return sorted(found, key=str)


def _read_through(plain: Path, packed: Path | None) -> tuple[int, bool]:
    """Compresses a trace, if wanted; its size, and whether a step is marked in it."""
    has_steps, size, tail = False, 0, b""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open(plain, "rb"))
        target = stack.enter_context(gzip.open(packed, "wb", COMPRESSION)) if packed else None
        while chunk := source.read(_CHUNK_BYTES):
            size += len(chunk)
            has_steps = has_steps or _STEP_MARK.encode() in tail + chunk
            tail = chunk[-len(_STEP_MARK) :]
            if target is not None:
                target.write(chunk)
    return size, has_steps


def find_other_profiler(torch: Any) -> str:
    """Whose profiler is in the way; empty when there is none.

    Two profilers in one process spoil each other's traces; one that waits in its warm-up crashes,
    and so may one that has ended and is freed later. So all objects are searched.
    """
    if torch.autograd._profiler_enabled():
        return "a profiler is running in this process"
    module = importlib.import_module("torch.profiler")
    kinds = (module.profile, module._KinetoProfile, torch.autograd.profiler.profile)
    # Not isinstance: it asks objects for their class, and these may be anything.
    found = [each for each in gc.get_referrers(*kinds) if issubclass(type(each), kinds)]
    if any(not getattr(profile, _EMPTY_MARK, False) for profile in found):
        return "the program has a torch.profiler of its own"
    return ""


def trace_file_name(host: str, pid: int, time_ns: int, *, is_compressed: bool) -> str:
    """As TensorBoard and `meshscope trace` look for it."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", host)[:80] or "host"
    return f"{safe}_{pid}.{time_ns}.pt.trace.json{'.gz' if is_compressed else ''}"

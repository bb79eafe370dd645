"""Steps of a trace in which the profiler marked none, from what repeats in it.

Looked for in this order; the first that is there at least twice (three times for ranges that do not
say that they are steps, and for kernels) decides:

    optimizer   a step ends with an `Optimizer.step#…`, or with a range of the user's that is named
                for it. Calls with no backward between them, of several optimizers, are of one step;
                so are calls behind backwards of different functions that come in turns, as a GAN's
    range       the user's ranges whose name says step or iteration; else outermost ranges of one
                name that cover most of their thread's time
    kernels     the device runs the same sequence of kernels again and again. A sequence that lacks
                kernels which run only at the trace's ends is a layer, not a step

Such steps have no numbers of their own: they count from 0. The first begins with what the host did
first, be it only a range, and is left out where it has less than half of the others' calls: the
trace then began within it.
"""

import re
from collections.abc import Callable

import numpy as np

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_range_names import RangePhase, is_librarys, name_phase
from meshscope.ingest.traces.trace_spans import match_names
from meshscope.ingest.traces.trace_steps import StepSource, TraceSteps
from meshscope.store.read.arrays import Int32s, Int64s, find_true

_OPTIMIZER_NAME = re.compile(r"^Optimizer\.step#")
_BACKWARD_NAME = re.compile(r"^autograd::engine::evaluate_function")
_STEP_WORD = re.compile(
    r"(?:^|[^a-z])(?:train(?:ing)?[ _-]?)?(?:step|iter|iteration)(?:[^a-z]|$)", re.IGNORECASE
)
_MIN_STEPS = 2
_MIN_REPEATS = 3
_MAX_TURNS = 4
_MIN_COVER = 0.7
_MIN_PERIOD = 8
"""Kernels: a shorter sequence may repeat by chance."""
_MIN_ALIKE = 0.9
_MAX_STRANGERS = 0.001
"""Share of kernels, and of their time, that the repeated sequence may lack."""
_MAX_TRIED = 64
_FAR = np.iinfo(np.int64).max


def search_steps(trace: Trace, kernels: Int64s, launch: Int32s) -> TraceSteps:
    """Steps, or none; `kernels` are those of the device that compute, `launch` their calls."""
    for find in (_find_by_optimizer, _find_by_ranges):
        found = find(trace)
        if len(found):
            return found
    return _find_by_kernels(trace, kernels, launch)


def _none() -> TraceSteps:
    empty = np.empty(0, dtype=np.int64)
    return TraceSteps(number=empty, begin_ns=empty, end_ns=empty, source=StepSource.NONE)


def _count(begin: Int64s, end: Int64s, source: StepSource) -> TraceSteps:
    return TraceSteps(
        number=np.arange(len(begin), dtype=np.int64), begin_ns=begin, end_ns=end, source=source
    )


def _find_by_optimizer(trace: Trace) -> TraceSteps:
    events = trace.events
    rows = _annotations(trace)
    own = _match(trace, rows, lambda text: bool(_OPTIMIZER_NAME.search(text)))
    if not len(own):
        own = _match(trace, rows, lambda text: name_phase(text) is RangePhase.OPTIMIZER)
    if len(own) < _MIN_STEPS:
        return _none()
    end = np.sort(events.ends(own))
    passes = _match(
        trace,
        find_true(events.category == int(Category.CPU_OP)),
        lambda text: bool(_BACKWARD_NAME.search(text)),
    )
    if len(passes):
        # The last call before a backward, and the last of all, end their steps.
        before = np.searchsorted(np.sort(events.begin_ns[passes]), end)
        end = end[np.append(before[1:] != before[:-1], True)]
    if len(end) < _MIN_STEPS:
        return _none()
    working = np.sort(events.begin_ns[_working_rows(trace)])
    first = np.concatenate([working[:1], events.begin_ns[rows[:1]], end[:1] - 1]).min()
    # Optimizers that take turns, each with a backward of its own, are of one step.
    num_turns = _count_turns(trace, passes, end)
    end = end[num_turns - 1 :: num_turns]
    begin = np.append(first, end[:-1])
    return _leave_out_partial(_count(begin, end, StepSource.OPTIMIZER), working)


def _count_turns(trace: Trace, passes: Int64s, end: Int64s) -> int:
    """After how many calls of optimizers the same backward comes again, as with a GAN's two; 1
    where they do not take turns, or not without exception."""
    after = np.searchsorted(trace.events.begin_ns[passes], end)  # passes are in order of begin
    parts = np.split(trace.events.name[passes], after)[: len(end)]
    ran = [tuple(np.sort(part).tolist()) for part in parts]
    for num in range(2, min(_MAX_TURNS, len(ran) // _MIN_STEPS) + 1):
        is_alike = all(one == ran[place % num] for place, one in enumerate(ran))
        if is_alike and len(ran) % num == 0 and len(set(ran[:num])) == num:
            return num
    return 1


def _leave_out_partial(steps: TraceSteps, working: Int64s) -> TraceSteps:
    """Judged by what the host called, not by its time: it may run ahead in the first step."""
    num_calls = np.diff(np.searchsorted(working, np.append(steps.begin_ns[:1], steps.end_ns)))
    is_partial = len(num_calls) > _MIN_STEPS and num_calls[0] * 2 < np.median(num_calls[1:])
    first = 1 if is_partial else 0
    return _count(steps.begin_ns[first:], steps.end_ns[first:], steps.source)


def _find_by_ranges(trace: Trace) -> TraceSteps:
    """The user's ranges that follow each other on one thread."""
    events = trace.events
    rows = _match(trace, _annotations(trace), lambda text: not is_librarys(text))
    best = _none()
    for track in np.unique(events.track[rows]).tolist():
        own = rows[events.track[rows] == track]
        own = own[np.lexsort((-events.duration_ns[own], events.begin_ns[own]))]
        stems = np.array([_stem(trace.strings[place]) for place in events.name[own].tolist()])
        covered = np.maximum.accumulate(np.append(-_FAR, events.ends(own)))[:-1]
        is_outer = events.begin_ns[own] >= covered
        whole = int(np.ptp(np.append(events.begin_ns[own], events.ends(own)))) or 1
        for stem in np.unique(stems).tolist():
            picked = own[stems == stem]
            begin, end = events.begin_ns[picked], events.ends(picked)
            if len(picked) < _MIN_STEPS or (begin[1:] < end[:-1]).any():
                continue
            is_said = bool(_STEP_WORD.search(stem)) and name_phase(stem) is None
            covers = int((end - begin).sum()) / whole >= _MIN_COVER
            is_whole = len(picked) >= _MIN_REPEATS and covers and is_outer[stems == stem].all()
            if (is_said or is_whole) and (not len(best) or len(picked) < len(best)):
                best = _count(begin, end, StepSource.RANGE)
    return best


def _stem(text: str) -> str:
    """The name without its numbers: `step 12` and `step 13` are of one kind."""
    return re.sub(r"\d+", "", text[:200])


def _find_by_kernels(trace: Trace, kernels: Int64s, launch: Int32s) -> TraceSteps:
    """Where a sequence begins again, at the call that launched its first kernel."""
    events = trace.events
    if len(kernels) < _MIN_PERIOD * _MIN_REPEATS:
        return _none()
    moment = events.begin_ns[kernels].copy()
    is_called = launch[kernels] >= 0
    moment[is_called] = events.begin_ns[launch[kernels[is_called]]]
    order = np.lexsort((events.begin_ns[kernels], moment))
    kernels, moment = kernels[order], moment[order]
    names = events.name[kernels].astype(np.int64)
    period = _find_period(names)
    if not period or _has_strangers(trace, kernels, period):
        return _none()
    first = int(np.argmax(names[period:] == names[:-period]))
    begin = moment[first::period]
    if len(begin) < _MIN_REPEATS or (np.diff(begin) <= 0).any():
        return _none()
    last = int(max(moment[-1] + 1, begin[-1] + 1))
    end = np.append(begin[1:], last)
    num_whole = (len(kernels) - first) // period
    return _count(begin[:num_whole], end[:num_whole], StepSource.KERNELS)


def _find_period(names: Int64s) -> int:
    """The longest stretch after which the whole sequence is alike; 0 without one."""
    _, count = np.unique(names, return_counts=True)
    order = np.argsort(names, kind="stable")
    first = np.append(0, np.cumsum(count))
    tried: set[int] = set()
    for rank in np.argsort(count, kind="stable").tolist():
        if count[rank] < _MIN_REPEATS:
            continue
        if len(tried) >= _MAX_TRIED:
            break
        at = order[first[rank] : first[rank + 1]]
        period = int(np.median(np.diff(at)))
        if period in tried or period < _MIN_PERIOD or period * _MIN_REPEATS > len(names):
            continue
        tried.add(period)
        if np.mean(names[period:] == names[:-period]) >= _MIN_ALIKE:
            return period
    return 0


def _has_strangers(trace: Trace, kernels: Int64s, period: int) -> bool:
    """Whether kernels run that the repeated sequence does not have, as around a stack of layers."""
    names = trace.events.name[kernels]
    is_alike = np.zeros(len(names), dtype=np.bool_)
    is_alike[period:] = names[period:] == names[:-period]
    is_alike[:-period] |= is_alike[period:].copy()
    known = np.isin(names, np.unique(names[is_alike]))
    duration = trace.events.duration_ns[kernels]
    strange_ns = int(duration[~known].sum())
    return bool(
        np.count_nonzero(~known) > _MAX_STRANGERS * len(names)
        or strange_ns > _MAX_STRANGERS * int(duration.sum())
    )


def _annotations(trace: Trace) -> Int64s:
    return find_true(trace.events.category == int(Category.ANNOTATION))


def _working_rows(trace: Trace) -> Int64s:
    category = trace.events.category
    return find_true((category == int(Category.CPU_OP)) | (category == int(Category.RUNTIME)))


def _match(trace: Trace, rows: Int64s, is_wanted: Callable[[str], bool]) -> Int64s:
    found: Int64s = rows[match_names(trace, trace.events.name[rows], is_wanted)]
    return found

"""Which steps of a thinned run a timeline takes, so that it stands for the whole run.

All records are kept of the newest steps, of noteworthy windows and of every n-th other window. All
of these together would show the unusual too often. Of what is not among the newest, therefore, only
every n-th window counts, noteworthy or not; `run_weights` says for how many steps each stands.
"""

from collections.abc import Sequence

import numpy as np

from meshscope.analyze.rank.step_choice import StepChoice, choose_windows
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.retention_tables import WINDOW_STEPS
from meshscope.store.schema import StepFlag


def is_thinned(recordings: Sequence[Recording]) -> bool:
    return any(recording.has_table("kept_windows") for recording in recordings)


def count_thinned(recordings: Sequence[Recording]) -> int:
    """Steps of which some rank lacks operations or spans on purpose; 0 where none was thinned."""
    if not is_thinned(recordings):
        return 0
    found = [np.empty(0, dtype=np.int64)]
    for recording in recordings:
        step = int64_column(recording.read("steps"), "step")
        found.append(step[recording.find_thinned(step)])
    return len(np.unique(np.concatenate(found)))


def choose_whole_steps(
    recordings: Sequence[Recording], first: int, last: int, num_rows: int, choice: StepChoice
) -> list[tuple[int, int]]:
    """Ranges of steps (both ends included) between `first` and `last` of which every rank has all
    records. `num_rows` is what all ranks recorded in all steps."""
    whole, thinned = _find_whole(recordings, first, last)
    if not len(whole):
        return []
    stride = _find_stride(recordings, whole, thinned)
    is_nth = whole // WINDOW_STEPS % stride == 0
    num_kept = _count_kept(recordings, len(whole), num_rows, choice)
    is_newest = whole > thinned[-1] if len(thinned) else _find_newest(whole)
    candidates = whole[is_nth | is_newest]
    if num_kept >= last - first + 1:
        return _join(candidates)
    windows = choose_windows(first, last, num_kept, choice.count_windows(num_kept))
    parts = []
    for begin, end in windows:
        index = int(np.searchsorted(candidates, begin))
        parts.append(candidates[index : index + end - begin + 1])
    return _join(np.unique(np.concatenate(parts)))


def _find_newest(whole: Int64s) -> Bools:
    """Steps after the last one that is missing."""
    missing = np.flatnonzero(np.diff(whole) > 1)
    found: Bools = np.arange(len(whole)) > (missing[-1] if len(missing) else -1)
    return found


def _find_whole(recordings: Sequence[Recording], first: int, last: int) -> tuple[Int64s, Int64s]:
    """Steps between `first` and `last` that are whole on every rank, and those thinned on some."""
    whole: Int64s | None = None
    thinned = [np.empty(0, dtype=np.int64)]
    for recording in recordings:
        columns = recording.read("steps")
        step = int64_column(columns, "step")
        inside = (step >= first) & (step <= last)
        flags = columns["flags"].astype(np.int64)
        own = step[inside & (flags & StepFlag.WITHOUT_OPERATIONS == 0)]
        whole = np.unique(own) if whole is None else np.intersect1d(whole, own)
        thinned.append(step[inside & (flags & StepFlag.THINNED != 0)])
    assert whole is not None
    return whole, np.unique(np.concatenate(thinned))


def _find_stride(recordings: Sequence[Recording], whole: Int64s, thinned: Int64s) -> int:
    """Every how many windows one is kept that is not noteworthy: a power of two."""
    noteworthy = np.concatenate(
        [int64_column(one.read("kept_windows"), "first_step") for one in recordings]
    )
    old = whole[whole < thinned[-1]] if len(thinned) else whole[:0]
    windows = np.setdiff1d(old // WINDOW_STEPS, noteworthy // WINDOW_STEPS)
    joined = int(np.bitwise_or.reduce(windows)) if len(windows) else 0
    return joined & -joined if joined else 1


def _count_kept(
    recordings: Sequence[Recording], num_whole: int, num_rows: int, choice: StepChoice
) -> int:
    by_steps = choice.max_rank_steps // len(recordings)
    return max(1, min(by_steps, choice.max_rows * num_whole // max(num_rows, 1)))


def _join(steps: Int64s) -> list[tuple[int, int]]:
    cuts = np.flatnonzero(np.diff(steps) != 1) + 1
    firsts = steps[np.concatenate(([0], cuts))]
    lasts = steps[np.concatenate((cuts - 1, [len(steps) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

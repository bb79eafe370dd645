"""Which steps of a thinned recording have all their records; docs/store.md has the rule."""

from collections.abc import Sequence

import numpy as np

from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.table_files import Thinning
from meshscope.store.retention_tables import NUM_FIRST_KEPT


def mark_thinned(
    steps: Int64s, thinnings: Sequence[Thinning | None], kept_first: Int64s, ordinals: Int64s
) -> Bools:
    """Steps that are not whole in one of the tables; `kept_first` and `ordinals` are those of
    `kept_windows`."""
    found = np.zeros(len(steps), dtype=np.bool_)
    for one in thinnings:
        if one is None:  # nothing is known of it
            found[:] = True
            continue
        # The step before counts, too: what happened between the two has its number.
        found |= ~(
            _is_kept(steps, one, kept_first, ordinals)
            & _is_kept(np.maximum(steps - 1, 0), one, kept_first, ordinals)
        )
    return found


def _is_kept(steps: Int64s, one: Thinning, kept_first: Int64s, ordinals: Int64s) -> Bools:
    window = steps // one.window_steps
    stays = (ordinals < NUM_FIRST_KEPT) | (ordinals % (1 << one.noteworthy_level) == 0)
    noteworthy = kept_first[stays] // one.window_steps
    found: Bools = (
        (steps >= one.first_undecided_step)
        | (window % (1 << one.level) == 0)
        | np.isin(window, noteworthy)
    )
    return found

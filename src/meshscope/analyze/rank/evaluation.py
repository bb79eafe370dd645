"""Evaluation as one phase: forwards without training, with what feeds them.

A recorder sees the forwards of an evaluation as `eval` and the fetches of its loader as `data`: if
a batch is asked for, nobody knows what it is for. Here a fetch right before such a forward, and one
right behind the last, in which the loader says that it is empty, become `eval`, and so does what
lies between two of them: copies, losses, metrics. Otherwise a slow validation loader would count
as a stall of the training's input.

Wrong if a program that marks its steps itself ends an evaluation before its loader is empty: the
first fetch of training behind it is then taken for evaluation.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.schema import BUILTIN_NAMES

Values = TypeVar("Values", Bools, Int64s)

_DATA = BUILTIN_NAMES["data"]
EVAL = BUILTIN_NAMES["eval"]


def find_evaluation(
    name_id: npt.NDArray[np.uint16], interval: Int64s, start_ns: Int64s, end_ns: Int64s
) -> tuple[Bools, Int64s]:
    """Which of the outermost spans belong to an evaluation, and how much longer each is then.

    The spans are in order of time; `interval` is the step or gap of each, -1 in none.
    """
    is_data, is_eval = name_id == _DATA, name_id == EVAL
    has_next = (_shift(interval, -1, fill=-2) == interval) & (interval >= 0)
    has_last = (_shift(interval, 1, fill=-2) == interval) & (interval >= 0)
    feeds = is_data & has_next & _shift(is_eval, -1, fill=0)
    finds_end = is_data & has_last & _shift(is_eval, 1, fill=0) & (interval % 2 == 0)
    belongs = is_eval | feeds | finds_end
    goes_on = belongs & has_next & _shift(belongs, -1, fill=0)
    pause = np.where(goes_on, _shift(start_ns, -1, fill=0) - end_ns, 0)
    return belongs, pause.clip(min=0)


def _shift(values: Values, by: int, *, fill: int) -> Values:
    """Per row the value of the row before (1) or behind it (-1)."""
    shifted = np.roll(values, by)
    shifted[0 if by > 0 else -1] = fill
    return shifted

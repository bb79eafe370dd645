"""Steps that the timeline lacks because records of them are lost, or the device was not marked."""

from meshscope.analyze.study import Study
from meshscope.core.unavailable import known
from meshscope.diagnose.wording import count, plural

_MIN_MARKED_RATIO = 0.5
"""Of all steps; the recorder leaves out some short ones on purpose."""


def describe_gaps(study: Study) -> str:
    """A clause on what is missing; empty where nothing is."""
    timeline = known(study.timeline)
    if timeline is None:
        return ""
    num_kept = len(timeline.steps)
    if timeline.num_incomplete:
        num_steps = num_kept + timeline.num_incomplete + timeline.num_unmarked
        return (
            f"records of {count(timeline.num_incomplete)} of {plural(num_steps, 'step')} are lost, "
            "which are left out"
        )
    num_steps = num_kept + timeline.num_unmarked
    if num_kept < _MIN_MARKED_RATIO * num_steps:
        return f"devices were marked in {count(num_kept)} of {plural(num_steps, 'step')}"
    return ""

"""What a run is called where there is room for a few words."""

import re
from pathlib import Path

from meshscope.report import format as form

_TIMED = re.compile(r"\d{8}-\d{6}")


def name_run(path: Path) -> str:
    """The folder's name; before one that is a time, the name of the folder above."""
    path = path.resolve()
    name = f"{path.parent.name} {path.name}" if _TIMED.match(path.name) else path.name
    return form.clean_text(name, 60)


def name_job(path: Path) -> str:
    """The same for all runs of a job: the folder above one that is named by a time."""
    path = path.resolve()
    name = path.parent.name if _TIMED.match(path.name) else path.name
    return form.clean_text(name, 60)

"""Sunburst pages beside a run's memory profiles, written when `run` or `train` has ended.

This runs in the launcher's process, never in one that trains. Under another launcher no process is
left to do it; `meshscope memory RUN --html FOLDER` writes the same pages.
"""

from collections.abc import Callable
from pathlib import Path

from meshscope.core.memory_point import POINTS_NAME
from meshscope.errors import MeshscopeError
from meshscope.store.read.memory_points import MEMORY_FOLDER, read_memory


def write_memory_pages(run_dir: Path, say: Callable[[str], None]) -> None:
    """Writes pages if there are profiles; prints where they are, or why there are none."""
    folder = run_dir / MEMORY_FOLDER
    if not any(folder.glob(f"*/{POINTS_NAME}")):
        return
    from meshscope.analyze.memory.memory_attribution import summarize_memory
    from meshscope.report.render.sunburst import write_sunbursts

    try:
        recordings = read_memory(run_dir)
        written = write_sunbursts(recordings, summarize_memory(recordings), folder, is_beside=True)
    except (MeshscopeError, OSError) as error:
        say(f"the pages of the memory profiles were not written: {error}")
        return
    say(f"what memory was used for: meshscope memory {run_dir}, or {written[-1]}")

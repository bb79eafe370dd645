"""Sunburst pages beside a run's memory profiles, written when `run` or `train` has ended.

In the launcher's process, never in one that trains; under another launcher nobody is left to do
it, and `meshscope memory RUN --html FOLDER` makes the same pages.
"""

from collections.abc import Callable
from pathlib import Path

from meshscope.errors import MeshscopeError
from meshscope.store.read.memory_points import MEMORY_FOLDER, POINTS_NAME, read_memory


def write_memory_pages(run_dir: Path, say: Callable[[str], None]) -> None:
    """Where there are profiles; says where the pages are, or why there are none."""
    folder = run_dir / MEMORY_FOLDER
    if not any(folder.glob(f"*/{POINTS_NAME}")):
        return
    from meshscope.analyze.memory.memory_attribution import summarize_memory
    from meshscope.report.render.sunburst import write_sunbursts

    try:
        recordings = read_memory(run_dir)
        written = write_sunbursts(recordings, summarize_memory(recordings), folder, is_beside=True)
    except (MeshscopeError, OSError) as error:
        say(f"no pages of the memory profiles: {error}")
        return
    say(f"what memory was used for: meshscope memory {run_dir}, or {written[-1]}")

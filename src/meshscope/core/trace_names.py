"""Names of the folders that hold a rank's own files: traces, memory profiles.

One place, so that every writer and every reader agrees: `rank3_dp1_tp1_pp0`, and after that cp and
ep where the mesh has them. The rank comes first and is enough to find a folder; the coordinates are
for people, and are left out where the mesh is not known.
"""

import re

from meshscope.core.layout import Layout

_RANK_FOLDER = re.compile(r"rank([0-9]{1,12})(?:_[a-z]{2}[0-9]{1,12})*")


def rank_folder_name(rank: int, layout: Layout | None = None) -> str:
    """`rank3_dp1_tp1_pp0`; `rank3` when the mesh is not known or has no such rank."""
    if layout is None or not 0 <= rank < layout.world_size:
        return f"rank{rank}"
    return f"rank{rank}_{layout.label(rank).replace('.', '_')}"


def parse_rank_folder(name: str) -> int | None:
    """The rank a folder is of; None when it is no such folder."""
    match = _RANK_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])

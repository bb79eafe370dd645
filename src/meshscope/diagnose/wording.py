"""Words that findings share: numbers with units, ranks, steps.

Rules write numbers through here and `core.unit_text`, so that a number reads the same in a finding
and in the report's tables.
"""

from collections.abc import Collection

from meshscope.core.unit_text import bandwidth as bandwidth
from meshscope.core.unit_text import count as count
from meshscope.core.unit_text import duration as duration
from meshscope.core.unit_text import memory as memory
from meshscope.core.unit_text import plural as plural
from meshscope.core.unit_text import rate as rate
from meshscope.core.unit_text import ratio as ratio
from meshscope.store.read.rank_ranges import RankRanges, abbreviate_ranks


def name_ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`; cut after a few ranges."""
    shown = str(ranks) if isinstance(ranks, RankRanges) else abbreviate_ranks(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def be(ranks: Collection[int]) -> str:
    """`is` or `are`, for the ranks of `name_ranks`."""
    return "is" if len(ranks) == 1 else "are"


def p_value(value: float) -> str:
    """`p = 0.012`, `p < 1e-9`."""
    return "p < 1e-9" if value < 1e-9 else f"p = {value:.2g}"


def capitalize(sentence: str) -> str:
    """Capitalizes the first letter and leaves the rest."""
    return sentence[:1].upper() + sentence[1:]

"""Names of phases, few enough to tell phases apart.

A program that numbers its phases (`step 1`, `step 2`, …) has as many names as steps: tables of
phases by step would grow with their square. Beyond `MAX_PHASES` names that differ in their numbers
only are one, `step #`; if there are still more, all but the first are `(other phases)`.
"""

import re
from collections.abc import Mapping, Sequence

from meshscope.store.schema import BUILTIN_NAMES

MAX_PHASES = 256
OTHER_PHASES = "(other phases)"
_NUMBER = re.compile(r"\d+")
_OWN_IDS = frozenset(BUILTIN_NAMES.values())


def join_phase_names(ids: Sequence[int], names: Mapping[int, str]) -> list[str]:
    """The phases that a rank's ids of names mean; those that meshscope itself gives stay."""
    texts = [names.get(one, f"(unnamed {one})") for one in ids]
    if len(set(texts)) <= MAX_PHASES:
        return texts
    joined = [
        text if one in _OWN_IDS else _NUMBER.sub("#", text)
        for one, text in zip(ids, texts, strict=True)
    ]
    own = {text for one, text in zip(ids, joined, strict=True) if one in _OWN_IDS}
    given = [text for text in dict.fromkeys(joined) if text not in own]
    rest = set(given[MAX_PHASES - 1 - len(own) :]) if len(given) + len(own) > MAX_PHASES else ()
    return [OTHER_PHASES if text in rest else text for text in joined]

"""What a pipeline stage is made of, by kind of part: so many blocks, an embedding, a head.

Stages are uneven when they hold more of the same, slow when they take longer for as much; only who
knows the parts can tell. A program says it (`Recorder.set_stage_layers`), or the recorder looks at
the modules it watches: the children of the outermost list of modules, counted by class. Wrong where
layers of one class differ in size.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from meshscope.capture.steps.model_search import list_parameters

_CONTAINERS = frozenset(("ModuleList", "Sequential", "ModuleDict"))
"""Classes of torch, by name, so that torch is not needed."""
_PLAIN_LAYER = "layer"
"""The name of parts that were only counted."""
_MAX_SEARCHED = 256
"""Modules searched for the outermost list; it is never deep."""
_MAX_KINDS = 32
_MAX_NAME_CHARACTERS = 80


def check_stage_layers(
    stages: Mapping[int, int | Mapping[str, int]],
) -> dict[str, dict[str, int]]:
    """The counts for the journal, by the stage's number as text; raises if they are no counts."""
    return {
        str(_check_count("stage", stage)): _check_parts(parts) for stage, parts in stages.items()
    }


def _check_parts(parts: int | Mapping[str, int]) -> dict[str, int]:
    if not isinstance(parts, Mapping):
        return {_PLAIN_LAYER: _check_count("layers", parts)}
    return {
        str(name)[:_MAX_NAME_CHARACTERS]: _check_count("parts", number)
        for name, number in list(parts.items())[:_MAX_KINDS]
    }


def _check_count(what: str, value: Any) -> int:
    number = index(value)
    if number < 0:
        raise ValueError(f"{what}: {number} is negative")
    return number


def count_layers(model: Any) -> dict[str, int]:
    """Parts of the outermost list of modules in `model`, by class; empty when it has none."""
    waiting = deque([model])
    for _ in range(_MAX_SEARCHED):
        if not waiting:
            break
        module = waiting.popleft()
        children = list(module.children())
        if children and _CONTAINERS & {kind.__name__ for kind in type(module).__mro__}:
            # No Counter: it asks whether what it is given is a mapping, which leaves 50 objects.
            counts: dict[str, int] = {}
            for child in children:
                name = type(child).__name__[:_MAX_NAME_CHARACTERS]
                counts[name] = counts.get(name, 0) + 1
            most = sorted(counts, key=counts.__getitem__, reverse=True)[:_MAX_KINDS]
            return {name: counts[name] for name in most}
        waiting.extend(children)
    return {}


def count_parameter_bytes(models: Iterable[Any]) -> int:
    """Bytes of the parameters that are trained, each once."""
    found = {id(one): one for model in models for one in list_parameters(model) if one is not None}
    trained = [one for one in found.values() if one.requires_grad]
    return sum(int(one.numel()) * int(one.element_size()) for one in trained)

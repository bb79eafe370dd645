"""What DistributedDataParallel said about itself on a rank (`capture.model.replicas`)."""

from dataclasses import dataclass

from meshscope.store.read.recording import Recording

_MAX = 1 << 62
_NAMES = ("num_parameters", "parameter_bytes", "unused_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One wrapped model."""

    num_parameters: int
    """Tensors."""
    parameter_bytes: int
    unused_bytes: int
    """Of parameters that got no gradient in the iteration it looked at."""
    finds_unused: bool
    """Whether it searches the graph for them in every iteration."""


def read_replicas(recording: Recording) -> tuple[Replica, ...]:
    for line in reversed(recording.updates):
        found = line.get("replicas")
        if isinstance(found, list):
            made = (_read(one) for one in found if isinstance(one, dict))
            return tuple(one for one in made if one is not None)
    return ()


def _read(fields: dict[str, object]) -> Replica | None:
    values = {
        name: value
        for name in _NAMES
        if type(value := fields.get(name)) is int and 0 <= value < _MAX
    }
    if len(values) < len(_NAMES) or values["unused_bytes"] > values["parameter_bytes"]:
        return None
    return Replica(**values, finds_unused=fields.get("finds_unused") == 1)

"""What DistributedDataParallel says about itself: parameters, those without a gradient, buckets.

Its own account (`_get_ddp_logging_data`) is read on the host, in some 40 µs, and once. How much was
unused it knows from the second iteration on.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

_MAX_MODULES = 64
"""Looked at per model: wrappers are near the root."""
_MAX_WRAPPERS = 16
_WRAPPER = "DistributedDataParallel"
_FIELDS = {
    "num_parameters": "num_parameter_tensors",
    "parameter_bytes": "total_parameter_size_bytes",
    "unused_bytes": "unused_parameter_size",
    "bucket_cap_bytes": "bucket_cap_bytes",
    "finds_unused": "find_unused_parameters",
    "is_static": "static_graph",
    "iteration": "iteration",
}
"""What is written, and what torch calls it. What is 0 torch leaves out."""


def describe_replicas(models: Iterable[Any]) -> list[dict[str, int]]:
    """One per wrapper that has had two iterations."""
    found: list[dict[str, int]] = []
    for model in models:
        for module in islice(model.modules(), _MAX_MODULES):
            names = {kind.__name__ for kind in type(module).__mro__}
            if _WRAPPER not in names or len(found) == _MAX_WRAPPERS:
                continue
            said = module._get_ddp_logging_data()
            if int(said.get("iteration", 0)) > 0:
                found.append({own: int(said.get(name, 0)) for own, name in _FIELDS.items()})
    return found

"""The categories of a rank's memory, and the allowances that are stated and not derived."""

from dataclasses import dataclass, fields

CONTEXT_BYTES = 640 << 20
"""CUDA's context, loaded kernels and cuBLAS's workspace on a recent device; an allowance."""
NCCL_BYTES = 192 << 20
"""Of communication buffers for each axis in use; an allowance."""
FRAGMENTATION_RATIO = 0.03
"""Of all tensors; an allowance for what the allocator cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Of one pipeline rank; its tp, dp and cp peers hold as much, up to padding."""

    pp_rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    master_bytes: int
    activations_bytes: int
    """Kept by layers for backward, over all microbatches in flight."""
    logits_bytes: int
    """Kept by the loss, the head and its norm, and what the loss's backward needs."""
    casts_bytes: int
    """Copies of weights in another format."""
    communication_bytes: int
    """Messages, buckets and gathered weights."""
    workspace_bytes: int
    """What recompute makes again for one microbatch, and an operation's largest results."""
    context_bytes: int
    """Context and libraries: an allowance."""
    fragmentation_bytes: int
    """An allowance."""
    offloaded_bytes: int = 0
    """In the host's memory, beside the total."""

    @property
    def tensor_bytes(self) -> int:
        """What `meshscope memory` would count: all but the allowances."""
        return sum(getattr(self, name) for name in TENSOR_PARTS)

    @property
    def total_bytes(self) -> int:
        return self.tensor_bytes + self.context_bytes + self.fragmentation_bytes


_NOT_TENSORS = ("pp_rank", "context_bytes", "fragmentation_bytes", "offloaded_bytes")
TENSOR_PARTS = tuple(one.name for one in fields(RankMemory) if one.name not in _NOT_TENSORS)


def count_context(num_axes: int) -> int:
    """Context, libraries and the communicators of so many axes."""
    return CONTEXT_BYTES + NCCL_BYTES * num_axes

"""The state of the random number generators of a process: Python, numpy, torch and its devices.

As bytes of JSON in a tensor, so that a checkpoint stores it like any other tensor and reading it
runs no code. It belongs to one rank of one layout: on another number of ranks it means nothing.
"""

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

# torch has no types for it.
_is_cuda_used: Any = torch.cuda.is_initialized


def capture_random_state() -> Tensor:
    """The state of this process, as a uint8 tensor."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": [_to_hex(state) for state in _get_cuda_states()],
    }
    text = json.dumps(state, separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def restore_random_state(state: Tensor) -> None:
    """Sets what `capture_random_state` saw; devices that are not there are left out."""
    stored: dict[str, Any] = json.loads(bytes(state.cpu().numpy().tobytes()))
    version, keys, gauss = stored["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(stored["numpy"]))
    torch.set_rng_state(_from_hex(stored["torch"]))
    if len(stored["cuda"]) == len(_get_cuda_states()):
        for device, text in enumerate(stored["cuda"]):
            torch.cuda.set_rng_state(_from_hex(text), device)


def _get_cuda_states() -> list[Tensor]:
    # Asking would initialise CUDA where nothing uses it, and forbid forks.
    return torch.cuda.get_rng_state_all() if _is_cuda_used() else []


def _to_hex(state: Tensor) -> str:
    return bytes(state.numpy().tobytes()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

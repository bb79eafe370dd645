"""The size of the model that a rank trains."""

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.recording import Recording

_MAX_BYTES = 1 << 60


def read_parameter_bytes(recording: Recording) -> int | Unavailable:
    """Bytes of the parameters that are trained, each once, as the recorder counted them."""
    for fields in reversed(recording.updates):
        value = fields.get("parameter_bytes")
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_BYTES:
            return value
    return Unavailable("the recorder saw no model with parameters to train")

"""A callback for the Trainer of `pytorch_lightning`; see `meshscope.integrations.lightning`.

Its entry points are `pytorch_lightning.callbacks_factory`.
"""

from pytorch_lightning.callbacks import Callback

from meshscope.capture.guard import Guard
from meshscope.integrations.joining import is_recording_wanted
from meshscope.integrations.lightning_events import LightningEvents


class MeshscopeCallback(LightningEvents, Callback):  # type: ignore[misc]  # it is not always there
    """Records the training, with epochs, logged values, validation and settings by name."""


def make_callbacks() -> list[MeshscopeCallback]:
    """For Lightning's entry points: none unless this process was asked to record, and no error."""
    made = Guard().run("Lightning", MeshscopeCallback) if is_recording_wanted() else None
    return [] if made is None else [made]

"""A callback for the Trainer of `lightning`; `meshscope.integrations.pytorch_lightning` has the
same for the package of that name.

    trainer = lightning.Trainer(callbacks=[MeshscopeCallback("runs/my-run")], …)

Below `meshscope run`, or with MESHSCOPE_RUN_DIR set, Lightning adds it by itself: meshscope is
among its entry points `lightning.pytorch.callbacks_factory`.
"""

from lightning.pytorch.callbacks import Callback

from meshscope.capture.guard import Guard
from meshscope.integrations.joining import is_recording_wanted
from meshscope.integrations.lightning_events import LightningEvents


class MeshscopeCallback(LightningEvents, Callback):  # type: ignore[misc]  # it is not always there
    """Records the training, with epochs, logged values, validation and settings by name."""


def make_callbacks() -> list[MeshscopeCallback]:
    """For Lightning's entry points: none unless this process was asked to record, and no error."""
    made = Guard().run("Lightning", MeshscopeCallback) if is_recording_wanted() else None
    return [] if made is None else [made]

"""A callback for the Trainer of transformers, and for those of TRL, which are made of it.

    trainer = Trainer(model, args, callbacks=[MeshscopeCallback("runs/my-run")], …)

`meshscope run` records the same without it, but for epochs.
"""

from typing import Any

from transformers import TrainerCallback

from meshscope.capture.frameworks.arguments import read_arguments, read_model_config
from meshscope.capture.recorder import Recorder
from meshscope.integrations.joining import Member, RunDir


class MeshscopeCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not always there
    """Records the training, with epochs, logged values and arguments by their names."""

    def __init__(self, run_dir: RunDir = None, config: Any = None) -> None:
        """`config`: hyper-parameters beside the Trainer's own arguments."""
        self._member = Member("transformers", run_dir, config)
        self._epoch = 0

    @property
    def recorder(self) -> Recorder:
        """The process's recorder."""
        return self._member.recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Arguments and the model's configuration, as they are now."""

        def tell(member: Member) -> None:
            member.store_settings(read_arguments(args, "as training began"))
            member.store_settings(read_model_config(kwargs.get("model")))

        self._member.tell(tell)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Said with the epoch's first step."""
        self._epoch = round(state.epoch or 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._member.tell(Member.say_epoch, self._epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """All that is logged, of training (means since the last log) and of evaluation."""
        self._member.tell(Member.log, logs or {}, state.global_step)

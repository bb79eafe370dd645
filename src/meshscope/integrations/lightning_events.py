"""What a Lightning Trainer tells its callbacks, for both packages that Lightning comes in."""

from typing import Any

from meshscope.capture.frameworks.arguments import read_lightning
from meshscope.capture.recorder import Recorder
from meshscope.integrations.joining import Member, RunDir


class LightningEvents:
    """The hooks of a callback; its base class comes from the package whose Trainer is used."""

    def __init__(self, run_dir: RunDir = None, config: Any = None) -> None:
        """`config`: hyper-parameters beside the Trainer's and `save_hyperparameters`."""
        super().__init__()
        self._member = Member("Lightning", run_dir, config)

    @property
    def recorder(self) -> Recorder:
        """The process's recorder."""
        return self._member.recorder

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The Trainer's settings and saved hyper-parameters, as they are now."""
        self._member.tell(Member.store_settings, read_lightning(trainer, pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The epoch, and as often as the Trainer logs, what was logged."""
        self._member.tell(Member.say_epoch, trainer.current_epoch)
        every = trainer.log_every_n_steps
        if every and (batch_idx + 1) % every == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._member.tell(Member.begin_validation)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the span, and takes what validation logged."""
        self._member.tell(Member.end_validation)
        if not trainer.sanity_checking:
            self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._member.tell(Member.end_validation)

    def _log(self, trainer: Any) -> None:
        self._member.tell(Member.log, trainer.callback_metrics, trainer.global_step)

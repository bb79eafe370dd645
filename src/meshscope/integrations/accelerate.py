"""A tracker for Accelerate.

accelerator = Accelerator(log_with=MeshscopeTracker("runs/my-run"))
accelerator.init_trackers("my-project", config=vars(args))
accelerator.log({"train_loss": loss}, step=step)
"""

from typing import Any

from accelerate.tracking import GeneralTracker

from meshscope.capture.frameworks.arguments import read_trackers
from meshscope.capture.recorder import Recorder
from meshscope.integrations.joining import Member, RunDir


class MeshscopeTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate is not always there
    """Records the training on all ranks, with what is logged and the trackers' configuration."""

    name = "meshscope"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_dir: RunDir = None, config: Any = None) -> None:
        """Recording begins here: make it before the training does."""
        super().__init__()
        self._member = Member("Accelerate", run_dir, config)

    @property
    def tracker(self) -> Recorder:
        """The process's recorder."""
        return self._member.recorder

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """What `init_trackers` was given."""
        self._member.tell(Member.store_settings, read_trackers(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers only; texts and images are for other trackers."""
        self._member.tell(Member.log, values, self.tracker.current_step if step is None else step)

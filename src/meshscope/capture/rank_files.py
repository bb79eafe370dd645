"""The files of one attempt of a rank, which may be made before they have their place in the run."""

import sys
from dataclasses import dataclass
from typing import Any

from meshscope.capture.stacks.dumps import StackDumps
from meshscope.store.write.now_file import NowFile
from meshscope.store.write.open_step import OpenStepWriter
from meshscope.store.write.writer import RankWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """What one attempt of this rank writes to."""

    claims: tuple[object, ...]
    """What the header says of this process; files of other claims are made anew."""
    writer: RankWriter
    now: NowFile | None
    open_step: OpenStepWriter | None
    stack_dumps: StackDumps | None

    def place(self, claims: tuple[object, ...]) -> bool:
        """Puts files that were made ahead into the run; False where they no longer fit."""
        return self.claims == claims and self.writer.publish()

    def discard(self) -> None:
        if self.stack_dumps is not None:
            self.stack_dumps.remove()
        if self.now is not None:
            self.now.disarm()
        self.writer.discard()


def are_devices_known() -> bool:
    """Whether devices that the program may use can be written down: torch must have begun with
    them, which is never for us to do."""
    torch: Any = sys.modules.get("torch")
    if torch is None or (
        torch.version.cuda is None and getattr(torch.version, "hip", None) is None
    ):
        return True
    return bool(torch.cuda.is_initialized())

"""The step that is not finished yet: stamps of its phases, a part of `now_file`.

A step's usual phases are written as one record when it ends (table `phases`). Until then their
begin and end stamps stand here, each as a single 8-byte store, so that a killed or hanging process
leaves behind which phase it was in and since when. A stamp is stored as (time - epoch) * 257:
flipping any one byte makes it indivisible by 257, since 256 is -1 modulo that prime.

    word 0      magic        word 1    epoch_host_mono_ns        word 2    -epoch
    word 3+2k   begin and    word 4+2k end of phase k, in the order of PHASE_ORDER; 0 if never
"""

import struct
from dataclasses import dataclass

from meshscope.store.schema import BUILTIN_NAMES
from meshscope.store.write.now_file import NowFile

PHASE_ORDER = ("data", "forward", "backward", "optimizer")
PHASE_IDS = tuple(BUILTIN_NAMES[name] for name in PHASE_ORDER)

STAMP_FACTOR = 257
FIRST_STAMP_WORD = 3
_MAGIC = 0x50455453_4E45504F
NUM_STAMP_WORDS = 16
_WORDS = struct.Struct(f"<{NUM_STAMP_WORDS}q")


class OpenStepWriter:
    """`words` is what the hot path stores into. Only where the file is mapped."""

    def __init__(self, file: NowFile, epoch_ns: int) -> None:
        """Takes stamps from `epoch_ns` on."""
        epoch_ns -= 1  # a stamp of 0 says that there was none
        self.epoch_ns = epoch_ns
        self.words = file.open_step.cast("q")
        self.words[1], self.words[2] = epoch_ns, -epoch_ns
        self.words[0] = _MAGIC


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPhase:
    """A phase of an unfinished step; `end_host_mono_ns` is None while it is going on."""

    name_id: int
    start_host_mono_ns: int
    end_host_mono_ns: int | None


def read_open_step(data: bytes, last_end_ns: int) -> tuple[list[OpenPhase], int]:
    """Phases that began after `last_end_ns`, and how many stamps were damaged.

    Stamps of earlier steps are still there; their time tells them apart. A phase with a damaged
    stamp is left out. ValueError when the part as a whole cannot be trusted.
    """
    if len(data) != _WORDS.size:
        raise ValueError(f"{len(data)} bytes, expected {_WORDS.size}")
    words = _WORDS.unpack(data)
    if words[0] != _MAGIC or words[1] != -words[2]:
        raise ValueError("its head does not match")
    epoch_ns = words[1]
    num_stamps = 2 * len(PHASE_ORDER)
    stamps = words[FIRST_STAMP_WORD : FIRST_STAMP_WORD + num_stamps]
    num_damaged = sum(1 for stamp in stamps if stamp % STAMP_FACTOR)
    num_damaged += sum(1 for word in words[FIRST_STAMP_WORD + num_stamps :] if word)
    phases = []
    for index, name_id in enumerate(PHASE_IDS):
        pair = stamps[2 * index : 2 * index + 2]
        begin, end = (epoch_ns + stamp // STAMP_FACTOR for stamp in pair)
        is_damaged = any(stamp % STAMP_FACTOR for stamp in pair)
        if not pair[0] or is_damaged or begin < last_end_ns:
            continue
        is_over = pair[1] != 0 and end >= begin
        phases.append(
            OpenPhase(
                name_id=name_id,
                start_host_mono_ns=begin,
                end_host_mono_ns=end if is_over else None,
            )
        )
    return phases, num_damaged

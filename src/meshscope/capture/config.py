"""The settings of a recorder."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from meshscope.errors import UsageError
from meshscope.store.schema import MAX_DETAIL_BYTES

OLDEST_TORCH = (2, 11)
"""Before it, models, optimizers and communication are not watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderConfig:
    """What a recorder does. Change it while it runs with `Recorder.configure`."""

    enabled: bool = True
    """False: nothing is opened or written; every call still works."""
    signals: bool = True
    """Log what backward is called on, the learning rate and the gradient norm."""
    device_events: bool = True
    """Mark phases on the accelerator's stream as well."""
    memory: bool = True
    """Read memory at step ends, as often as it costs a thousandth of the time."""
    gc_pauses: bool = True
    """Record garbage collections over 0.2 ms as detail spans."""
    hardware: bool = True
    """Read the devices' clocks, power, heat and errors once a second, in a thread."""
    count_flops: bool = False
    """Count the FLOPs of a model given to `attach`, on fake tensors, at its first forward."""
    flop_counts: bool = True
    """Count the FLOPs of a few steps by the shapes of their operators."""
    communication: bool = True
    """Record every operation of torch.distributed."""
    kernel_samples: bool = True
    """Watch the kernels of a CUDA device in a few steps, now and then."""
    stack_dumps: bool = True
    """Let `meshscope hang` ask for the Python stacks, by an unused real-time signal."""
    stack_samples: bool = True
    """Sample the training thread's stack in a few steps, where time that no phase claims repeats
    and while kernels are sampled."""
    provenance: bool = True
    """Write git revision, packages, devices and settings into the run."""
    max_detail_bytes: int = MAX_DETAIL_BYTES
    """Limit of one detail table of one rank."""
    max_disk_bytes: int | None = None
    """What this rank's files may take: old operations and spans are thinned (docs/store.md). None:
    the job's (`meshscope run --max-disk`) divided by its ranks, or 16 GiB. 0: no limit."""


OFF_VARIABLE = "MESHSCOPE_OFF"
"""Names of settings that `meshscope run --off` turns off in all processes, with commas."""

MAX_DISK_VARIABLE = "MESHSCOPE_MAX_DISK"
"""Bytes that all ranks of a job may take together."""


def read_off(text: str) -> dict[str, bool]:
    """The settings that a text such as `stack_samples,kernel_samples` turns off; UsageError if one
    is unknown, or no switch."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    switches = [field.name for field in fields(RecorderConfig) if field.type in (bool, "bool")]
    unknown = sorted(set(names) - set(switches))
    if unknown:
        raise UsageError(f"nothing to turn off: {', '.join(unknown)}; one of {', '.join(switches)}")
    return dict.fromkeys(names, False)


def check_names(config: type, settings: Iterable[str]) -> None:
    """UsageError when a name is no field of `config`, a dataclass."""
    known = [field.name for field in fields(config)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise UsageError(f"unknown setting {', '.join(unknown)}; settings: {', '.join(known)}")

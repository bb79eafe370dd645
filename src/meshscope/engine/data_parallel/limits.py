"""What DDP and FSDP2 cannot do, by a configuration alone: without torch."""

from meshscope.core.schedule import ActionKind, Schedule

_ZERO_STAGES = (1, 2, 3)


def find_fsdp_problems(
    *,
    zero_stage: int,
    device_type: str = "cpu",
    cpu_offload: bool = False,
    compression: str | None = None,
    strategy: str = "flat",
    uses_torch_schedule: bool = False,
) -> list[str]:
    """Everything in a configuration that FSDP2 cannot do, one sentence each.

    There is no schedule of ours among it: see the module's docstring about zero-bubble.
    """
    problems = []
    if zero_stage not in _ZERO_STAGES:
        problems.append(f"zero_stage is {zero_stage}, expected 1, 2 or 3")
    if cpu_offload and device_type == "cpu":
        problems.append(
            "cpu_offload is on, but parameters are on the cpu already; leave it off there"
        )
    if compression is not None:
        problems.append(
            f"compression is {compression!r}, but FSDP2 reduces gradients itself; "
            "use the reducer, or no compression"
        )
    if strategy != "flat":
        problems.append(
            f"the communication strategy is {strategy!r}, but FSDP2 has its own collectives; "
            "use the reducer, or 'flat'"
        )
    if uses_torch_schedule:
        problems.append(
            "torch's own schedules set FSDP2's options themselves, whatever zero_stage says; "
            "use one of the engine's schedules"
        )
    return problems


def find_ddp_problems(
    *,
    schedule: Schedule | None = None,
    compression: str | None = None,
    strategy: str = "flat",
    uses_dtensor: bool = False,
    uses_torch_schedule: bool = False,
) -> list[str]:
    """Everything in a configuration that DDP cannot do, one sentence each."""
    problems = []
    if schedule is not None and has_weight_grads(schedule):
        problems.append(
            f"schedule {schedule.name} computes weight gradients apart from backward, where DDP "
            "does not see them; use the reducer or FSDP2, or a schedule without W"
        )
    if compression is not None:
        problems.append(
            f"compression is {compression!r}, but DDP here sends gradients as they are; "
            "use the reducer, or no compression"
        )
    if strategy != "flat":
        problems.append(
            f"the communication strategy is {strategy!r}, but DDP has its own collectives; "
            "use the reducer, or 'flat'"
        )
    if uses_dtensor:
        problems.append(
            "DDP loses DTensor parameters; use FSDP2, or tensor parallel on plain tensors"
        )
    if uses_torch_schedule:
        problems.append(
            "torch's own schedules announce last backwards to DDP themselves; "
            "use one of the engine's schedules"
        )
    return problems


def has_weight_grads(schedule: Schedule) -> bool:
    """Whether any rank computes weight gradients apart from backward."""
    return any(a.kind is ActionKind.WEIGHT_GRAD for row in schedule.actions for a in row)

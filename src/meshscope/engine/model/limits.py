"""What DTensor tensor parallel cannot do, by a configuration alone: without torch."""


def find_dtensor_problems(
    *,
    dp: int = 1,
    data_parallel: str = "fsdp",
    is_user_model: bool = False,
    has_checkpoints: bool = False,
) -> list[str]:
    """Everything in a configuration that DTensor tensor parallel cannot do, one sentence each.

    `data_parallel` is `fsdp`, `reducer` or `ddp`; `has_checkpoints` whether the engine is to save
    or load any.
    """
    problems = []
    if dp > 1 and data_parallel != "fsdp":
        problems.append(
            f"data_parallel is {data_parallel!r} with dp {dp}, which does not average DTensors; "
            "use 'fsdp', dp 1, or tensor parallel on plain tensors"
        )
    if is_user_model:
        problems.append(
            "DTensor tensor parallel knows the engine's own model only; give a user's model a "
            "plan for plain tensors, or call parallelize_module on its layers"
        )
    if has_checkpoints:
        problems.append(
            "checkpoints are on, but the engine's do not know the names and parts of DTensor "
            "tensor parallel; use tensor parallel on plain tensors, or gather_full_tensors"
        )
    return problems

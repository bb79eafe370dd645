"""What `nccl_*.py` can do to a program, and the programs they know by name."""

import time
from collections.abc import Callable

import torch
from nccl_programs import (
    COMPILED,
    LONG,
    SHARED_TP,
    SHORT,
    TINY,
    Fault,
    Moment,
    Program,
    Size,
    Training,
    engine,
    pipelined,
    plain,
    wrap_ddp,
    wrap_fsdp2,
    wrap_tp_fsdp2,
    wrapped,
)

MIB = 1 << 20
Act = Callable[[Training], None]


# --- acts ------------------------------------------------------------------------------------


def sleep(ms: float) -> Act:
    """The host does nothing."""
    return lambda training: time.sleep(ms / 1e3)


def compute(ms: float) -> Act:
    """Matrix products that take the device about so long when it has nothing else to do."""
    state: dict[str, tuple[torch.Tensor, int]] = {}

    def act(training: Training) -> None:
        if "found" not in state:
            state["found"] = _calibrate(training, ms)
        matrix, count = state["found"]
        with torch.no_grad():
            for _ in range(count):
                torch.mm(matrix, matrix)

    return act


def _calibrate(training: Training, ms: float) -> tuple[torch.Tensor, int]:
    is_cuda = training.place.is_cuda
    width, dtype = (4096, torch.bfloat16) if is_cuda else (256, torch.float32)
    matrix = torch.ones(width, width, device=training.place.device, dtype=dtype)
    torch.mm(matrix, matrix)
    training.place.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        torch.mm(matrix, matrix)
    training.place.synchronize()
    return matrix, max(1, round(20 * ms / 1e3 / (time.perf_counter() - begin)))


def multiply_again() -> Act:
    """A linear layer's product once more, as on a device with half the speed; for IN_MATRICES."""

    def act(training: Training) -> None:
        size, linear = training.size, training.linear
        weight = linear.weight.detach()  # type: ignore[union-attr]
        with torch.no_grad():
            rows = weight.new_empty(size.batch * size.length, weight.shape[1])
            if training.place.is_cuda:
                rows, weight = rows.bfloat16(), weight.bfloat16()
            rows @ weight.T

    return act


def read_loss(training: Training) -> None:
    """`.item()`: the host waits for the device."""
    if training.loss is not None:
        training.loss.item()


def print_loss(training: Training) -> None:
    """As people do; the text goes nowhere."""
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        print(training.loss, file=nowhere)


def read_and_log(training: Training) -> None:
    """`.item()` and 4 ms of Python, which the device would not notice without the former."""
    read_loss(training)
    time.sleep(4e-3)


def leak(num_mib: int = 64) -> Act:
    """Device memory that is never given back."""

    def act(training: Training) -> None:
        count = num_mib * MIB if training.place.is_cuda else MIB
        training.kept.append(torch.zeros(count, dtype=torch.uint8, device=training.place.device))

    return act


def fragment(training: Training) -> None:
    """A temporary tensor that is a little larger in every step.

    It fits into no segment that torch has reserved, so that another is reserved and stays. It has
    to be larger than all that the model needs, which is free at the end of a step.
    """
    step = len(training.kept)
    training.kept.append(None)
    num_mib = 448 + 2 * step if training.place.is_cuda else 1
    torch.empty(num_mib * MIB, dtype=torch.uint8, device=training.place.device)


def save_checkpoint(training: Training) -> None:
    torch.save(training.model.state_dict(), training.place.folder / "checkpoint.pt")


def evaluate(training: Training) -> None:
    """Forward passes over a few batches, and their mean loss."""
    training.model.eval()
    with torch.no_grad(), training.autocast():
        losses = [training.run(training.fetch()) for _ in range(8)]  # type: ignore[attr-defined]
        torch.stack(losses).mean().item()
    training.model.train()


CHECKPOINTS = Fault(
    moment=Moment.AFTER_OPTIMIZER, act=save_checkpoint, every=10, ranks=(0,), phase="checkpoint"
)
EVALUATIONS = Fault(moment=Moment.AFTER_OPTIMIZER, act=evaluate, every=10, phase="eval")
READS = Fault(moment=Moment.AFTER_OPTIMIZER, act=read_loss)


# --- programs --------------------------------------------------------------------------------

JOBS = (
    wrapped("ddp2", wrap_ddp, num_ranks=2),
    wrapped("ddp", wrap_ddp),
    wrapped("fsdp2", wrap_fsdp2),
    wrapped("tp_fsdp2", wrap_tp_fsdp2, size=SHARED_TP),
    pipelined("pp4"),
    engine("engine_222", size=SHARED_TP, dp=2, tp=2, pp=2, num_microbatches=4),
    engine(
        "engine_222_light",
        size=Size(layers=2, length=256, batch=4),
        dp=2,
        tp=2,
        pp=2,
        num_microbatches=2,
    ),
    engine("engine_dp4", dp=4),
    engine("engine_tp4", size=SHARED_TP, tp=4),
    engine("engine_pp4", pp=4, num_microbatches=8),
    wrapped("ddp_compiled", wrap_ddp, size=COMPILED, compile_mode="default"),
    wrapped("ddp_graphs", wrap_ddp, size=COMPILED, compile_mode="reduce-overhead"),
)
"""Several ranks."""

SINGLES = (
    plain("single_25ms", SHORT),
    plain("single_100ms", LONG),
    plain("host_bound", TINY),
    plain("compiled", COMPILED, compile_mode="default"),
    plain("graphs", COMPILED, compile_mode="reduce-overhead"),
    plain("accumulation", SHORT, accumulate=4, has_scaler=True),
    plain("synchronising", SHORT, faults=[READS]),
    plain("loader", SHORT, faults=[Fault(moment=Moment.FETCH, act=sleep(40))]),
    plain("checkpoint_eval", SHORT, faults=[CHECKPOINTS, EVALUATIONS]),
    plain("recompiling", COMPILED, compile_mode="default", new_length_every=20),
)
"""One rank, no torch.distributed."""

PROGRAMS: dict[str, Program] = {program.name: program for program in (*JOBS, *SINGLES)}

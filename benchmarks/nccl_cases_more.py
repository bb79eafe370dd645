"""Further faults of `nccl_faults.py`, by somebody who had not read the rules: other programs,
amounts, ranks and places than in `nccl_cases.py`.

Programs compute much and send little, because ranks that share a GPU talk over loopback. Their
hosts need a third to a half of what the device does, so that a host that is slow on purpose is
slower than the device, and nothing else is. Cases with the same clean program stand together.
"""

import time
from dataclasses import replace

import torch
from nccl_cases import Case, Expected, name_rank, slow
from nccl_catalog import CHECKPOINTS, EVALUATIONS, Act, compute, read_loss, sleep
from nccl_images import ImageSize, images, wrap_wide_head
from nccl_programs import (
    Moment,
    Size,
    Training,
    keep_whole,
    pipelined,
    wrap_ddp,
    wrap_fsdp2_kept,
)
from torch.distributed.pipelining import ScheduleGPipe

ONSET_STEP = 30

# --- programs --------------------------------------------------------------------------------

PHOTOS = ImageSize(num_blocks=6, width=64, side=128, batch=256, hidden=8192)
"""A checkpoint of 37 MB, inputs of 50 MB."""
DEEP_MIXER = ImageSize(num_blocks=16, width=512, side=32, batch=512, is_mixer=True)
"""200 parameters."""
SHORT_MIXER = replace(DEEP_MIXER, num_blocks=6, batch=1024)
HALF_PHOTOS = replace(PHOTOS, batch=128, hidden=256)
"""2 ranks, half of a device each; gradients of 3 MB."""
WIDE_HEAD = replace(HALF_PHOTOS, hidden=8192)
QUARTER_MIXER = ImageSize(num_blocks=6, width=192, side=32, batch=512, is_mixer=True)
"""A microbatch of 4 ranks; gradients of 7 MB after three of them."""
SHARDED_MIXER = ImageSize(num_blocks=4, width=256, side=32, batch=1024, is_mixer=True)

PHOTOS_CLEAN = images("photos_clean", PHOTOS, keep_whole)
PHOTOS_PAGEABLE = images("photos_pageable", PHOTOS, keep_whole, is_pinned=False)
CLIPPED = images("mixer_clipped", DEEP_MIXER, keep_whole, clips=True)
CLIPPED_SINGLY = images("mixer_singly", DEEP_MIXER, keep_whole, clips=True, is_foreach=False)
COMPILED = images("mixer_compiled", SHORT_MIXER, keep_whole, is_compiled=True)
RECOMPILED = images(
    "mixer_recompiled", SHORT_MIXER, keep_whole, is_compiled=True, new_amount_every=13
)
PHOTOS_DDP = images("photos_ddp2", HALF_PHOTOS, wrap_ddp, num_ranks=2)
WIDE_TP = images("wide_tp2", WIDE_HEAD, wrap_wide_head, num_ranks=2)
GPIPE = pipelined(
    "gpipe2_even",
    stage_layers=(4, 4),
    num_microbatches=8,
    size=Size(width=512, words=1024, batch=16),
    make_schedule=ScheduleGPipe,
)
ACCUMULATED = images("mixer_ddp4", QUARTER_MIXER, wrap_ddp, num_ranks=4, accumulate=3)
SHARDED = images("mixer_fsdp4", SHARDED_MIXER, wrap_fsdp2_kept, num_ranks=4)


# --- acts ------------------------------------------------------------------------------------


def augment(ms: float) -> Act:
    """Flips and normalizes images on the host, one after the other, for so long."""

    def act(training: Training) -> None:
        end = time.perf_counter() + ms / 1e3
        while time.perf_counter() < end:
            for image in training.host_images[:4]:  # type: ignore[attr-defined]
                flipped = image.flip(-1)
                (flipped - flipped.mean((1, 2), keepdim=True)) / flipped.std()

    return act


def copy_images_to_host(training: Training) -> None:
    """As people do who look at predictions."""
    training.kept[:] = [training.images.cpu()]  # type: ignore[attr-defined]


def check_gradients(training: Training) -> None:
    """An `if` for each parameter: each waits for the device."""
    for parameter in training.model.parameters():
        if not parameter.grad.isfinite().all():  # type: ignore[union-attr]
            training.num_bad = 1  # type: ignore[attr-defined]


def keep_graph(training: Training) -> None:
    """The loss of a few images, kept with all activations that its backward would need."""
    few = training.images[:4]  # type: ignore[attr-defined]
    with training.autocast():
        classes = torch.zeros(len(few), dtype=torch.long, device=few.device)
        training.kept.append(training.run((few, classes)))  # type: ignore[attr-defined]


def look_at_one_batch(training: Training) -> None:
    """An evaluation that costs a ninth of a step, and nobody waits for its loss."""
    training.model.eval()
    with torch.no_grad(), training.autocast():
        training.run(training.fetch())  # type: ignore[attr-defined]
    training.model.train()


def multiply_in_turn(training: Training) -> None:
    """The same products on all ranks, on each in another microbatch. A number of products, not a
    time: ranks that measured how many they need would differ."""
    if training.microbatch != training.place.rank % 3:  # type: ignore[attr-defined]
        return
    width = 2048 if training.place.is_cuda else 64
    matrix = torch.ones(width, width, device=training.place.device, dtype=torch.bfloat16)
    for _ in range(24):
        torch.mm(matrix, matrix)


# --- cases -----------------------------------------------------------------------------------

HEALTHY = Expected(codes=())
PERIODIC = ("TI002", "TI004")
WAITING = ("CP005", "CP006")
STAGE = ("PP003", "ST001")
BETWEEN = ("ST001", "ST002", "ST004", "TI005", "LT001")
LATE = ("PA002", "TI002", "TI004", "ST001", "ST004")


def list_photos() -> list[Case]:
    """Convolutions on a GPU of their own."""
    return [
        Case(
            name="photos_copied_to_host",
            clean=PHOTOS_CLEAN,
            faults=slow(Moment.AFTER_OPTIMIZER, copy_images_to_host),
            expected=Expected(codes=WAITING),
        ),
        Case(
            name="photos_gradients_checked",
            clean=PHOTOS_CLEAN,
            faults=slow(Moment.BEFORE_OPTIMIZER, check_gradients),
            expected=Expected(codes=("CP005",)),
        ),
        Case(
            name="photos_pageable_inputs",
            clean=PHOTOS_CLEAN,
            other=PHOTOS_PAGEABLE,
            expected=Expected(codes=WAITING),
        ),
        Case(
            name="photos_augmented",
            clean=PHOTOS_CLEAN,
            faults=slow(Moment.FETCH, augment(45)),
            expected=Expected(codes=("IN002", "IN001")),
        ),
        Case(
            name="photos_evaluated",
            clean=PHOTOS_CLEAN,
            faults=(replace(EVALUATIONS, every=8),),
            expected=Expected(codes=PERIODIC, words=("eval",)),
        ),
        Case(
            name="photos_saved",
            clean=PHOTOS_CLEAN,
            faults=(replace(CHECKPOINTS, every=12),),
            expected=Expected(codes=PERIODIC, words=("checkpoint",)),
        ),
        Case(
            name="photos_graphs_kept",
            clean=PHOTOS_CLEAN,
            faults=slow(Moment.AFTER_OPTIMIZER, keep_graph),
            expected=Expected(codes=("ME001",)),
            is_timed=False,
        ),
        Case(
            name="healthy_photos_start",
            clean=PHOTOS_CLEAN,
            faults=(replace(slow(Moment.BEFORE_FORWARD, sleep(150))[0], until=4),),
            expected=HEALTHY,
            is_timed=False,
        ),
        Case(
            name="healthy_photos_seldom_read",
            clean=PHOTOS_CLEAN,
            faults=slow(Moment.AFTER_OPTIMIZER, read_loss, every=20),
            expected=HEALTHY,
            is_timed=False,
        ),
    ]


def list_mixers() -> list[Case]:
    """MLP mixers on a GPU of their own."""
    return [
        Case(
            name="mixer_tensor_by_tensor",
            clean=CLIPPED,
            other=CLIPPED_SINGLY,
            expected=Expected(codes=("CP004",)),
            has_price=False,
        ),
        Case(
            name="mixer_changing_number",
            clean=COMPILED,
            other=RECOMPILED,
            expected=Expected(codes=("CP007", *PERIODIC), words=("ompil",)),
        ),
    ]


def list_pairs() -> list[Case]:
    """2 ranks: data parallel, tensor parallel alone, GPipe."""
    late = replace(slow(Moment.IN_BACKWARD, compute(15), 1)[0], since=ONSET_STEP)
    return [
        Case(
            name="photos_ddp2_late_onset",
            clean=PHOTOS_DDP,
            faults=(late,),
            expected=name_rank(1, words=("backward",)),
        ),
        Case(
            name="photos_ddp2_augmented",
            clean=PHOTOS_DDP,
            faults=slow(Moment.FETCH, augment(45), 0),
            expected=Expected(codes=("IN001",), ranks=(0,)),
        ),
        Case(
            name="wide_tp2_slow_kernels",
            clean=WIDE_TP,
            faults=slow(Moment.IN_FORWARD, compute(12), 0),
            expected=name_rank(0, words=("forward",)),
        ),
        Case(
            name="wide_tp2_slow_host_in_optimizer",
            clean=WIDE_TP,
            faults=slow(Moment.IN_OPTIMIZER, sleep(35), 1),
            expected=name_rank(1, words=("optimizer",)),
        ),
        Case(
            name="gpipe2_slow_backward",
            clean=GPIPE,
            faults=slow(Moment.IN_BACKWARD, compute(2.5), 0),
            expected=Expected(codes=STAGE, ranks=(0,)),
        ),
        Case(
            name="gpipe2_slow_host_between",
            clean=GPIPE,
            faults=slow(Moment.AFTER_OPTIMIZER, sleep(45), 1),
            expected=Expected(codes=BETWEEN, ranks=(1,)),
        ),
    ]


def list_quads() -> list[Case]:
    """4 ranks: accumulation with no_sync, FSDP2 that keeps what it gathered."""
    # All meet at the end of backward and before forward, so that what the two cost adds up.
    two = (
        *slow(Moment.IN_BACKWARD, compute(12), 0),
        *slow(Moment.IN_OPTIMIZER, compute(16), 3),
    )
    return [
        Case(
            name="mixer_ddp4_slow_host_in_forward",
            clean=ACCUMULATED,
            faults=slow(Moment.IN_FORWARD, sleep(14), 3),
            expected=name_rank(3, words=("forward",)),
        ),
        Case(
            name="mixer_ddp4_slow_kernels_in_optimizer",
            clean=ACCUMULATED,
            faults=slow(Moment.IN_OPTIMIZER, compute(15), 1),
            expected=name_rank(1, words=("optimizer",)),
        ),
        Case(
            name="mixer_ddp4_logging",
            clean=ACCUMULATED,
            faults=slow(Moment.AFTER_OPTIMIZER, sleep(50), 0),
            expected=Expected(codes=BETWEEN, ranks=(0,)),
        ),
        Case(
            name="healthy_mixer_ddp4_looks",
            clean=ACCUMULATED,
            faults=slow(Moment.AFTER_OPTIMIZER, look_at_one_batch, every=8),
            expected=HEALTHY,
            is_timed=False,
        ),
        Case(
            name="healthy_mixer_ddp4_in_turn",
            clean=ACCUMULATED,
            faults=slow(Moment.IN_FORWARD, multiply_in_turn),
            expected=HEALTHY,
            is_timed=False,
        ),
        Case(
            name="mixer_fsdp4_two_faults",
            clean=SHARDED,
            faults=two,
            expected=name_rank(0, words=("backward",)),
            also=(name_rank(3, words=("optimizer",)),),
        ),
        Case(
            name="mixer_fsdp4_late_every_5",
            clean=SHARDED,
            faults=slow(Moment.BEFORE_FORWARD, sleep(150), 1, every=5),
            expected=Expected(codes=LATE, ranks=(1,)),
        ),
    ]


CASES: dict[str, Case] = {
    case.name: replace(case, set_name="more")
    for case in (*list_photos(), *list_mixers(), *list_pairs(), *list_quads())
}

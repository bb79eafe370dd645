"""Training programs on images for `nccl_cases_more.py`: convolutions and an MLP mixer."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from nccl_bench import Place
from nccl_programs import (
    NUM_BATCHES,
    Fault,
    LoopSettings,
    Moment,
    Program,
    Training,
    Wrap,
    make_optimizer,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, IterableDataset

NUM_CLASSES = 128
PATCH = 4
POOLED = 4
"""Places on each side of which the classifier sees the mean."""

Batch = tuple[Tensor, Tensor]
"""Images and their classes."""


# --- models ----------------------------------------------------------------------------------


class ImageBlock(nn.Module):
    """A layer of either model: `find_middle_block` looks for it."""


class ConvBlock(ImageBlock):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(x + self.norm2(self.conv2(inner)))


class MixerBlock(ImageBlock):
    """Mixes patches, then channels."""

    def __init__(self, num_patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches_up = nn.Linear(num_patches, 2 * num_patches)
        self.patches_down = nn.Linear(2 * num_patches, num_patches)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.patches_up(self.norm1(x).transpose(1, 2))
        x = x + self.patches_down(nn.functional.gelu(mixed)).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    num_blocks: int
    width: int
    side: int
    """Pixels."""
    batch: int
    hidden: int = 256
    """Of the classifier of `Convolutions`."""
    is_mixer: bool = False

    def shrink(self) -> "ImageSize":
        """For a CPU, where only the path counts."""
        return replace(self, num_blocks=2, width=8, side=16, batch=4, hidden=16)


class Convolutions(nn.Module):
    def __init__(self, size: ImageSize) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.width, 4, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(size.width) for _ in range(size.num_blocks))
        self.up = nn.Linear(size.width * POOLED * POOLED, size.hidden)
        self.down = nn.Linear(size.hidden, NUM_CLASSES)

    def forward(self, images: Tensor, amount: int = 0) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        features = nn.functional.avg_pool2d(x, x.shape[-1] // POOLED).flatten(1)
        return self.down(nn.functional.relu(self.up(features)))


class Mixer(nn.Module):
    def __init__(self, size: ImageSize) -> None:
        super().__init__()
        num_patches = (size.side // PATCH) ** 2
        self.stem = nn.Conv2d(3, size.width, PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(
            MixerBlock(num_patches, size.width) for _ in range(size.num_blocks)
        )
        self.head = nn.Linear(size.width, NUM_CLASSES)

    def forward(self, images: Tensor, amount: int = 0) -> Tensor:
        """`amount` sharpens what it says, as a schedule would."""
        x = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)) * (1 + amount / 1000)


# --- the loop --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """What the loop may have."""

    accumulate: int = 1
    """Microbatches; DistributedDataParallel sums gradients in the last."""
    is_pinned: bool = True
    """Otherwise inputs come from pageable memory, and the host waits for their copy."""
    clips: bool = False
    """Gradients are clipped by their norm."""
    is_foreach: bool = True
    """Otherwise clipping and the update take each tensor for itself."""
    is_compiled: bool = False
    new_amount_every: int = 0
    """Steps after which the number that the model takes changes, so that it compiles again."""


class ImageBatches(IterableDataset):
    """The same few batches for ever, through a real loader in the main thread."""

    def __init__(self, training: "ImageLoop") -> None:
        self.training = training
        size, is_pinned = training.size, training.settings.is_pinned and training.place.is_cuda
        generator = torch.Generator().manual_seed(training.find_seed())
        shape = (size.batch, 3, size.side, size.side)
        made = [
            (
                torch.rand(shape, generator=generator),
                torch.randint(0, NUM_CLASSES, shape[:1], generator=generator),
            )
            for _ in range(NUM_BATCHES)
        ]
        self.made = [tuple(map(Tensor.pin_memory, one)) if is_pinned else one for one in made]

    def __iter__(self) -> Iterator[Any]:
        for images, classes in itertools.cycle(self.made):
            self.training.host_images = images
            self.training.reach(Moment.FETCH)
            yield images, classes


class ImageLoop(Training):
    """Forward, backward, optimizer; the wrapped model communicates."""

    block_type = ImageBlock

    def __init__(self, place: Place, size: ImageSize, wrap: Wrap, settings: ImageSettings) -> None:
        super().__init__(place, size)
        self.settings = settings
        self.microbatch = 0
        self.host_images: Tensor | None = None
        self.images: Tensor | None = None
        model: nn.Module = Mixer(self.size) if self.size.is_mixer else Convolutions(self.size)
        model = model.to(place.device)
        if not self.size.is_mixer:
            model = model.to(memory_format=torch.channels_last)
        self.model = wrap(model, place, LoopSettings(bucket_mib=4.0))
        if settings.is_compiled:
            torch._dynamo.config.cache_size_limit = 1000
            # Without inductor: it compiles in a second, and twins differ in the number alone.
            self.model = torch.compile(self.model, backend="aot_eager", dynamic=False)
        self.optimizer = self._make_optimizer()
        self.num_amounts = 0
        self.batches = iter(DataLoader(ImageBatches(self), batch_size=None))

    def _make_optimizer(self) -> torch.optim.Optimizer:
        if self.settings.is_foreach:
            return make_optimizer(self.model)
        return torch.optim.AdamW(self.model.parameters(), foreach=False, fused=False)

    def find_seed(self) -> int:
        """Tensor-parallel ranks share a batch."""
        return 0 if hasattr(self.model, "bench_mesh") else self.place.rank

    def fetch(self) -> Batch:
        device, is_pinned = self.place.device, self.settings.is_pinned
        images, classes = (one.to(device, non_blocking=is_pinned) for one in next(self.batches))
        self.images = images.contiguous(memory_format=torch.channels_last)
        return self.images, classes

    def run(self, batch: Batch) -> Tensor:
        images, classes = batch
        return nn.functional.cross_entropy(self.model(images, self.amount).float(), classes)

    @property
    def amount(self) -> int:
        every = self.settings.new_amount_every
        return self.num_amounts // every if every else 0

    def step(self) -> None:
        settings = self.settings
        for self.microbatch in range(settings.accumulate):
            is_last = self.microbatch == settings.accumulate - 1
            with nullcontext() if is_last else self.model.no_sync():
                batch = self.fetch()
                self.reach(Moment.BEFORE_FORWARD)
                with self.autocast():
                    self.loss = self.run(batch) / settings.accumulate
                self.reach(Moment.BEFORE_BACKWARD)
                self.loss.backward()
        self.reach(Moment.BEFORE_OPTIMIZER)
        if settings.clips:
            parameters = self.model.parameters()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=settings.is_foreach)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reach(Moment.AFTER_OPTIMIZER)
        self.num_amounts += 1
        self.num_steps += 1


def wrap_wide_head(model: nn.Module, place: Place, settings: LoopSettings) -> nn.Module:
    """Tensor parallel in the classifier alone: all ranks compute the same features."""
    mesh = init_device_mesh(place.device.type, (place.num_ranks,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.bench_mesh = mesh
    return model


def images(
    name: str,
    size: ImageSize,
    wrap: Wrap,
    *,
    num_ranks: int = 1,
    faults: Sequence[Fault] = (),
    **settings: Any,
) -> Program:
    chosen = ImageSettings(**settings)
    return Program(
        name=name,
        num_ranks=num_ranks,
        make=lambda place: ImageLoop(place, size, wrap, chosen),
        faults=tuple(faults),
        period=max([chosen.new_amount_every, 1, *(fault.every for fault in faults)]),
    )

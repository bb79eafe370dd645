"""Small training programs with nothing wrong in them, for `healthy_runs.py`.

    python benchmarks/healthy_programs.py validated --seed 3

None knows of the recorder. Each takes steps of 10 to 40 ms on one core for some seconds, learns a
task that can be learnt, and loads, evaluates, saves and communicates in the shares that people
have: little. Under torchrun, programs with `distributed` in their name train on all its ranks.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 384
BATCH = 128
NUM_STEPS = 120


class Blocks(nn.Module):
    """A residual perceptron."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Words(nn.Module):
    """A transformer over short sentences."""

    def __init__(self, width: int = 96, num_words: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(words)))


class Agent(nn.Module):
    """Never called itself: its parts are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Blocks(3)
        self.value = nn.Linear(8, 1)

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, self.value(features)


def make_task(num_samples: int = 2048) -> tuple[Tensor, Tensor]:
    """Inputs and what a random linear map makes of them, with noise."""
    inputs = torch.randn(num_samples, WIDTH)
    answers = inputs @ torch.randn(WIDTH, 8) / WIDTH**0.5
    return inputs, answers + 0.1 * torch.randn_like(answers)


def draw(task: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(task[0]), (BATCH,))
    return task[0][chosen], task[1][chosen]


def repeat(loader: DataLoader) -> Iterator[list[Tensor]]:
    epoch = 0
    while True:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


# --- one process ---------------------------------------------------------------------------------


def plain() -> None:
    task, model = make_task(), Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        train_step(model, optimizer, *draw(task))


def printed() -> None:
    task, model = make_task(), Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(NUM_STEPS):
        loss = train_step(model, optimizer, *draw(task))
        if step % 10 == 0:
            print(step, loss.item())


def loaded() -> None:
    model = Blocks(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = repeat(DataLoader(TensorDataset(*make_task()), BATCH, shuffle=True, drop_last=True))
    for _ in range(NUM_STEPS):
        train_step(model, optimizer, *next(batches))


def loaded_by_workers() -> None:
    """Taking a batch from a worker costs 1 to 2 ms, ready or not: steps are longer here."""
    model = Blocks(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(*make_task(BATCH * NUM_STEPS // 2))
    for x, y in DataLoader(data, BATCH, shuffle=True, drop_last=True, num_workers=1):
        train_step(model, optimizer, x, y)


def accumulated() -> None:
    task, model = make_task(), Blocks(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    for _ in range(NUM_STEPS):
        for _ in range(4):
            x, y = draw(task)
            (nn.functional.mse_loss(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def validated() -> None:
    """Evaluates and saves once in a while, in a small share of the time."""
    data, held_out = TensorDataset(*make_task()), TensorDataset(*make_task(BATCH))
    model = Blocks(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = repeat(DataLoader(data, BATCH, shuffle=True, drop_last=True))
    with tempfile.TemporaryDirectory() as folder:
        for step in range(NUM_STEPS):
            train_step(model, optimizer, *next(batches))
            if step % 40 == 39:
                model.eval()
                with torch.no_grad():
                    for x, y in DataLoader(held_out, BATCH):
                        nn.functional.mse_loss(model(x), y).item()
                model.train()
            if step == NUM_STEPS - 1:
                torch.save(model.state_dict(), Path(folder) / "model.pt")


def sentences() -> None:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        first = torch.randint(128, (16, 1))
        words = (first + torch.arange(33)) % 128
        optimizer.zero_grad()
        found = model(words[:, :-1])
        nn.functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()


def pictures() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    classes = torch.randn(10, 3, 1, 1)
    for _ in range(NUM_STEPS):
        labels = torch.randint(10, (24,))
        x = classes[labels] + torch.randn(24, 3, 32, 32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()


def low_precision() -> None:
    task, model = make_task(), Blocks(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        x, y = draw(task)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


def adversaries() -> None:
    """Two models, two optimizers, two losses."""
    maker, judge = Blocks(2), Blocks(2)
    makers = torch.optim.Adam(maker.parameters(), lr=1e-4)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-4)
    for _ in range(NUM_STEPS):
        real = torch.randn(BATCH, WIDTH)
        made = real + maker(real).mean(1, keepdim=True)
        judges.zero_grad()
        score = judge(real).mean(1) - judge(made.detach()).mean(1)
        nn.functional.softplus(-score).mean().backward()
        judges.step()
        makers.zero_grad()
        nn.functional.softplus(-judge(made).mean(1)).mean().backward()
        makers.step()


def agent() -> None:
    """Acts without gradients, then learns from it: the root module is never called."""
    task, model = make_task(), Agent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        x, y = draw(task)
        with torch.no_grad():
            model.act(x[:8])
        features, value = model.act(x)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(features, y) + nn.functional.mse_loss(value, y[:, :1])
        loss.backward()
        optimizer.step()


def iterated() -> None:
    """A generator of the program's own instead of a loader."""
    model = Blocks(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    task = make_task()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(NUM_STEPS):
            yield draw(task)

    for x, y in batches():
        train_step(model, optimizer, x, y)


# --- several ranks -------------------------------------------------------------------------------


def wrap(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def distributed() -> None:
    task, model = make_task(), wrap(Blocks(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        x, y = draw(task)
        train_step(model, optimizer, x.repeat(3, 1), y.repeat(3, 1))


def distributed_late_wrap() -> None:
    """The optimizer is made before the model is wrapped, as frameworks do."""
    task, bare = make_task(), Blocks(3)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    model = wrap(bare)
    for _ in range(NUM_STEPS):
        x, y = draw(task)
        train_step(model, optimizer, x.repeat(3, 1), y.repeat(3, 1))


def distributed_loaded() -> None:
    data = TensorDataset(*make_task())
    sampler: DistributedSampler = DistributedSampler(data)
    model = wrap(Blocks(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = repeat(DataLoader(data, 2 * BATCH, sampler=sampler, drop_last=True))
    for step in range(NUM_STEPS):
        loss = train_step(model, optimizer, *next(batches))
        if dist.get_rank() == 0 and step % 20 == 0:
            print(step, loss.item())


def distributed_accumulated() -> None:
    task, model = make_task(), wrap(Blocks(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for index in range(3):
            x, y = draw(task)
            with model.no_sync() if index < 2 else contextlib.nullcontext():
                (nn.functional.mse_loss(model(x), y) / 3).backward()
        optimizer.step()


def distributed_sentences() -> None:
    model = wrap(Words(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        words = (torch.randint(128, (16, 1)) + torch.arange(33)) % 128
        optimizer.zero_grad()
        found = model(words[:, :-1])
        nn.functional.cross_entropy(found.flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()


def distributed_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    task, model = make_task(), Blocks(2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS // 2):
        x, y = draw(task)
        train_step(model, optimizer, x.repeat(8, 1), y.repeat(8, 1))


PROGRAMS: dict[str, Callable[[], None]] = {
    program.__name__: program
    for program in (
        plain,
        printed,
        loaded,
        loaded_by_workers,
        accumulated,
        validated,
        sentences,
        pictures,
        low_precision,
        adversaries,
        agent,
        iterated,
        distributed,
        distributed_late_wrap,
        distributed_loaded,
        distributed_accumulated,
        distributed_sentences,
        distributed_sharded,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.program.startswith("distributed"):
        dist.init_process_group("gloo")
        torch.manual_seed(1000 * options.seed + dist.get_rank())
    PROGRAMS[options.program]()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Programs that write down their own loss of every step, one JSON line each: argument 1 says which.

Line: optimizer (1 or 2), step, loss.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

TRUTH = Path("truth.jsonl")
VOCABULARY = 128


def note(step: int, loss: float, optimizer: int = 1) -> None:
    with TRUTH.open("a", encoding="utf-8") as file:
        file.write(json.dumps([optimizer, step, loss]) + "\n")


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Texts of which every one has another number of labels."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (16,), generator=chance)
        labels = ids.clone()
        labels[: index % 11] = -100
        return {"input_ids": ids, "labels": labels}


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def make_callback() -> Any:
    from transformers import TrainerCallback

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                note(state.global_step - 1, logs["loss"])

    return Note()


SETTINGS: dict[str, Any] = {
    "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "max_steps": 8, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
    "disable_tqdm": True,
}  # fmt: skip


def run_trainer(**more: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**SETTINGS)
    made = Trainer(
        model=make_llama(), args=arguments, train_dataset=Texts(), callbacks=[make_callback()],
        **more,
    )  # fmt: skip
    made.train()


def run_trainer_with_a_loss_of_its_own() -> None:
    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    run_trainer(compute_loss_func=compute)


def run_sft() -> None:
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = [f"w{number}" for number in range(VOCABULARY - 3)] + ["<unk>", "<pad>", "<eos>"]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(words[(i * j) % 100] for j in range(5 + i % 20)) for i in range(64)]
    trainer = SFTTrainer(
        model=make_llama(),
        args=SFTConfig(**SETTINGS, bf16=False),
        train_dataset=Table.from_list([{"text": text} for text in texts]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
        ),
        callbacks=[make_callback()],
    )
    trainer.train()


def make_loader(num_samples: int) -> Any:
    data = TensorDataset(torch.randn(num_samples, 16), torch.randn(num_samples, 1))
    return DataLoader(data, batch_size=4)


class Mean:
    """The losses of a step's microbatches."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.step = 0

    def end_step(self) -> None:
        note(self.step, sum(self.losses) / len(self.losses))
        self.losses.clear()
        self.step += 1


def run_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(92))
    mean = Mean()
    for inputs, targets in loader:  # the last step has three microbatches, not four
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            mean.losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean.end_step()


def run_lightning() -> None:
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.mean = nn.Linear(16, 1), Mean()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self.line(batch[0]) - batch[1]).square().mean()
            self.mean.losses.append(loss.item())
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.mean.end_step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", enable_checkpointing=False,
        **quiet,
    )  # fmt: skip
    trainer.fit(Regression(), make_loader(44))


def run_scaler() -> None:
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mean = Mean()
    for index, (inputs, targets) in enumerate(make_loader(40)):  # one microbatch is left over
        loss = (model(inputs) - targets).square().mean()
        mean.losses.append(loss.item())
        scaler.scale(loss / 3).backward()
        if index % 3 == 2:
            scaler.step(optimizer)
            scaler.update()
            mean.end_step()


def run_gan() -> None:
    maker, judge = nn.Linear(8, 16), nn.Linear(16, 1)
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-4)
    measure = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(4, 1), torch.zeros(4, 1)
    for step, (inputs, _) in enumerate(make_loader(200)):
        made = maker(torch.randn(4, 8))
        losses = (measure(judge(inputs), real), measure(judge(made.detach()), fake))
        for loss in losses:
            loss.backward()
        judges.step()
        note(step, sum(loss.item() for loss in losses) / 2)
        loss = measure(judge(made), real)
        loss.backward()
        makes.step()
        note(step, loss.item(), optimizer=2)


KINDS: dict[str, Callable[[], None]] = {
    "trainer": run_trainer,
    "trainer-own-loss": run_trainer_with_a_loss_of_its_own,
    "sft": run_sft,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
    "scaler": run_scaler,
    "gan": run_gan,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    KINDS[sys.argv[1]]()

"""A trainer as libraries have them: arguments, callbacks, a history, evaluation by steps."""

from dataclasses import dataclass, field

import torch
from hand import hand
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class Arguments:
    max_steps: int = 24
    gradient_accumulation_steps: int = 2
    logging_steps: int = 8
    eval_steps: int = 12
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0


@dataclass
class State:
    global_step: int = 0
    log_history: list = field(default_factory=list)


class Callback:
    def on_step_end(self, state: State) -> None: ...


class Stopper(Callback):
    def on_step_end(self, state: State) -> None:
        assert state.global_step <= 1000


class Trainer:
    def __init__(self, model, args, train, evaluation, callbacks):
        self.model, self.args, self.train_dataset, self.eval_dataset = (
            model,
            args,
            train,
            evaluation,
        )
        self.callbacks, self.state = callbacks, State()

    def create_optimizer(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)

    def compute_loss(self, batch):
        with hand("forward"):
            out = self.model(**batch)
        return out["loss"]

    def training_step(self, batch):
        self.model.train()
        loss = self.compute_loss(batch) / self.args.gradient_accumulation_steps
        with hand("backward"):
            loss.backward()
        return loss.detach()

    def evaluate(self):
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for batch in DataLoader(self.eval_dataset, 16):
                with hand("eval"):
                    total += self.model(**batch)["loss"].item()
        self.state.log_history.append({"eval_loss": total})
        print(f"eval_loss {total:.4f}")

    def train(self):
        self.create_optimizer()
        loader = DataLoader(self.train_dataset, 16, shuffle=True)
        epoch_iterator = iter(loader)
        hand.around_fetches(self.model)
        while self.state.global_step < self.args.max_steps:
            total = 0.0
            for _ in range(self.args.gradient_accumulation_steps):
                try:
                    batch = next(epoch_iterator)
                except StopIteration:
                    epoch_iterator = iter(loader)
                    batch = next(epoch_iterator)
                total += self.training_step(batch).item()
            with hand("clip"):
                nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            with hand("optimizer"):
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1
            hand.step(loss=total, samples=32, tokens=32 * 48)
            for callback in self.callbacks:
                callback.on_step_end(self.state)
            if self.state.global_step % self.args.logging_steps == 0:
                print(f"{self.state.global_step} loss {total:.5f}")
            if self.state.global_step % self.args.eval_steps == 0:
                self.evaluate()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 128)
        self.body = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.head = nn.Linear(128, 100)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.body(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size):
        self.ids = torch.randint(0, 100, (size, 48))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


if __name__ == "__main__":
    torch.manual_seed(1)
    Trainer(Model(), Arguments(), Tokens(400), Tokens(48), [Stopper()]).train()
    hand.write()

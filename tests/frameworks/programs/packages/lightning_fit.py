"""Lightning's Trainer with validation and a checkpoint; `--devices 2` with DDP."""

import argparse
import tempfile
import warnings
from contextlib import nullcontext

import lightning as L
import torch
from hand import hand
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()

    def timed(self, phase: str):
        """Under DDP its forward is the whole step, and is timed there."""
        return hand(phase) if self.trainer.world_size == 1 else nullcontext()

    def training_step(self, batch, batch_index):
        (tokens,) = batch
        with self.timed("forward"):
            logits = self.model(tokens)
        loss = compute_loss(logits, tokens)
        self.log("train_loss", loss)
        self.last = loss.item(), tokens
        return loss

    def validation_step(self, batch, batch_index):
        (tokens,) = batch
        with self.timed("eval"):
            logits = self.model(tokens)
        self.log("val_loss", compute_loss(logits, tokens), sync_dist=True)

    def on_train_batch_end(self, *args) -> None:
        loss, tokens = self.last
        hand.step(loss=loss, samples=len(tokens), tokens=tokens.numel())

    def backward(self, loss, *args, **kwargs) -> None:
        with hand("backward"):
            loss.backward(*args, **kwargs)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def optimizer_step(self, epoch, batch_index, optimizer, closure) -> None:
        with hand("optimizer"):
            optimizer.step(closure=closure)


class TimedDDP(DistributedDataParallel):
    def forward(self, *args, **kwargs):
        with hand("forward" if torch.is_grad_enabled() else "eval"):
            return super().forward(*args, **kwargs)


class TimedStrategy(DDPStrategy):
    def _setup_model(self, model):
        return TimedDDP(module=model)


class TimedTrainer(L.Trainer):
    def save_checkpoint(self, *args, **kwargs) -> None:
        with hand("checkpoint"):
            super().save_checkpoint(*args, **kwargs)


def make_loader(num_samples: int) -> DataLoader:
    return DataLoader(TensorDataset(draw_tokens(num_samples)), batch_size=BATCH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    devices = parser.parse_args().devices
    warnings.simplefilter("ignore")  # on the number of workers, mostly
    L.seed_everything(1, verbose=False)
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            accelerator="cpu", devices=devices, strategy=TimedStrategy() if devices > 1 else "auto",
            max_epochs=2, enable_progress_bar=False, enable_model_summary=False, logger=False,
            default_root_dir=folder, callbacks=[ModelCheckpoint(dirpath=folder)],
            num_sanity_val_steps=0,
        )  # fmt: skip
        hand.around_fetches(module)
        trainer.fit(module, make_loader(BATCH * 14 * devices), make_loader(BATCH * 6 * devices))
        if trainer.is_global_zero:
            print(f"val_loss {trainer.callback_metrics['val_loss']:.5f}")
    hand.write(trainer.global_rank)


if __name__ == "__main__":
    main()

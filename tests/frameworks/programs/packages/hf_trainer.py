"""transformers' Trainer on a small Llama; alone or under torchrun.

`--accumulate 4` adds gradient accumulation, `--evaluate` evaluation and checkpoints.
"""

import argparse
import tempfile

import torch
from hand import hand
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

SEQUENCE = 64
BATCH = 4


class Texts(torch.utils.data.Dataset):
    def __init__(self, num_texts: int) -> None:
        self.texts = torch.randint(0, 256, (num_texts, SEQUENCE)).unbind()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(texts)
    return {"input_ids": ids, "labels": ids.clone()}


class TimedTrainer(Trainer):
    def compute_loss(self, model, *args, **kwargs):
        with hand("forward" if model.training else "eval"):
            return super().compute_loss(model, *args, **kwargs)

    def log(self, *args, **kwargs):
        with hand("logging"):
            super().log(*args, **kwargs)

    def _save_checkpoint(self, *args, **kwargs):
        with hand("checkpoint"):
            super()._save_checkpoint(*args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        hand.around(optimizer, "step", "optimizer")
        return optimizer


class Said(TrainerCallback):
    """Keeps what the Trainer says of each step."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            samples = BATCH * args.gradient_accumulation_steps
            hand.step(loss=float(logs["loss"]), samples=samples, tokens=samples * SEQUENCE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true")
    options = parser.parse_args()
    set_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=128,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=24, per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH, gradient_accumulation_steps=options.accumulate,
            logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, seed=1,
            eval_strategy="steps" if options.evaluate else "no", eval_steps=8,
            save_strategy="steps" if options.evaluate else "no", save_steps=12,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = TimedTrainer(
            model=model, args=arguments, train_dataset=Texts(1000), eval_dataset=Texts(32),
            data_collator=collate, callbacks=[Said()],
        )  # fmt: skip
        hand.around_fetches(model)
        hand.around(trainer.accelerator, "backward", "backward")
        hand.around(trainer.accelerator, "clip_grad_norm_", "clip")
        trainer.train()
    hand.write()


if __name__ == "__main__":
    main()

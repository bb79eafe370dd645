"""TRL's SFTTrainer on tokenized texts, with accumulation."""

import tempfile

import torch
from datasets import Dataset
from hand import hand
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

LENGTH, BATCH, ACCUMULATE = 64, 4, 2


class TimedTrainer(SFTTrainer):
    def log(self, *args, **kwargs):
        with hand("logging"):
            super().log(*args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        hand.around(optimizer, "step", "optimizer")
        return optimizer


class Said(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            samples = BATCH * ACCUMULATE
            hand.step(loss=float(logs["loss"]), samples=samples, tokens=samples * LENGTH)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(250)} | {"<unk>": 250, "<pad>": 251, "</s>": 252}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )


def main() -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=128,
        )
    )  # fmt: skip
    draws = torch.randint(0, 250, (200, LENGTH))
    data = Dataset.from_dict({"input_ids": draws.tolist()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=24, per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE, logging_steps=1, report_to=[],
            disable_tqdm=True, use_cpu=True, bf16=False, seed=1, save_strategy="no",
            max_length=LENGTH, dataloader_pin_memory=False, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = TimedTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer(),
            callbacks=[Said()],
        )  # fmt: skip
        hand.around_fetches(model)
        hand.around(trainer.model, "forward", "forward")  # as the trainer has made it by now
        hand.around(trainer.accelerator, "backward", "backward")
        hand.around(trainer.accelerator, "clip_grad_norm_", "clip")
        trainer.train()
    hand.write()


if __name__ == "__main__":
    main()

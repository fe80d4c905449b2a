# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model with FlashTrainer; rank 0 dies in the save of step 4 of the first life.

The second life is killed as a whole while a step is written; the third comes to the end. Then the
same with the plain Trainer from what lies on storage, for comparison.
"""

import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from holdfast.torch.adapters.transformers import FlashTrainer
from tests.integration.adapters.scripts import training

FOLDER = sys.argv[1]


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 50, (8,), generator=numbers)
        return {"input_ids": tokens, "labels": tokens}


class DieInASave(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if training.LIFE == 0 and training.RANK == 0 and state.global_step == 4:
            training.hold(FOLDER)
            training.die_in_the_next_save()


class Settle(TrainerCallback):
    """Has step 38 on storage before step 40 is saved, which would take its place in the queue."""

    def __init__(self, trainer: FlashTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 39:
            self.trainer.flash_wait(60)


class Began(TrainerCallback):
    """Notes at which step a training begins."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        training.note(FOLDER, f"began.{self.name}", str(state.global_step))


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def arguments(directory: str, save_steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=os.path.join(FOLDER, directory),
        per_device_train_batch_size=2,
        max_steps=40,
        learning_rate=0.01,
        save_steps=save_steps,
        save_total_limit=2,
        logging_steps=100,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )


def state_of(trainer: Trainer) -> str:
    rng = torch.get_rng_state()
    return training.digest([trainer.model.state_dict(), trainer.optimizer.state_dict(), rng])


def main() -> None:
    if training.LIFE == 0:
        undisturbed = Trainer(model(), arguments("undisturbed", 100), train_dataset=Numbers())
        undisturbed.train()
        training.note(FOLDER, "undisturbed", state_of(undisturbed))
    trainer = FlashTrainer(
        model(),
        arguments("flash", 2),
        train_dataset=Numbers(),
        callbacks=[Began(f"life{training.LIFE}"), DieInASave()],
    )
    trainer.add_callback(Settle(trainer))
    trainer.train(resume_from_checkpoint=True)
    training.note(FOLDER, "reached", state_of(trainer))
    training.note(FOLDER, "committed", str(trainer.flash_wait(60)))
    trainer.flash_close()
    torch.distributed.barrier()
    plain = Trainer(
        model(), arguments("flash", 100), train_dataset=Numbers(), callbacks=[Began("plain")]
    )
    plain.train(resume_from_checkpoint=os.path.join(FOLDER, "flash", "checkpoint-38"))
    training.note(FOLDER, "plain", state_of(plain))


if __name__ == "__main__":
    main()
    training.leave()

# SPDX-License-Identifier: Apache-2.0
"""Trains a small character-level transformer with DDP over gloo on the CPU.

An ordinary script: `torchrun --nproc-per-node 2 train.py` and `holdfast run --nproc-per-node 2
train.py` both run it as it is. `holdfast demo` does the latter, and kills what it can meanwhile.

It shows what makes a job safe to kill at any moment. Every step leaves a checkpoint in memory, and
some go to storage: a restarted worker does at most one step again. The batch of a step depends on
nothing but the step and the seed, so a resumed run repeats what was lost, sample by sample. The
global batch is split over the ranks by sequence, so a smaller or larger world computes the same
gradient, and the loss curve goes on where it stopped.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from holdfast.client import report_step
from holdfast.runtime.settings import worker_settings
from holdfast.torch import STORAGE, Checkpointer, EverySteps, KeepLast

SEED = 7
CONTEXT = 64
WIDTH = 96
HEADS = 4
LAYERS = 2
GLOBAL_BATCH = 48
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
TEXT_SENTENCES = 2500

OPENINGS = (
    "At dawn",
    "In the harbour",
    "Before the storm",
    "After a long night",
    "By the old pier",
)
SUBJECTS = (
    "the keeper",
    "a young sailor",
    "the captain",
    "her brother",
    "the grey heron",
    "an anchor",
)
VERBS = ("watched", "carried", "mended", "followed", "remembered", "left behind", "held fast to")
OBJECTS = (
    "the torn sail",
    "a coil of rope",
    "the last lantern",
    "the drifting boat",
    "a silver bell",
)
ENDINGS = (
    "and said nothing",
    "while the tide rose",
    "until the wind turned",
    "as the lights went out",
)


def make_text() -> str:
    """The same sentences from a small grammar on every rank and in every run: no file to ship."""
    pick = random.Random(SEED).choice
    sentences = []
    for _ in range(TEXT_SENTENCES):
        words = [pick(OPENINGS) + ",", pick(SUBJECTS), pick(VERBS), pick(OBJECTS), pick(ENDINGS)]
        sentences.append(" ".join(words) + ".\n")
    return "".join(sentences)


class CharTransformer(nn.Module):
    """Reads CONTEXT characters and predicts, at each place, the one that follows."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.characters(text) + self.places.weight
        predicted: Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return predicted


def batch_of(step: int, data: Tensor, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the global batch of `step`, which is the same in every world and run."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(len(data) - CONTEXT - 1, (GLOBAL_BATCH,), generator=generator)
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts[rank::world]])
    return windows[:, :-1], windows[:, 1:]


class Metrics:
    """One JSON line per step, appended in one write, so that lines of killed runs stay whole."""

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        launched = worker_settings()
        self._fixed = {
            "rank": rank,
            "world": world,
            "round": launched.round if launched is not None else 0,
            "pid": os.getpid(),
        }

    def add(self, step: int, loss: float) -> None:
        line = {"t": time.monotonic(), **self._fixed, "step": step, "loss": round(loss, 5)}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Trainer:
    """The model, its optimizer and the step they have reached."""

    def __init__(self, vocabulary: int, folder: Path, storage_every: int) -> None:
        torch.manual_seed(SEED)
        self._model = DistributedDataParallel(CharTransformer(vocabulary))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=LEARNING_RATE)
        self._checkpointer = Checkpointer(
            folder, storage=EverySteps(storage_every), keep=KeepLast(2)
        )
        self.step = self._checkpointer.load(model=self._model, optimizer=self._optimizer) or 0

    def train(self, data: Tensor, rank: int, world: int) -> Tensor:
        """Do the next step; returns this rank's part of the loss."""
        self.step += 1
        inputs, targets = batch_of(self.step, data, rank, world)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, self.step / WARMUP_STEPS)
        total = functional.cross_entropy(
            self._model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"
        )
        # DDP averages over ranks, whose parts may differ in size: this makes it the batch's mean.
        loss = total * world / (GLOBAL_BATCH * CONTEXT)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach() / world

    def save(self, *, last: bool) -> None:
        """Keep this step in memory; on storage too when it is due, and the last step always."""
        self._checkpointer.save(
            self.step, self._model, self._optimizer, to=STORAGE if last else None
        )

    def close(self) -> None:
        """Return when every save to storage has arrived."""
        self._checkpointer.wait()
        self._checkpointer.close()


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    text = make_text()
    alphabet = sorted(set(text))
    codes = {character: code for code, character in enumerate(alphabet)}
    data = torch.tensor([codes[character] for character in text])

    trainer = Trainer(len(alphabet), options.dir / "checkpoints", options.save_every)
    metrics = Metrics(options.metrics, rank, world)
    is_over = trainer.step >= options.steps and options.until is None
    while not is_over:
        part = trainer.train(data, rank, world)
        # One message for both: the loss, and how many ranks would stop here: all or none do.
        sums = torch.tensor([part.item(), float(_may_stop(options))])
        dist.all_reduce(sums)
        loss, stoppers = sums.tolist()
        is_over = trainer.step >= options.steps and round(stoppers) == world
        metrics.add(trainer.step, loss)
        trainer.save(last=is_over)
        report_step(trainer.step)
        if rank == 0 and (is_over or trainer.step % options.save_every == 0):
            print(f"step {trainer.step}: loss {loss:.3f}, world {world}", flush=True)
    trainer.close()
    # No rank leaves before all are here, and gloo's threads come to rest.
    dist.barrier()


def _may_stop(options: argparse.Namespace) -> bool:
    return options.until is None or options.until.exists()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level transformer.")
    parser.add_argument("--steps", type=int, default=200, help="stop after this step (200)")
    parser.add_argument("--until", type=Path, metavar="FILE", help="go on until FILE exists")
    parser.add_argument("--dir", type=Path, default=Path("char_run"), help="checkpoints go here")
    parser.add_argument("--metrics", type=Path, help="JSON lines (default: DIR/metrics.jsonl)")
    parser.add_argument(
        "--save-every", type=int, default=5, help="steps per checkpoint on storage (5)"
    )
    options = parser.parse_args()
    options.metrics = options.metrics or options.dir / "metrics.jsonl"
    return options


def main() -> None:
    options = parse()
    options.dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny GPT with DDP and a flash checkpoint at every step; writes every loss down exactly.

The random numbers of each rank are part of the state, and dropout uses them: a run that resumed
with anything but the exact state of the step before would show it in the next loss. A digest of all
of it is written down before every save and after every load.
"""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from steplog import FOLDER, RANK, ROUND, WORLD, hold, is_to_finish, leave, note
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from holdfast.client import report_step
from holdfast.torch import STORAGE, Checkpointer, EverySteps

WIDTH, VOCABULARY, LENGTH = 32, 50, 16


class TinyGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(text)))


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of everything that this rank's next step depends on."""
    digest = hashlib.sha256(torch.get_rng_state().numpy())
    tensors = [*model.state_dict().values()]
    for moments in optimizer.state_dict()["state"].values():
        tensors += moments.values()
    for tensor in tensors:
        digest.update(tensor.numpy())
    return digest.hexdigest()


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    # Otherwise DDP orders its gradients anew after a process's first step, and with that the sums.
    model = DistributedDataParallel(TinyGpt(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + RANK)
    last = int(os.environ["STEPS"])
    checkpointer = Checkpointer(
        Path(os.environ.get("SAVES", FOLDER / "saves")),
        storage=EverySteps(int(os.environ.get("STORAGE_EVERY", "10"))),
        replicas=int(os.environ.get("REPLICAS", "0")),
        parity=int(os.environ.get("PARITY", "0")),
        overlap=os.environ.get("OVERLAP", "") == "1",
    )
    step = checkpointer.load(model=model, optimizer=optimizer)
    if step is not None:
        torch.set_rng_state(checkpointer.extra["rng"])
    note("loaded", -1 if step is None else step, digest_of(model, optimizer))
    step = step or 0
    while step < last:
        step += 1
        text = torch.randint(VOCABULARY, (2, LENGTH + 1))
        predicted = model(text[:, :-1])
        loss = functional.cross_entropy(predicted.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Gathered, not reduced: the order of a sum over ranks is up to gloo.
        said = [torch.zeros(2) for _ in range(WORLD)]
        dist.all_gather(said, torch.stack([loss.detach(), torch.tensor(float(is_to_finish()))]))
        if any(one[1] for one in said):
            last = step
        # Before the save: what is saved is not done again, and must be in the curve.
        if RANK == 0:
            line = f"{step} {ROUND} {WORLD} {sum(one[0].item() for one in said).hex()}\n"
            with (FOLDER / "losses").open("a") as file:
                file.write(line)
        note("saves", step, digest_of(model, optimizer))
        checkpointer.save(
            step,
            model=model,
            optimizer=optimizer,
            extra={"rng": torch.get_rng_state()},
            to=STORAGE if step == last else None,
        )
        report_step(step)
        note("step", step)
        hold(step)
    assert checkpointer.wait(120.0) == last
    checkpointer.close()
    dist.destroy_process_group()
    note("end", step)


main()
leave()

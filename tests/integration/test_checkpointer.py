# SPDX-License-Identifier: Apache-2.0
"""The Checkpointer of a plain program, with the saver process that it starts for itself."""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from holdfast.model.errors import UsageError
from holdfast.torch import (
    MEMORY,
    STORAGE,
    Checkpointer,
    EverySteps,
    KeepEvery,
    KeepLast,
)
from tests.waiting import until

WAIT_S = 120.0


class Tied(nn.Module):
    """Tied weights, a buffer, a transposed parameter, and a state that is no tensor."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(3, width).t())
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.last(self.norm(self.first(x))) @ self.turned
        return out

    def get_extra_state(self) -> object:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Training:
    """A model, its optimizer and a schedule."""

    def __init__(self, seed: int, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = Tied(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.width = width

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self.width)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> list[bytes]:
        """Everything that a step depends on, to the bit."""
        moments = [
            state[name].clone()
            for state in self.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq", "step")
        ]
        tensors = [*self.model.parameters(), *self.model.buffers(), *moments]
        found = [tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]
        plain = [self.model.seen, self.schedule.state_dict(), self.optimizer.param_groups[0]["lr"]]
        return [*found, repr(plain).encode(), torch.get_rng_state().numpy().tobytes()]

    def save(self, checkpointer: Checkpointer, step: int, **how: Any) -> None:
        saved = checkpointer.save(
            step, self.model, self.optimizer, extra={"schedule": self.schedule, "n": step}, **how
        )
        assert saved.taken, saved.why

    def load(self, checkpointer: Checkpointer, **how: Any) -> int | None:
        return checkpointer.load(
            self.model, self.optimizer, extra={"schedule": self.schedule}, **how
        )


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "saves") as made:
        yield made


@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(
    checkpointer: Checkpointer, overlap: bool
) -> None:
    training = Training(1)
    assert training.load(checkpointer) is None
    for step in range(4):
        training.step()
        training.save(checkpointer, step, overlap=overlap)
    saved = training.state()
    training.step()
    expected = training.state()
    assert expected != saved

    other = Training(2)
    assert other.load(checkpointer) == 3
    assert checkpointer.extra["n"] == 3
    assert other.state() == saved
    assert other.model.first.weight is other.model.last.weight
    other.step()
    assert other.state() == expected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_save_leaves_the_garbage_collector_as_it_was(
    checkpointer: Checkpointer, is_enabled: bool
) -> None:
    """It does without it meanwhile; many trainings do without it all the time."""
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        Training(1).save(checkpointer, 0)
        with pytest.raises(UsageError):
            checkpointer.save(1, extra=print)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_load_changes_live_tensors_in_place_and_nothing_aliases_the_slot(
    checkpointer: Checkpointer,
) -> None:
    """The prior art handed out views of the buffer: the next save overwrote what was loaded."""
    training = Training(1)
    training.step()
    training.save(checkpointer, 1)
    address = training.model.first.weight.data_ptr()
    moment = training.optimizer.state[training.model.first.weight]["exp_avg"].data_ptr()
    assert training.load(checkpointer) == 1
    assert training.model.first.weight.data_ptr() == address
    assert training.optimizer.state[training.model.first.weight]["exp_avg"].data_ptr() == moment
    loaded = Training(2)
    assert loaded.load(checkpointer) == 1
    before = loaded.state()
    for step in range(2, 6):
        training.step()
        training.save(checkpointer, step)
    torch.set_rng_state(torch.frombuffer(bytearray(before[-1]), dtype=torch.uint8))
    assert loaded.state() == before


@pytest.mark.parametrize("step", [0, 2**24 + 1, 2**63 - 1])
def test_any_step_is_a_step(checkpointer: Checkpointer, step: int) -> None:
    """The prior art took step 0 for no checkpoint and compared steps as float32."""
    tensor = torch.full((3,), 7.0)
    assert checkpointer.save(step, {"w": tensor}).taken
    target = {"w": torch.zeros(3)}
    assert checkpointer.load(target) == step
    assert target["w"].tolist() == [7, 7, 7]


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.0])
def test_what_is_no_step_is_refused(checkpointer: Checkpointer, step: Any) -> None:
    with pytest.raises(UsageError, match="a step is an integer"):
        checkpointer.save(step, {"w": torch.ones(1)})


def test_one_step_saved_twice_is_the_second(checkpointer: Checkpointer) -> None:
    for value in (1.0, 2.0, 3.0):
        assert checkpointer.save(5, {"w": torch.tensor(value)}).taken
    target: dict[str, Any] = {}
    assert checkpointer.load(target) == 5
    assert target["w"].item() == 3.0


def test_a_lower_step_that_is_saved_later_is_the_newest(checkpointer: Checkpointer) -> None:
    checkpointer.save(9, {"w": torch.tensor(9)}, to=STORAGE)
    checkpointer.save(4, {"w": torch.tensor(4)}, to=STORAGE)
    assert checkpointer.wait(WAIT_S) == 4
    target: dict[str, Any] = {}
    assert checkpointer.load(target) == 4
    assert target["w"].item() == 4


def test_a_changed_layout_is_saved_and_loaded(checkpointer: Checkpointer) -> None:
    """The prior art froze the layout of the first save: other keys raised, other shapes overran."""
    for step, size in enumerate([10, 1_000_000, 3, 0]):
        state = {f"layer {i}": torch.full((size,), float(step)) for i in range(step + 1)}
        assert checkpointer.save(step, state).taken
        target: dict[str, Any] = {}
        assert checkpointer.load(target) == step
        assert {name: tensor.tolist() for name, tensor in target.items()} == {
            name: tensor.tolist() for name, tensor in state.items()
        }


def test_what_does_not_fit_is_named_and_nothing_is_changed(checkpointer: Checkpointer) -> None:
    training = Training(1)
    training.step()
    training.save(checkpointer, 1)
    wider = Training(2, width=16)
    before = wider.state()
    with pytest.raises(UsageError, match=r"model\['first.weight'\].*\[8, 8\].*\[16, 16\]"):
        wider.load(checkpointer)
    assert wider.state() == before
    other = nn.ModuleDict({"other": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"model\['other.bias'\]: missing in the checkpoint"):
        checkpointer.load(other)
    with pytest.raises(UsageError, match=r"model\['first.weight'\]: only in the checkpoint"):
        checkpointer.load(other)
    fewer = torch.optim.AdamW([training.model.turned])
    with pytest.raises(UsageError, match="groups of"):
        checkpointer.load(optimizer=fewer)


def test_an_object_that_cannot_be_saved_is_named_by_its_place(checkpointer: Checkpointer) -> None:
    with pytest.raises(UsageError, match=r"extra\['hooks'\]\[0\]: the function"):
        checkpointer.save(1, extra={"hooks": [test_any_step_is_a_step]})
    checkpointer.save(1, extra={"hooks": [test_any_step_is_a_step]}, allow_pickle=True)
    with pytest.raises(UsageError, match="was saved with allow_pickle=True"):
        checkpointer.load()
    checkpointer.load(allow_pickle=True)
    assert checkpointer.extra == {"hooks": [test_any_step_is_a_step]}


def test_several_models_and_optimizers(checkpointer: Checkpointer) -> None:
    one, two = Training(1), Training(2)
    for training in (one, two):
        training.step()
    models, optimizers = [one.model, two.model], {"a": one.optimizer, "b": two.optimizer}
    assert checkpointer.save(1, models, optimizers).taken
    saved = [one.state()[:-1], two.state()[:-1]]
    one.step()
    two.step()
    for training in (one, two):
        training.schedule.load_state_dict({"last_epoch": 1, "_step_count": 2})
    assert checkpointer.load(models, optimizers) == 1
    assert [len(one.state()[:-2]), len(two.state()[:-2])] == [len(s) - 1 for s in saved]
    assert [one.state()[:-2], two.state()[:-2]] == [saved[0][:-1], saved[1][:-1]]


def test_optimizer_state_of_another_dtype_comes_back_as_it_was(checkpointer: Checkpointer) -> None:
    """torch's own load_state_dict casts it to the dtype of the parameter."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    exact = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    optimizer.state[weight]["master"] = exact.clone()
    checkpointer.save(1, optimizer=optimizer)
    fresh = torch.optim.SGD([weight], lr=0.5)
    checkpointer.load(optimizer=fresh)
    assert torch.equal(fresh.state[weight]["master"], exact)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_storage_has_files_that_others_read(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    training = Training(1)
    with Checkpointer(folder, storage=EverySteps(2)) as checkpointer:
        for step in range(1, 5):
            training.step()
            training.save(checkpointer, step)
        assert checkpointer.wait(WAIT_S) == 4
        found = safetensors.torch.load_file(folder / "step-0000000004" / "shared.safetensors")
        weight = training.model.first.weight
        assert torch.equal(found["model.first.weight"], weight)
        index = next(i for i, p in enumerate(training.model.parameters()) if p is weight)
        assert torch.equal(
            found[f"optimizer.state.{index}.exp_avg"], training.optimizer.state[weight]["exp_avg"]
        )
        assert (folder / "latest").read_text().strip() == "step-0000000004"
        saved = training.state()
    with Checkpointer(folder) as checkpointer:
        again = Training(3)
        assert again.load(checkpointer, step=2) == 2
        assert again.load(checkpointer) == 4
        assert again.state() == saved


def test_old_checkpoints_go_by_the_rule(tmp_path: Path) -> None:
    kept: dict[str, list[int]] = {}
    rules: dict[str, Any] = {
        "last": KeepLast(2),
        "every": KeepEvery(4, last=1),
        "own": lambda steps: [step for step in steps if step % 3],
    }
    for name, keep in rules.items():
        with Checkpointer(tmp_path / name, keep=keep, breakpoint=False) as checkpointer:
            for step in range(1, 8):
                checkpointer.save(step, {"w": torch.ones(2)}, to=STORAGE)
                checkpointer.wait(WAIT_S)
        kept[name] = sorted(int(p.name[5:]) for p in (tmp_path / name).glob("step-*"))
    assert kept["last"] == [6, 7]
    assert kept["every"] == [4, 7]
    assert kept["own"] == [3, 6, 7]


def test_rules_decide_when_nobody_says_where(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=EverySteps(2), storage=EverySteps(4)) as checkpointer:
        saved = [checkpointer.save(step, {"w": torch.ones(1)}) for step in range(1, 5)]
        assert [one.to for one in saved] == [None, MEMORY, None, STORAGE]
        assert [one.taken for one in saved] == [False, True, False, True]
        assert checkpointer.save(5, {"w": torch.ones(1)}, to=STORAGE).taken
        assert checkpointer.wait(WAIT_S) == 5


def test_a_save_that_does_not_fit_in_memory_leaves_the_training_alone(
    checkpointer: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    assert checkpointer.save(1, {"w": torch.ones(3)}).taken
    huge = torch.empty(1).expand(2**45)
    with caplog.at_level(logging.WARNING):
        saved = checkpointer.save(2, {"w": huge})
    assert not saved.taken
    assert "shared" in saved.why
    assert "training goes on" in caplog.text
    target: dict[str, Any] = {}
    assert checkpointer.load(target) == 1


def test_files_of_another_format_are_kept_as_they_are(checkpointer: Checkpointer) -> None:
    made: list[int] = []

    def files() -> dict[str, object]:
        made.append(1)
        return {"state.pt": {"w": torch.arange(4)}, "note.txt": "hello", "raw/bin": b"\0\1"}

    assert checkpointer.load_files() is None
    assert checkpointer.save_files(3, files, shared={"config.json": "{}"}).taken
    found = checkpointer.load_files()
    assert found is not None
    with found:
        assert (found.step, found.substitute) == (3, False)
        assert sorted(found.names()) == ["config.json", "note.txt", "raw/bin", "state.pt"]
        assert bytes(found.file("note.txt")) == b"hello"
        assert bytes(found.file("raw/bin")) == b"\0\1"
    with pytest.raises(UsageError, match="a framework's own format"):
        checkpointer.load({"w": torch.ones(1)})
    assert made == [1]


def test_what_a_dead_attempt_left_on_storage_goes_with_the_next_commit(tmp_path: Path) -> None:
    left = tmp_path / ".holdfast" / "0000-1-1"
    left.mkdir(parents=True)
    two_days_ago = left.stat().st_mtime - 2 * 24 * 3600
    os.utime(left, (two_days_ago, two_days_ago))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(extra={})
        checkpointer.save(1, extra={"a": 1}, to=STORAGE)
        assert checkpointer.wait(WAIT_S) == 1
        until(lambda: not left.exists(), WAIT_S, what="the end of the leftovers")


SAVES_WITHOUT_SHARDS = """
import sys
import torch
import holdfast.torch

model = torch.nn.Linear(2, 2)
with holdfast.torch.Checkpointer(sys.argv[1], overlap=True) as checkpointer:
    assert checkpointer.load(model) is None
    assert checkpointer.save(1, model).taken
    assert checkpointer.load(model) == 1
    slow = {"torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"}
    assert not slow & sys.modules.keys(), slow & sys.modules.keys()
    optimizer = torch.optim.Adam(model.parameters())  # This imports the other two.
    assert checkpointer.save(2, model, optimizer).taken
    assert "torch.distributed.checkpoint" not in sys.modules
"""


def test_a_plain_training_does_not_wait_for_the_import_of_torchs_sharding(tmp_path: Path) -> None:
    """torch.distributed.checkpoint and DTensor cost every cold worker a second or more."""
    command = [sys.executable, "-c", SAVES_WITHOUT_SHARDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"replicas": 1, "replicate_every": 0}, "from 1 on, not 0"),
        ({"replicate_every": 10}, "nothing to do without replicas or parity"),
        ({"replicas": -1}, "not -1 and 0"),
        ({"parity": 1}, "at least 2, not 0 and 1"),
        ({"replicas": 1, "parity": 2}, "choose one of them"),
    ],
)
def test_copies_that_make_no_sense_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Checkpointer("/nowhere", **wrong)

# SPDX-License-Identifier: Apache-2.0
"""A directory with the checkpoints of DLRover: it is known, read without running anything, or said.

A training that moves here must not begin at 0 without a word.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.checkpoint.foreign import dlrover_step
from holdfast.checkpoint.storage import open_storage
from holdfast.cli import main
from holdfast.model.errors import UsageError
from holdfast.torch import STORAGE, Checkpointer
from holdfast.torch.adapters.megatron import MegatronCheckpointer
from holdfast.torch.dcp import DcpReader
from tests.integration.adapters.launching import needs


class Mine:
    """Says so when a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo owned > owned",)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def put(folder: Path, state: object, step: int = 100, rank: int = 0) -> None:
    """As DLRover's DdpCheckpointer leaves it by default."""
    (folder / str(step)).mkdir(exist_ok=True)
    torch.save(state, folder / str(step) / f"rank_{rank}.pt")
    (folder / "dlrover_latest.txt").write_text(str(step))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_what_dlrover_saved_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    old, old_optimizer = trained()
    saved = {prefix + name: value for name, value in old.state_dict().items()}
    state = {"model": saved, "optimizer": old_optimizer.state_dict(), "step": 100, "epoch": 3}
    put(tmp_path, state)
    model, optimizer = trained()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(model, optimizer, step=99) is None
        assert checkpointer.load(model, optimizer) == 100
        assert checkpointer.extra == {"step": 100, "epoch": 3}
        assert "step 100 of DLRover is loaded" in caplog.text
        assert all(torch.equal(one, model.state_dict()[n]) for n, one in old.state_dict().items())
        assert str(optimizer.state_dict()) == str(old_optimizer.state_dict())
        checkpointer.save(101, model, optimizer, to=STORAGE)
        assert checkpointer.wait(120.0) == 101
        assert checkpointer.load(model, optimizer) == 101
    assert (tmp_path / "100" / "rank_0.pt").exists()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {}, "mine": Mine()}, "can only be read by running"),
        ({"weights": {}}, "has no 'model' but 'weights'"),
        ([1], "is not a dict"),
        (None, "but no .*rank_0.pt"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: object, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, state)
    if state is None:
        (tmp_path / "100" / "rank_0.pt").unlink()
    model, optimizer = trained()
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match=said):
        checkpointer.load(model, optimizer)
    assert not (tmp_path / "owned").exists()


def test_a_step_that_is_not_the_newest_is_loaded_too(tmp_path: Path) -> None:
    states = {}
    for step in (50, 100):
        old, old_optimizer = trained()
        states[step] = old.state_dict()
        put(tmp_path, {"model": states[step], "optimizer": old_optimizer.state_dict()}, step)
    model, _ = trained()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(model, step=50) == 50
        assert all(torch.equal(one, model.state_dict()[n]) for n, one in states[50].items())
        assert checkpointer.load(model, step=51) is None
        (tmp_path / "50" / "rank_0.pt").unlink()
        with pytest.raises(UsageError, match=r"has step 50 of DLRover, but no .*rank_0.pt"):
            checkpointer.load(model, step=50)


def load_files(folder: Path) -> object:
    with Checkpointer(folder) as checkpointer:
        return checkpointer.load_files()


def load_dcp(folder: Path) -> object:
    with Checkpointer(folder) as checkpointer:
        return DcpReader(checkpointer).step


def load_megatron(folder: Path) -> object:
    checkpointer = MegatronCheckpointer(folder)
    try:
        return checkpointer.load({})
    finally:
        checkpointer.close()


def load_deepspeed(folder: Path) -> object:
    from holdfast.torch.adapters.deepspeed import DeepSpeedCheckpointer

    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    # It asks its engine for no more than this before it has found something to load.
    engine: Any = SimpleNamespace(seq_data_parallel_group=dist.group.WORLD)
    checkpointer = DeepSpeedCheckpointer(engine, folder)
    try:
        return checkpointer.load()
    finally:
        checkpointer.close()
        dist.destroy_process_group()


def train_transformers(folder: Path) -> object:
    from transformers import TrainingArguments

    from holdfast.torch.adapters.transformers import FlashTrainer

    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True)
    data: Any = torch.utils.data.TensorDataset(torch.ones(1, 3))
    trainer = FlashTrainer(torch.nn.Linear(3, 2), args, train_dataset=data)
    try:
        return trainer.train(resume_from_checkpoint=True)
    finally:
        trainer.flash_close()


@pytest.mark.parametrize(
    "load",
    [
        load_files,
        load_dcp,
        load_megatron,
        pytest.param(load_deepspeed, marks=needs("deepspeed")),
        pytest.param(train_transformers, marks=needs("transformers", "accelerate")),
    ],
)
def test_no_framework_begins_at_0_beside_them(
    tmp_path: Path, load: Callable[[Path], object]
) -> None:
    """They read what DLRover has saved with the same framework by the framework's own means."""
    put(tmp_path, {})
    with pytest.raises(UsageError, match=r"has step 100 of DLRover .* load it by what wrote it"):
        load(tmp_path)


def test_a_framework_s_step_is_one_of_dlrover_s_if_it_has_its_folder(tmp_path: Path) -> None:
    put(tmp_path, {})
    (tmp_path / "iter_0000050").mkdir()
    checkpointer = MegatronCheckpointer(tmp_path)
    try:
        with pytest.raises(UsageError, match="has step 50 of DLRover"):
            checkpointer.load({}, iteration=50)
        assert checkpointer.load({}, iteration=51) is None
        assert checkpointer.save(101, {"a.pt": {"a": 1}}, to=STORAGE).taken
        assert checkpointer.wait(120.0) == 101
        loaded = checkpointer.load({"a.pt": 0})
        assert loaded is not None
        assert loaded.files == {"a.pt": {"a": 1}}
    finally:
        checkpointer.close()


def test_an_empty_tracker_is_none(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert dlrover_step(storage) is None
    for text in ("", "\n", "latest", "-1", "1" * 40):
        (tmp_path / "dlrover_latest.txt").write_text(text)
        assert dlrover_step(storage) is None
    (tmp_path / "dlrover_latest.txt").write_text("7\n")
    assert dlrover_step(storage) == 7


def test_ls_says_whose_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, {})
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert "but DLRover's up to step 100" in capsys.readouterr().out

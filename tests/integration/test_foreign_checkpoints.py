# SPDX-License-Identifier: Apache-2.0
"""A directory with the checkpoints of DLRover: it is known, read without running anything, or said.

A training that moves here must not begin at 0 without a word.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.foreign import dlrover_step
from holdfast.checkpoint.storage import open_storage
from holdfast.cli import main
from holdfast.model.errors import UsageError
from holdfast.torch import STORAGE, Checkpointer


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

# SPDX-License-Identifier: Apache-2.0
"""Committed checkpoints as files of other formats, read by torch and safetensors alone."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.model.errors import StateError, UsageError
from holdfast.torch import STORAGE, Checkpointer
from holdfast.torch.checkpoint.export import export_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> torch.nn.Module:
    """A model that shares a tensor, committed as step 7 in tmp_path / "saves"."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "saves") as checkpointer:
        checkpointer.save(7, model, optimizer, extra={"epoch": 3}, to=STORAGE)
        assert checkpointer.wait(120.0) == 7
    return model


def export(folder: Path, file_format: str) -> Path:
    storage = open_storage(str(folder / "saves"))
    target = folder / "exported"
    export_checkpoint(storage, list_committed(storage)[0], target, file_format)
    assert sorted(path.name for path in folder.iterdir()) == ["exported", "saves"]
    return target


def test_safetensors_has_the_model(tmp_path: Path, saved: torch.nn.Module) -> None:
    found = safetensors.torch.load_file(export(tmp_path, "safetensors"))
    assert found.keys() == saved.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.state_dict().items())


def test_torch_load_has_everything(tmp_path: Path, saved: torch.nn.Module) -> None:
    found = torch.load(export(tmp_path, "torch"), weights_only=True)
    assert found["extra"] == {"epoch": 3}
    saved.load_state_dict(found["model"])
    torch.optim.Adam(saved.parameters()).load_state_dict(found["optimizer"])


def test_dcp_reads_its_format(tmp_path: Path, saved: torch.nn.Module) -> None:
    target: dict[str, Any] = {"model": {n: t.clone() for n, t in saved.state_dict().items()}}
    for tensor in target["model"].values():
        tensor.zero_()
    dcp_load(target, checkpoint_id=export(tmp_path, "dcp"), no_dist=True)
    assert all(torch.equal(target["model"][n], t) for n, t in saved.state_dict().items())


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, saved: torch.nn.Module) -> None:
    path = tmp_path / "saves" / "step-0000000007" / "shared.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="shared"):
        export(tmp_path, "torch")
    assert not (tmp_path / "exported").exists()


def test_files_of_a_framework_are_not_ours_to_convert(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "saves") as checkpointer:
        checkpointer.save_files(1, {"x.bin": b"x"}, to=STORAGE)
        assert checkpointer.wait(120.0) == 1
    with pytest.raises(UsageError, match="own format"):
        export(tmp_path, "torch")

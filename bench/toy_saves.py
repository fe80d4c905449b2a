# SPDX-License-Identifier: Apache-2.0
"""One way of the peers to save a checkpoint, measured in a process of its own; JSON to a file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_all

from toy_gpt import RawCopy, build, tensors_of

State = dict[str, Any]
Save = Callable[[State, Path], tuple[float, float]]
"""Saves, and answers how long the caller was blocked and how long it took until it was synced."""


def torch_save(state: State, target: Path) -> tuple[float, float]:
    began = time.perf_counter()
    with target.open("wb") as file:
        torch.save(state, file)
        blocked_s = time.perf_counter() - began
        file.flush()
        os.fsync(file.fileno())
    return blocked_s, time.perf_counter() - began


def dcp_save(state: State, target: Path) -> tuple[float, float]:
    began = time.perf_counter()
    dcp_save_all(state, checkpoint_id=target)
    took_s = time.perf_counter() - began
    return took_s, took_s


def dcp_async(kind: AsyncCheckpointerType) -> Save:
    """Background saves with staging into shared memory that is kept from save to save."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)

    def save(state: State, target: Path) -> tuple[float, float]:
        began = time.perf_counter()
        pending = async_save(
            state, checkpoint_id=target, async_checkpointer_type=kind, async_stager=stager
        )
        blocked_s = time.perf_counter() - began
        upload: Any = getattr(pending, "upload_completion", pending)
        upload.result()
        return blocked_s, time.perf_counter() - began

    return save


def prior_art(folder: Path) -> Save:
    """dlrover's flash checkpoint, to memory; only in an environment that has it."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    checkpointer = DdpCheckpointer(str(folder))
    step = 0

    def save(state: State, target: Path) -> tuple[float, float]:
        nonlocal step
        step += 1
        began = time.perf_counter()
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
        took_s = time.perf_counter() - began
        return took_s, took_s

    return save


def method(name: str, folder: Path) -> Save:
    if name == "torch.save":
        return torch_save
    if name == "dcp.save":
        return dcp_save
    if name == "dcp.async_save thread":
        return dcp_async(AsyncCheckpointerType.THREAD)
    if name == "dcp.async_save process":
        return dcp_async(AsyncCheckpointerType.PROCESS)
    return prior_art(folder)


def measure(options: argparse.Namespace) -> dict[str, object]:
    model, optimizer = build(options.size)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    raw = RawCopy(tensors_of(model, optimizer))
    save = method(options.method, options.dir)
    blocked, total, raw_s = [], [], []
    for run in range(options.runs + 1):
        raw_s.append(raw.save())
        target = options.dir / f"save-{run}"
        blocked_s, total_s = save(state, target)
        blocked.append(blocked_s)
        total.append(total_s)
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    return {"bytes": raw.bytes, "blocked": blocked, "total": total, "raw": raw_s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    parser.add_argument("--size", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{options.dir}/group", rank=0, world_size=1)
    options.report.write_text(json.dumps(measure(options)))
    os._exit(0)  # Savers of some peers keep the process alive.


if __name__ == "__main__":
    main()

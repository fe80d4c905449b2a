# SPDX-License-Identifier: Apache-2.0
"""`dcp.save` and `dcp.load` through memory checkpoints, for scripts that call them already.

    dcp.save(state, storage_writer=DcpWriter(checkpointer, step))
    reader = DcpReader(checkpointer)
    if reader.step is not None:
        dcp.load(state, storage_reader=reader)

The files on storage are the same as those of Checkpointer.save. torch plans every such save again,
with communication of all ranks; Checkpointer.save(model=..., optimizer=...) does so only when the
layout changes.
"""

import io
import math
import os
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.model.checkpoint import Shape, rank_part
from holdfast.model.errors import RejectedError, StateError, UsageError
from holdfast.runtime.settings import worker_place
from holdfast.torch.checkpoint import dcp_image
from holdfast.torch.checkpoint.agreed import MAP_FILE, AgreedLayout, ChunkMap, Exchange, decode_map
from holdfast.torch.checkpoint.checkpointer import Checkpointer
from holdfast.torch.checkpoint.files import LoadedFiles
from holdfast.torch.checkpoint.images import dtype_named, tensor_at
from holdfast.torch.checkpoint.session import Tier
from holdfast.torch.checkpoint.sharded_state import Leaves, chunk_of


class DcpWriter(StorageWriter):
    """Saves one step: to memory, and to storage when the checkpointer's rules or `to` say so."""

    def __init__(self, checkpointer: Checkpointer, step: int, to: Tier | None = None) -> None:
        self._checkpointer, self._step, self._to = checkpointer, step, to

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: the checkpointer knows the directory."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: every rank writes its own part."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. Collective, as dcp.save is."""
        leaves, saved = _taken_apart(plan, planner)
        place = worker_place()
        agreed = AgreedLayout(place.rank, leaves, saved, Exchange(place.world_size))
        result = self._checkpointer.save_parts(
            self._step,
            {rank_part(place.rank): agreed.images(leaves, saved)},
            Shape(place.world_size, shared=False),
            to=self._to,
            overlap=False,
        )
        if result.to is not None and not result.taken:
            raise RejectedError(result.why)
        done: Future[list[WriteResult]] = Future()
        # `.metadata` is part of rank 0's files: torch does not need the places of items.
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: the agents commit the step when every part of it is on storage."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _taken_apart(plan: SavePlan, planner: SavePlanner) -> tuple[Leaves, dict[str, bytes]]:
    chunks, tensors = [], []
    saved: dict[str, bytes] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            chunks.append(chunk_of(item))
            tensors.append(data.detach())
        else:
            saved[item.index.fqn] = data.getvalue()
    early = (True,) * len(chunks)
    paths = dict(plan.planner_data or {})
    return Leaves(tuple(chunks), tuple(tensors), early, dict(saved), paths), saved


class DcpReader(StorageReader):
    """Loads the newest complete step, or a given one, from the nearest place that has it."""

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        """Collective: all ranks agree on the step."""
        found = checkpointer.load_files(step, parts=[rank_part(0)])
        self.step = None if found is None else found.step
        """The step that will be loaded; None: there is none."""
        self._files: LoadedFiles | None = found
        self._map = ChunkMap(0, {}, {}) if found is None else _read_map(found)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: the checkpointer knows the directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """From the JSON indexes of Holdfast: nothing is unpickled."""
        known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: BytesStorageMetadata() for name in self._map.values
        }
        for name, tensor in self._map.tensors.items():
            known[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype_named(tensor.dtype)),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
        return Metadata(known)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: everything is known since the agreement."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs, then release the memory."""
        if self._files is None:
            raise UsageError("There is no checkpoint to load, or this reader has been used.")
        files, self._files = self._files, None
        with files:
            for request in plan.items:
                if request.type == LoadItemType.BYTE_IO:
                    self._read_value(files, request, planner)
                else:
                    self._read_tensor(files, request, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_value(self, files: LoadedFiles, request: ReadItem, planner: LoadPlanner) -> None:
        room = self._map.values[request.storage_index.fqn]
        data = _bytes(files, room.rank, room.offset, room.length)
        planner.load_bytes(request, io.BytesIO(bytes(data)))

    def _read_tensor(self, files: LoadedFiles, request: ReadItem, planner: LoadPlanner) -> None:
        tensor = self._map.tensors[request.storage_index.fqn]
        number = request.storage_index.index
        chunk = tensor.chunks[number or 0]
        dtype = dtype_named(tensor.dtype)
        data = _bytes(files, chunk.rank, chunk.data, math.prod(chunk.sizes) * dtype.itemsize)
        saved = narrow_tensor_by_index(
            tensor_at(data, 0, dtype, chunk.sizes), request.storage_offsets, request.lengths
        )
        target = planner.resolve_tensor(request).detach()
        target.copy_(saved)
        planner.commit_tensor(request, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _bytes(files: LoadedFiles, rank: int, offset: int, length: int) -> memoryview:
    content = files.open(rank_part(rank)).file(dcp_image.data_file(rank))
    if offset + length > len(content):
        raise StateError(
            f"The index points to byte {offset + length} of {dcp_image.data_file(rank)}, "
            f"which has {len(content)}."
        )
    return content[offset : offset + length]


def _read_map(files: LoadedFiles) -> ChunkMap:
    try:
        if MAP_FILE not in files.names():
            raise UsageError("This checkpoint was not saved from a sharded state.")
        return decode_map(files.file(MAP_FILE))
    except (StateError, UsageError):
        files.let_go()
        raise

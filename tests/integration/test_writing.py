# SPDX-License-Identifier: Apache-2.0
"""What a worker writes into the slots of a real vault, and the digest that stands beside it."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.copier import COPY_WITH_CRC, Copier, Pace
from holdfast.checkpoint.digests import CHUNK, Sidecar, digest_of, read_sidecar
from holdfast.checkpoint.slots import Slot
from holdfast.client.vault import VaultClient
from holdfast.model.checkpoint import rank_part
from holdfast.torch.checkpoint.images import Leaf, bytes_image, safetensors_image
from holdfast.torch.checkpoint.mappings import MappedSlots
from holdfast.torch.checkpoint.staging import HostStager
from holdfast.torch.checkpoint.writing import PartWriter
from tests.integration.vault_node import SHAPE, node
from tests.waiting import until

WAIT_S = 60.0
PART = rank_part(0)


def save(
    worker: VaultClient,
    directory: str,
    tensors: list[torch.Tensor],
    overlap: bool,
    make_writer: Callable[..., PartWriter] = PartWriter,
) -> Path:
    """Save step 0 as a Checkpointer does; where it is now."""
    stager = HostStager()
    slots, copier = MappedSlots(stager), Copier(threads=2)
    writer = make_writer(worker, directory, slots, stager, copier, WAIT_S)
    path = write(writer, copier, tensors, overlap)
    slots.close()
    copier.close()
    return path


def write(writer: PartWriter, copier: Copier, tensors: list[torch.Tensor], overlap: bool) -> Path:
    leaves = [Leaf(f"t{i}", tensor, early=i % 2 == 1) for i, tensor in enumerate(tensors)]
    image, _ = safetensors_image("model.safetensors", leaves)
    images = [bytes_image("note.txt", b"a file before"), image, bytes_image("last", b"and behind")]
    begun = writer.begin(0, {PART: images}, SHAPE, persist=False)
    if overlap:
        writer.copy_early(begun)
        staged, tasks = writer.stage(begun, begun.placed(early=False), Pace())
        copier.run(tasks, WAIT_S)
        staged.finish()
    else:
        writer.copy_all(begun)
    writer.seal(begun, 0.0)
    return begun.parts[0].slot.path


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])
@pytest.mark.parametrize("how", ["in a row", "strided", "without the extension"])
def test_a_slot_has_its_digest(tmp_path: Path, how: str, overlap: bool) -> None:
    """It comes with the copy; without the extension, and where torch must copy a tensor, the agent
    computes it afterwards."""
    weight = torch.randn(1500, 3001)
    assert weight.nbytes > CHUNK
    first = weight.t() if how == "strided" else weight
    tensors = [first, torch.randn(7), torch.randn(3), weight[:2]]
    without = partial(PartWriter, copy_with_crc=None)
    make_writer = without if how == "without the extension" else PartWriter
    comes_later = how != "in a row" or COPY_WITH_CRC is None

    async def run() -> None:
        directory = str(tmp_path / "saves")
        async with node(tmp_path, directory) as made:
            path = await asyncio.to_thread(
                save, made.workers[0], directory, tensors, overlap, make_writer
            )
            if comes_later:
                await asyncio.to_thread(until, lambda: read_sidecar(path), WAIT_S, "the digest")
            sidecar = read_sidecar(path)
            with Slot.open(path, writable=False) as slot:
                meta = slot.read()
                assert meta is not None
                data = bytes(slot.data[: meta.data_length])
            assert sidecar == Sidecar(meta.version, digest_of(data))

    asyncio.run(run())

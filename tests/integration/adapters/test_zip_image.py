# SPDX-License-Identifier: Apache-2.0
"""torch.load reads what zip_image lays out, whatever torch.save can write."""

import argparse
import collections
import io
import random
import zipfile
from typing import Any

import numpy
import pytest
import torch

from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint.images import Image, fill
from holdfast.torch.checkpoint.zip_image import memory_file, zip_image
from tests.images import gap


def written(image: Image) -> bytearray:
    """The file, over memory that held something else before."""
    data = bytearray(b"\xa5" * image.length)
    fill(image, memoryview(data))
    return data


def loaded(value: object, *, pickles: bool = False) -> Any:
    image = zip_image("a.pt", value)
    assert gap(image) is None
    return torch.load(memory_file(memoryview(written(image))), weights_only=not pickles)


def test_an_optimizer_comes_back_bit_for_bit() -> None:
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    back = loaded(optimizer.state_dict())
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
    for index, state in optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            assert torch.equal(back["state"][index][name], tensor)


def test_it_differs_from_torch_save_only_in_the_sums_of_records() -> None:
    """Byte for byte, except for the CRC-32 fields, which neither of us may rely on."""
    value = {"weights": torch.arange(1000.0), "step": 3, "empty": torch.empty(0)}
    buffer = io.BytesIO()
    torch.save(value, buffer)
    theirs, ours = buffer.getvalue(), bytes(written(zip_image("a.pt", value)))
    assert len(ours) == len(theirs)
    # Per storage record: its CRC in the data descriptor and in the central directory; and the
    # identity of the archive, which torch derives from the sums (with its own sum, twice).
    assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 2 * 2 * 4 + 40 + 2 * 4
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        names = archive.namelist()
    with zipfile.ZipFile(io.BytesIO(theirs)) as archive:
        assert names == archive.namelist()


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.uint16],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    back = loaded([tensor, tensor[0, 0], tensor.t()])
    assert [item.dtype for item in back] == [dtype] * 3
    assert torch.equal(back[0].view(torch.uint8), tensor.view(torch.uint8))
    assert back[2].stride() == tensor.t().stride()


def test_tensors_that_share_a_storage_share_it_again_and_it_is_stored_once() -> None:
    base = torch.randn(1000)
    image = zip_image("a.pt", {"whole": base, "tail": base[900:], "same": torch.nn.Parameter(base)})
    assert [hole.tensor.nbytes for hole in image.holes] == [base.nbytes]
    back = torch.load(memory_file(memoryview(written(image))), weights_only=True)
    back["whole"].fill_(7)
    assert torch.equal(back["tail"], torch.full((100,), 7.0))
    assert torch.equal(back["same"], back["whole"])


def test_what_frameworks_put_beside_tensors() -> None:
    value: dict[str, Any] = collections.OrderedDict(
        arguments=argparse.Namespace(lr=0.1, sizes=(1, 2)),
        rng=(
            random.getstate(),
            numpy.random.default_rng(3).integers(0, 9, 5),
            torch.get_rng_state(),
        ),
        sparse=torch.eye(3).to_sparse(),
    )
    back = loaded(value, pickles=True)
    assert back["arguments"] == value["arguments"]
    assert back["rng"][0] == value["rng"][0]
    assert numpy.array_equal(back["rng"][1], value["rng"][1])
    assert torch.equal(back["rng"][2], value["rng"][2])
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))


def test_tensors_made_while_pickling_live_as_long_as_the_image() -> None:
    class Made:
        def __reduce__(self) -> tuple[object, ...]:
            return collections.OrderedDict, ({"made": torch.full((2000,), 5.0)},)

    image = zip_image("a.pt", Made())
    others = [torch.randn(2000) for _ in range(50)]  # They would take over freed memory.
    back = torch.load(memory_file(memoryview(written(image))), weights_only=True)
    assert torch.equal(back["made"], torch.full((2000,), 5.0))
    assert len(others) == 50


def test_no_tensor_at_all() -> None:
    assert loaded({"tag": "global_step7"}) == {"tag": "global_step7"}


def test_bytes_of_tensors_are_not_touched_before_the_copy() -> None:
    """The image describes live tensors: what they hold at the time of the copy is what is saved."""
    tensor = torch.zeros(10)
    image = zip_image("a.pt", tensor)
    tensor.fill_(3)
    back = torch.load(memory_file(memoryview(written(image))), weights_only=True)
    assert torch.equal(back, torch.full((10,), 3.0))


def test_what_was_loaded_does_not_alias_the_memory() -> None:
    data = written(zip_image("a.pt", torch.ones(100)))
    back = torch.load(memory_file(memoryview(data)), weights_only=True)
    data[:] = bytes(len(data))
    assert torch.equal(back, torch.ones(100))


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match=r"a\.pt: torch\.save cannot write this object"):
        zip_image("a.pt", {"hook": lambda: None})


def test_torch_save_works_as_before_afterwards() -> None:
    """The prior art replaced torch.save for the whole process and left it so on errors."""
    before = torch.save
    with pytest.raises(UsageError):
        zip_image("a.pt", lambda: None)
    assert torch.save is before
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    buffer.seek(0)
    with zipfile.ZipFile(buffer) as archive:
        assert archive.testzip() is None

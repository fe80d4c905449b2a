# SPDX-License-Identifier: Apache-2.0
"""Images are the files that others read: safetensors, byte for byte, whatever the tensors."""

import mmap
from pathlib import Path

import pytest
import safetensors.torch
import torch

from holdfast.torch.checkpoint.images import (
    PAGE,
    Hole,
    Image,
    Leaf,
    bytes_image,
    fill,
    safetensors_image,
    tensor_at,
)
from tests.images import gap


def written(image: Image) -> bytearray:
    assert gap(image) is None
    target = bytearray(b"\xee" * image.length)
    fill(image, memoryview(target))
    return target


def test_safetensors_reads_the_file_without_us(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 5),
        "half": torch.randn(7).half(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 6).t(),
        "eight bits": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        'quote " and ü': torch.arange(4).to(torch.uint64),
        "every other": torch.arange(10)[::2],
    }
    image, entries = safetensors_image("x", [Leaf(n, t) for n, t in tensors.items()])
    (tmp_path / "x").write_bytes(written(image))
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].tolist() == tensor.tolist()
    assert [entry.name for entry in entries] == list(tensors)


def test_a_dtype_that_safetensors_lacks_is_there_as_bytes(tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex128)
    image, (entry,) = safetensors_image("x", [Leaf("c", tensor)])
    data = written(image)
    (tmp_path / "x").write_bytes(data)
    assert safetensors.torch.load_file(tmp_path / "x")["c"].dtype == torch.uint8
    assert entry.dtype == "complex128"
    view = tensor_at(memoryview(data), entry.offset, torch.complex128, entry.shape)
    assert torch.equal(view, tensor)


def test_data_begins_on_a_page_and_every_tensor_is_aligned() -> None:
    leaves = [
        Leaf(f"t{i}", torch.zeros(3, dtype=dtype))
        for i, dtype in enumerate(
            [torch.bool, torch.float64, torch.int16, torch.float32, torch.complex128]
        )
    ]
    image, entries = safetensors_image("x", leaves)
    assert min(entry.offset for entry in entries) % PAGE == 0
    for entry, leaf in zip(entries, leaves, strict=True):
        assert entry.offset % leaf.tensor.dtype.itemsize == 0
    assert gap(image) is None


def test_a_changed_shape_or_name_gives_another_layout() -> None:
    """The prior art kept the layout of the first save for ever: changed shapes overran it."""
    first, _ = safetensors_image("x", [Leaf("a", torch.zeros(10))])
    grown, (entry,) = safetensors_image("x", [Leaf("a", torch.ones(1000))])
    renamed, _ = safetensors_image("x", [Leaf("b", torch.zeros(10))])
    assert grown.length - first.length == 990 * 4
    assert entry.shape == (1000,)
    assert renamed.pieces != first.pieces
    data = written(grown)
    assert tensor_at(memoryview(data), entry.offset, torch.float32, entry.shape).sum() == 1000


def test_no_tensors_at_all_make_a_valid_file(tmp_path: Path) -> None:
    image, entries = safetensors_image("x", [])
    (tmp_path / "x").write_bytes(written(image))
    assert safetensors.torch.load_file(tmp_path / "x") == {}
    assert entries == ()


@pytest.mark.parametrize(
    ("image", "first"),
    [
        (Image("x", 8, ((0, b"abcd"), (4, b"efgh")), ()), None),
        (Image("x", 8, ((0, b"abcd"),), (Hole(4, torch.zeros(1)),)), None),
        (Image("x", 8, ((0, b"abcd"),), ()), 4),
        (Image("x", 8, ((1, b"abcdefg"),), ()), 0),
        (Image("x", 8, ((0, b"abcdef"), (4, b"efgh")), ()), 4),
        (Image("x", 4, ((0, b"abcdef"),), ()), 4),
        (Image("x", 0, (), ()), None),
    ],
)
def test_a_gap_or_an_overlap_is_found(image: Image, first: int | None) -> None:
    assert gap(image) == first


def test_an_image_of_bytes_is_those_bytes() -> None:
    assert written(bytes_image("x", b"hello")) == b"hello"
    assert written(bytes_image("x", b"")) == b""


def test_a_tensor_of_read_only_memory_keeps_it_mapped() -> None:
    mapping = mmap.mmap(-1, PAGE, access=mmap.ACCESS_READ)
    view = tensor_at(memoryview(mapping), 4, torch.int32, (4,))
    assert view.tolist() == [0, 0, 0, 0]
    with pytest.raises(BufferError):
        mapping.close()
    del view
    mapping.close()

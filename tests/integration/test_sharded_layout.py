# SPDX-License-Identifier: Apache-2.0
"""The layout of sharded checkpoints, in one process: who stores what, and what a load copies."""

import io
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.copier import Copier, Task
from holdfast.model.checkpoint import Shape
from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint import dcp_image
from holdfast.torch.checkpoint.images import Image, dtype_named, fill
from holdfast.torch.checkpoint.reshard import check_bounds, copies_for, tasks_of
from holdfast.torch.checkpoint.shard_map import (
    ALIGNMENT,
    SMALL,
    Chunk,
    Declaration,
    Layout,
    SavedChunk,
    SavedTensor,
    lay_out,
)
from holdfast.torch.checkpoint.sharded import Sharded
from tests.images import gap

LARGE = SMALL  # Elements of float32: four times the bytes that count as small.


def declared(*chunks: Chunk, **values: int) -> Declaration:
    return Declaration(chunks, values, {})


def whole(name: str, *shape: int) -> Chunk:
    return Chunk(name, "float32", shape, (0,) * len(shape), shape)


def laid_out(*declarations: Declaration) -> Layout:
    return lay_out(declarations, dcp_image.blob_of)


def stored(layout: Layout) -> list[list[str]]:
    return [[item.chunk.name for item in items] for items in layout.items]


def test_a_large_replicated_tensor_is_stored_once() -> None:
    """The prior art did not deduplicate what several ranks hold."""
    ranks = [declared(whole("a", LARGE), whole("b", LARGE)) for _ in range(2)]
    assert stored(laid_out(*ranks)) == [["a"], ["b"]]


def test_a_small_replicated_tensor_is_with_every_rank_and_listed_once() -> None:
    layout = laid_out(*(declared(whole("step")) for _ in range(3)))
    assert stored(layout) == [["step"]] * 3
    assert [chunk.rank for chunk in layout.tensors()["step"].chunks] == [0]


def test_shards_without_content_are_not_stored() -> None:
    full = Chunk("a", "float32", (3, 2), (0, 0), (3, 2))
    empty = Chunk("a", "float32", (3, 2), (3, 0), (0, 2))
    assert stored(laid_out(declared(full), declared(empty))) == [["a"], []]


def test_a_tensor_without_content_is_kept() -> None:
    layout = laid_out(declared(whole("a", 0, 4)), declared(whole("a", 0, 4)))
    assert list(layout.tensors()) == ["a"]


def test_values_are_stored_by_the_lowest_rank_that_has_them() -> None:
    layout = laid_out(declared(lr=2048), declared(lr=2048, only=1024))
    assert {name: room.rank for name, room in layout.values.items()} == {"lr": 0, "only": 1}


def test_a_missing_shard_is_refused_when_it_is_saved() -> None:
    half = Chunk("a", "float32", (4,), (0,), (2,))
    with pytest.raises(UsageError, match=r"2 elements of a .* it has 4"):
        laid_out(declared(half), declared())


def test_a_name_that_is_a_tensor_on_one_rank_only_is_refused() -> None:
    with pytest.raises(UsageError, match="a is a tensor on one rank"):
        laid_out(declared(whole("a", 2)), declared(a=1024))


def test_items_begin_at_aligned_places_and_do_not_overlap() -> None:
    chunks = [whole(str(n), n, 3) for n in range(1, 9)]
    (items,) = laid_out(declared(*chunks)).items
    end = 0
    for item in items:
        assert item.offset % ALIGNMENT == 0
        assert item.offset >= end
        end = item.offset + item.length


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3)])
def test_an_item_is_a_file_that_torch_loads(dtype: str, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype_named(dtype).itemsize
    raw = torch.arange(count, dtype=torch.uint8).remainder(2)
    tensor = raw.view(dtype_named(dtype)).reshape(shape)
    (items,) = laid_out(declared(Chunk("t", dtype, shape, (0,) * len(shape), shape))).items
    image = dcp_image.data_image(0, dcp_image.tensor_row(items, [tensor], [False]), {})
    assert gap(image) is None
    content = bytearray(b"\xa5" * image.length)
    fill(image, memoryview(content))
    loaded = torch.load(io.BytesIO(content[: items[0].length]), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    assert torch.equal(loaded.reshape(-1).view(torch.uint8), raw)


@pytest.mark.parametrize("value", [1, 0.1, None, "x" * 5000, [1, {"a": (2, "b")}], "y" * 200_000])
def test_a_value_fills_its_room_and_may_grow(value: object) -> None:
    saved = dcp_image.saved_value(value)
    room = dcp_image.room_for(len(saved))
    assert room >= len(saved) + 512
    padded = dcp_image.padded_value("v", saved, room)
    assert len(padded) == room
    assert torch.load(io.BytesIO(padded), weights_only=True) == value


def test_a_value_that_outgrew_its_room_is_named() -> None:
    saved = dcp_image.saved_value("x" * 5000)
    with pytest.raises(UsageError, match=r"param_groups\.0\.note takes \d+ bytes"):
        dcp_image.padded_value("param_groups.0.note", saved, 2048)


def test_values_of_rank_0_may_grow_without_talking_to_others() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    model = torch.nn.ParameterDict({"p": parameter})
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    sharded = Sharded(0, 1)
    sharded.collect(model, optimizer, {})
    optimizer.param_groups[0]["note"] = ""
    before = {image.name: image for image in sharded.collect(model, optimizer, {})}
    optimizer.param_groups[0]["note"] = "x" * 100_000
    after = {image.name: image for image in sharded.collect(model, optimizer, {})}
    assert after["__0_0.distcp"].length > before["__0_0.distcp"].length + 100_000
    assert after[".metadata"].pieces != before[".metadata"].pieces
    assert gap(after["__0_0.distcp"]) is None


# ---- re-sharding --------------------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A way to cut a tensor into boxes: cuts along each dimension."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else [])
        edges = [0, *cuts, size]
        spans = [(a, b - a) for a, b in itertools.pairwise(edges)]
        boxes = [
            ((*offsets, at), (*sizes, length)) for offsets, sizes in boxes for at, length in spans
        ]
    return boxes


@given(data=st.data())
def test_any_sharding_is_loaded_into_any_other(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    full = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)

    def box(of: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            of = of.narrow(dim, offset, size)
        return of

    files: dict[int, memoryview] = {}
    saved: list[SavedChunk] = []
    for rank, (offsets, sizes) in enumerate(data.draw(grids(shape))):
        content = box(full, offsets, sizes).contiguous().numpy().tobytes()
        files[rank] = memoryview(bytearray(b"head" + content))
        saved.append(SavedChunk(rank, 4, offsets, sizes))
    tensor = SavedTensor("int32", shape, tuple(saved))
    loaded = torch.full(shape, -1, dtype=torch.int32)
    for offsets, sizes in data.draw(grids(shape)):
        chunk = Chunk("t", "int32", shape, offsets, sizes)
        copies = list(copies_for(chunk, box(loaded, offsets, sizes), tensor))
        check_bounds(copies, files)
        copy_all(list(tasks_of(copies, files)))
    assert torch.equal(loaded, full)


def test_another_shape_is_refused_by_name() -> None:
    tensor = SavedTensor("float32", (4, 2), (SavedChunk(0, 0, (0, 0), (4, 2)),))
    with pytest.raises(UsageError, match=r"w has the shape \[4, 3\], but \[4, 2\]"):
        list(copies_for(whole("w", 4, 3), torch.zeros(4, 3), tensor))


def test_a_hole_in_the_map_is_a_damaged_checkpoint() -> None:
    tensor = SavedTensor("float32", (4,), (SavedChunk(0, 0, (0,), (2,)),))
    with pytest.raises(StateError, match="2 of 4 elements"):
        list(copies_for(whole("w", 4), torch.zeros(4), tensor))


def test_an_index_that_points_outside_its_file_is_a_damaged_checkpoint() -> None:
    tensor = SavedTensor("float32", (4,), (SavedChunk(0, 8, (0,), (4,)),))
    copies = list(copies_for(whole("w", 4), torch.zeros(4), tensor))
    with pytest.raises(StateError, match="byte 24 of a file of 20 bytes"):
        check_bounds(copies, {0: memoryview(bytes(20))})


# ---- one process, from live objects to bytes and back -------------------------------------------


def copy_all(tasks: Sequence[Task]) -> None:
    copier = Copier(threads=1)
    copier.run(tasks, 60.0)
    copier.close()


class MemoryPart:
    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def names(self) -> list[str]:
        return list(self._files)

    def file(self, name: str) -> memoryview:
        return memoryview(bytearray(self._files[name]))


class MemoryParts:
    """The parts of a checkpoint that one rank saved."""

    shape = Shape(world_size=1, shared=False)
    rank = 0
    world_size = 1

    def __init__(self, images: list[Image]) -> None:
        self.files: dict[str, bytes] = {}
        for image in images:
            content = bytearray(image.length)
            fill(image, memoryview(content))
            self.files[image.name] = bytes(content)

    def open(self, names: Sequence[str]) -> dict[str, MemoryPart]:
        return {name: MemoryPart(self.files) for name in names}

    def take(self, tasks: Sequence[Task]) -> None:
        copy_all(tasks)


def linear(inputs: int = 3, outputs: int = 2) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_several_models_and_optimizers_are_kept_apart() -> None:
    models = {"generator": linear(), "critic": linear()}
    optimizers = {k: torch.optim.Adam(m.parameters(), lr=0.5) for k, m in models.items()}
    models["critic"](torch.ones(3)).sum().backward()
    optimizers["critic"].step()
    expected = {k: state_of(m) for k, m in models.items()}
    parts = MemoryParts(Sharded(0, 1).collect(models, optimizers, {"extra": [1]}))
    live = {"generator": linear(), "critic": linear()}
    its = {k: torch.optim.Adam(m.parameters()) for k, m in live.items()}
    loading = Sharded(0, 1).loading(live, its)
    loading.prepare(parts)
    loading.take()
    assert loading.fill() == {"extra": [1]}
    assert all(is_same(state_of(live[k]), expected[k]) for k in live)
    assert not its["generator"].state
    assert len(its["critic"].state) == 2
    assert its["critic"].param_groups[0]["lr"] == 0.5


def test_a_changed_value_is_saved_though_the_layout_is_known() -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    sharded = Sharded(0, 1)
    for step in range(4):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 + step
        images = sharded.collect(model, optimizer, {"step": step})
        expected = state_of(model)
        other = linear()
        its = torch.optim.Adam(other.parameters())
        loading = Sharded(0, 1).loading(other, its)
        loading.prepare(MemoryParts(images))
        loading.take()
        assert loading.fill() == {"step": step}
        assert is_same(state_of(other), expected)
        assert its.param_groups[0]["lr"] == 0.1 + step


def test_a_parameter_with_other_memory_is_saved_from_there() -> None:
    """`p.data = other` keeps the parameter, but what was known about its memory is stale."""
    model = linear()
    sharded = Sharded(0, 1)
    sharded.collect(model, None, {})
    sharded.collect(model, None, {})
    model.weight.data = torch.full((2, 3), 7.0)
    parts = MemoryParts(sharded.collect(model, None, {}))
    other = linear()
    loading = sharded.loading(other, None)
    loading.prepare(parts)
    loading.take()
    loading.fill()
    assert torch.equal(other.weight, torch.full((2, 3), 7.0))


def test_new_parameters_give_a_new_layout() -> None:
    """The prior art froze the layout at the first save: later keys raised."""
    sharded = Sharded(0, 1)
    model = torch.nn.Sequential(linear())
    sharded.collect(model, None, {})
    model.append(linear(2, 5))
    parts = MemoryParts(sharded.collect(model, None, {}))
    other = torch.nn.Sequential(linear(), linear(2, 5))
    loading = sharded.loading(other, None)
    loading.prepare(parts)
    loading.take()
    loading.fill()
    assert is_same(state_of(other), state_of(model))


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        ([linear(), linear(2, 2)], [linear()], r"live objects lack model\.1\.bias"),
        ([linear()], [linear(), linear(2, 2)], r"checkpoint lacks model\.1\.bias"),
        ([linear(3, 2)], [linear(4, 2)], r"model\.0\.weight has the shape \[2, 4\]"),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_nothing_is_changed(
    saved: list[torch.nn.Module], live: list[torch.nn.Module], message: str
) -> None:
    parts = MemoryParts(Sharded(0, 1).collect(torch.nn.Sequential(*saved), None, {}))
    model = torch.nn.Sequential(*live)
    before = state_of(model)
    with pytest.raises(UsageError, match=message):
        Sharded(0, 1).loading(model, None).prepare(parts)
    assert is_same(state_of(model), before)


def test_a_damaged_index_makes_the_agreement_look_for_another_version() -> None:
    parts = MemoryParts(Sharded(0, 1).collect(linear(), None, {}))
    parts.files["rank-00000.json"] = parts.files["rank-00000.json"][:-5]
    with pytest.raises(StateError, match=r"rank-00000\.json cannot be read"):
        Sharded(0, 1).loading(linear(), None).prepare(parts)


def test_an_optimizer_without_its_model_is_refused() -> None:
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="give the model too"):
        Sharded(0, 1).collect(None, optimizer, {})

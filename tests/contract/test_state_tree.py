# SPDX-License-Identifier: Apache-2.0
"""What a training state may contain: everything comes back as it was, or is refused by name."""

import collections
import dataclasses
import enum
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint.state import decode, encode, flatten, rebuild


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    rate: float
    weights: torch.Tensor
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.rate < 1, "a state is put back without running its constructor"


def round_trip(value: object, allow_pickle: bool = False) -> Any:
    flat = flatten(value, "extra", allow_pickle)
    tree = decode(encode(flat.tree))
    return rebuild(tree, lambda index: flat.leaves[index].tensor.clone(), allow_pickle)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return bool(same_kind and raw(one) == raw(other))
    if isinstance(one, np.ndarray | np.generic):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return bool(same_kind and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    return bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


VALUES: dict[str, object] = {
    "none": None,
    "numbers": [True, 0, -1, 2**63 - 1, -(2**63), 2**200, -(2**200), 0.1, -0.0, 5e-324],
    "whole numbers": (0, 2**63 - 1, -(2**63), 2**200),
    "not finite": [math.inf, -math.inf, math.nan],
    "complex": complex(-0.0, math.inf),
    "text": ["", "häß", "\ud800", "\0"],
    "bytes": [b"", b"\0\xff", bytes(range(256)) * 100, bytearray(b"xy"), bytearray(5000)],
    "tuples in lists": [(1, (2, [3, ()]))],
    "sets": [{1, 2}, frozenset({("a", 1)})],
    "keys of all kinds": {1: "a", "1": "b", None: "c", (1, "x"): "d", 2.5: "e", False: "f"},
    "tags as keys": {"tensor": 1, "dict": {"tuple": [1]}},
    "ordered dict": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counter": collections.Counter({30: 1, 80: 2}),
    "enum": Colour.RED,
    "named tuple": Point(1, torch.ones(2)),
    "dataclass": Config(0.1, torch.zeros(3), ("a",)),
    "torch things": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
    "numpy scalars": [np.float32(0.1), np.int64(-1), np.bool_(True), np.datetime64("2026-01-01")],
    "python rng": random.Random(3).getstate(),
    "numpy rng": np.random.RandomState(3).get_state(),
    "numpy generator": np.random.default_rng(3).bit_generator.state,
    "torch rng": torch.Generator().get_state(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_equal_to_the_bit(name: str) -> None:
    value = VALUES[name]
    assert same(round_trip(value), value)


DTYPES = sorted(
    {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
    }
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_come_back(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.arange(48, dtype=torch.uint8).view(kind)
    flat = flatten([tensor], "extra")
    assert [leaf.tensor.dtype for leaf in flat.leaves] == [kind]
    assert raw(flat.leaves[0].tensor) == raw(tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(["ab", "c"]),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([1, 2], np.float16),
        np.array(7),
        np.empty((0, 3)),
        np.arange(10)[::-2],
        np.frombuffer(b"12345678", np.uint16),
    ],
    ids=str,
)
def test_numpy_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    assert same(round_trip({"a": array})["a"], np.ascontiguousarray(array).reshape(array.shape))


def test_tensors_in_tuples_and_dataclasses_are_leaves_and_not_pickled() -> None:
    """The prior art handled mappings and lists only; others went through pickle."""
    tensor = torch.ones(3)
    flat = flatten((Config(0.1, tensor), Point(1, tensor)), "extra")
    assert [leaf.name for leaf in flat.leaves] == ["extra.0.weights"]


def test_a_tensor_that_is_there_twice_is_stored_once_and_is_one_again() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    flat = flatten({"in": weight, "out": weight.detach()}, "model")
    assert len(flat.leaves) == 1
    loaded = round_trip({"in": weight, "out": weight})
    assert loaded["in"] is loaded["out"]


def test_views_that_differ_are_stored_apart() -> None:
    base = torch.arange(6.0).view(2, 3)
    loaded = round_trip({"base": base, "turned": base.t(), "row": base[0]})
    assert torch.equal(loaded["turned"], base.t())
    assert torch.equal(loaded["row"], base[0])


def test_leaf_names_are_unique() -> None:
    flat = flatten({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, "extra")
    names = [leaf.name for leaf in flat.leaves]
    assert len(set(names)) == len(names) == 2


class Opaque:
    """No state_dict, no fields; equal to its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


def cyclic() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "function": (
        lambda: {"scheduler": {"fn": test_leaf_names_are_unique}},
        r"\['scheduler'\]\['fn'\]",
    ),
    "object": (lambda: [1, Opaque()], r"extra\[1\]: a Opaque"),
    "class": (lambda: Opaque, "the class Opaque"),
    "quantised": (
        lambda: [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)],
        r"extra\[0\].*quantised",
    ),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
    "meta": (lambda: torch.ones(2, device="meta"), "meta device"),
    "lazy": (lambda: torch.nn.LazyLinear(3), "no shape yet"),
    "object array": (lambda: np.array([object()]), "Python objects"),
    "itself": (cyclic, "contain itself"),
    "subclass of dict": (lambda: collections.defaultdict(int), "defaultdict"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_with_its_place(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        flatten(make(), "extra")


def test_pickle_needs_permission_to_save_and_to_load() -> None:
    value = {"a": Opaque(), "big": [b"x" * 5000]}
    assert round_trip(value, allow_pickle=True) == value
    flat = flatten(value, "extra", allow_pickle=True)
    with pytest.raises(UsageError, match=r"\['a'\] was saved with allow_pickle=True"):
        rebuild(flat.tree, lambda index: flat.leaves[index].tensor)
    with pytest.raises(UsageError, match="not even by pickle"):
        flatten({"f": lambda: 0}, "extra", allow_pickle=True)


def test_a_class_is_not_imported_because_a_checkpoint_says_so() -> None:
    for name in ("subprocess:Popen", "os:system", "no.such:Thing", "builtins:dict"):
        for tag in ("dataclass", "namedtuple", "enum"):
            content = [name, "RED" if tag == "enum" else {}]
            with pytest.raises(UsageError, match="does not have"):
                rebuild({tag: content}, lambda index: torch.empty(0))


def test_objects_with_a_state_give_it_as_they_do() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    loaded = round_trip({"model": model, "schedule": schedule})
    assert same(loaded["schedule"], schedule.state_dict())
    assert list(loaded["model"]) == ["weight", "bias"]


def test_only_what_the_optimizer_changes_may_be_copied_late() -> None:
    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    flat = flatten({"m": model, "o": optimizer, "x": torch.ones(1)}, "s")
    late = {leaf.name.rpartition(".")[2] for leaf in flat.leaves if not leaf.early}
    assert late == {"weight", "bias", "momentum_buffer"}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=2000),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(plain)
def test_any_nesting_of_plain_values_comes_back(value: object) -> None:
    assert same(round_trip(value), value)

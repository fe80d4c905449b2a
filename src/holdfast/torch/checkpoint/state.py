# SPDX-License-Identifier: Apache-2.0
"""Turns a training state into tensors and a tree of plain values, and back.

The tree is JSON. A value that JSON cannot express is an object with one key, the tag: {"tuple":
[...]}, {"tensor": 3}. Reading a tree executes nothing. A value that fits no tag is refused, with
its place in the state.
"""

import base64
import collections
import contextlib
import dataclasses
import enum
import functools
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint import opaque
from holdfast.torch.checkpoint.images import Leaf, dtype_name, dtype_named

DEPTH_MAX = 100
"""A state nested deeper than this most likely contains itself."""

INLINE_BYTES_MAX = 1024
"""Longer bytes are kept beside the tensors, not as text in the tree."""

Tree = Any
"""None, bool, int, float, str, a list of trees, or a dict with one tag."""

Path = tuple[object, ...]

_NOT_UNDERSTOOD = (
    *(ArithmeticError, AttributeError, IndexError, RuntimeError, SyntaxError, TypeError),
    *(ValueError, struct.error),
)
"""Errors of Python, numpy and torch for a text that they cannot turn into a value."""

_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered_dict",
    collections.Counter: "counter",
}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPING_TYPES = {tag: kind for kind, tag in _MAPPINGS.items()}
_SEQUENCE_TYPES = {tag: kind for kind, tag in _SEQUENCES.items()}


@runtime_checkable
class Stateful(Protocol):
    """A module, an optimizer, a scheduler: any object that gives its state and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """A state taken apart."""

    tree: Tree
    leaves: list[Leaf]


class _Field(str):
    """A step of a path that is an attribute, not a key."""


def flatten(value: object, where: str, allow_pickle: bool = False) -> Flat:
    """Take a state apart. UsageError names the place of a value that cannot be saved.

    The leaves are the live tensors, not copies. A tensor that is found twice is one leaf.
    """
    flattener = Flattener(allow_pickle)
    return Flat(flattener.tree(value, (where,)), flattener.leaves)


def rebuild(
    tree: Tree, tensor: Callable[[int], torch.Tensor], allow_pickle: bool = False
) -> object:
    """Put a state together again; `tensor` makes each leaf by its number, once."""
    made = functools.cache(tensor)
    return Rebuilder(lambda index, _live, _where: made(index), allow_pickle).value(tree)


def encode(document: object) -> bytes:
    """A tree, or a structure of trees, as JSON."""
    return msgspec.json.encode(document)


def decode(data: bytes | memoryview) -> Any:
    """The inverse of `encode`. StateError if it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise StateError(f"the index of the checkpoint is damaged: {exc}") from exc


def decode_index(data: bytes | memoryview) -> dict[str, Any]:
    """The index beside the tensors of a part: an object. StateError if it is none."""
    fields = decode(data)
    if not isinstance(fields, dict):
        raise StateError("the index of the checkpoint is damaged: it is not an object")
    return fields


def unwrapped(value: object) -> object:
    """The module inside wrappers that only change the names of its state."""
    while True:
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            value = value.module
        elif isinstance(value, torch.nn.Module) and hasattr(value, "_orig_mod"):
            value = value._orig_mod  # The module that torch.compile wrapped.
        else:
            return value


def where_text(path: Path) -> str:
    """A path as the user would write it: extra['scheduler'].lr."""
    steps = [f".{step}" if isinstance(step, _Field) else f"[{step!r}]" for step in path[1:]]
    return str(path[0]) + "".join(steps)


class Flattener:
    def __init__(self, allow_pickle: bool) -> None:
        self.leaves: list[Leaf] = []
        self._allow_pickle = allow_pickle
        self._known: dict[object, int] = {}
        self._names: set[str] = set()
        self._late: frozenset[int] | None = frozenset()

    def tree(self, value: Any, path: Path) -> Tree:
        """The tree of a value; its tensors become leaves."""
        if len(path) > DEPTH_MAX:
            raise UsageError(
                f"{where_text(path[:4])}... is nested more than {DEPTH_MAX} deep: "
                "does it contain itself?"
            )
        if isinstance(value, torch.Tensor):
            return {"tensor": self._leaf(value, path)}
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int or kind is float or kind is str or kind is complex:
            return _scalar(value)
        if kind is list:
            return self._items(value, path)
        if kind in _MAPPINGS:
            return self._mapping(_MAPPINGS[kind], value, path)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, path)}
        return self._rarer(value, path)

    def _items(self, value: Collection[Any], path: Path) -> list[Tree]:
        if set(map(type, value)) == {int}:  # Python's random state has 625 of them.
            return [_scalar(item) for item in value]
        return [self.tree(item, (*path, i)) for i, item in enumerate(value)]

    def _mapping(self, tag: str, value: Mapping[object, object], path: Path) -> Tree:
        if all(type(key) is str and _is_text(key) for key in value):
            return {tag: {key: self.tree(item, (*path, key)) for key, item in value.items()}}
        pairs = [
            [self.tree(key, (*path, key)), self.tree(item, (*path, key))]
            for key, item in value.items()
        ]
        return {tag: pairs}

    def _rarer(self, value: object, path: Path) -> Tree:
        value = unwrapped(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        if isinstance(value, bytes | bytearray):
            return self._bytes(value, path)
        if isinstance(value, enum.Enum):
            return {"enum": [_class_name(value), value.name]}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = dict(zip(value._fields, value, strict=True))
            return self._record("namedtuple", value, fields, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return self._record("dataclass", value, fields, path)
        if isinstance(value, Stateful) and not isinstance(value, type):
            return self._stateful(value, path)
        if self._allow_pickle:
            return self._pickled(value, path)
        raise UsageError(
            f"{where_text(path)}: {_described(value)} cannot be saved; leave it out, give its "
            "state as plain values and tensors, or save and load with allow_pickle=True"
        )

    def _stateful(self, value: Stateful, path: Path) -> Tree:
        """The state of a live object. What only optimizer.step() changes may be copied late."""
        before = self._late
        if isinstance(value, torch.nn.Module):
            self._late = frozenset(
                p.data_ptr() for p in value.parameters() if not torch.nn.parameter.is_lazy(p)
            )
        elif isinstance(value, torch.optim.Optimizer):
            self._late = None
        try:
            return {"state_of": self.tree(value.state_dict(), path)}
        finally:
            self._late = before

    def _record(self, tag: str, value: object, fields: dict[str, object], path: Path) -> Tree:
        trees = {name: self.tree(item, (*path, _Field(name))) for name, item in fields.items()}
        return {tag: [_class_name(value), trees]}

    def _leaf(self, tensor: torch.Tensor, path: Path) -> int:
        _check_tensor(tensor, path)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        address = tensor.data_ptr()
        # Equal in all of these: the same tensor twice (tied weights). An empty one has no address.
        key = (address or id(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.leaves)
            early = self._late is not None and address not in self._late
            self.leaves.append(Leaf(self._name(path), tensor, early))
        return index

    def _name(self, path: Path) -> str:
        name = base = ".".join(str(step) for step in path)
        count = 1
        while name in self._names or name == "__metadata__":
            count += 1
            name = f"{base}#{count}"
        self._names.add(name)
        return name

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, path: Path) -> Tree:
        dtype = value.dtype
        if dtype.hasobject:
            raise UsageError(
                f"{where_text(path)}: a numpy array of Python objects cannot be saved; "
                "turn it into a list"
            )
        described: Tree = dtype.str if dtype.names is None else _descr(dtype)
        if isinstance(value, np.generic):
            return {"numpy_scalar": [described, value.tobytes().hex()]}
        # A copy, unless the array can be written to: torch has no read-only tensors.
        array = np.require(value, requirements=["C", "W"])
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # torch has no text, no dates, no other byte order.
            tensor = torch.from_numpy(array.reshape(-1).view(np.uint8))
        return {"numpy": [described, list(value.shape), self._leaf(tensor, path)]}

    def _bytes(self, value: bytes | bytearray, path: Path) -> Tree:
        tag = "bytes" if isinstance(value, bytes) else "bytearray"
        if len(value) <= INLINE_BYTES_MAX:
            return {tag: base64.b64encode(value).decode()}
        return {tag: self._leaf(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)}

    def _pickled(self, value: object, path: Path) -> Tree:
        try:
            data = opaque.to_bytes(value)
        except TypeError as exc:
            raise UsageError(
                f"{where_text(path)}: {_described(value)} cannot be saved, not even by pickle: "
                f"{exc}"
            ) from exc
        return {"pickle": self._bytes(data, path)}


Make = Callable[[int, object, str], torch.Tensor]
"""Makes the tensor of a leaf: its number, the present value there (or None), and the place."""


class Rebuilder:
    """Puts a state together again, beside the live objects that will take it."""

    def __init__(self, make: Make, allow_pickle: bool = False) -> None:
        self.stateful: list[tuple[Stateful, Any, str]] = []
        """Live objects, the state for each, and its place; the innermost first."""
        self._make = make
        self._allow_pickle = allow_pickle

    def value(self, tree: Tree, live: object = None, path: Path = ("",)) -> Any:
        """The value of a tree. `live`: the present value; the tree may have more or less.

        StateError: no save of Holdfast wrote such a tree.
        """
        if len(path) > DEPTH_MAX:
            raise StateError(f"{where_text(path[:4])}... in the checkpoint is nested too deep")
        if isinstance(tree, list):
            return [self.value(item, _at(live, i), (*path, i)) for i, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        if len(tree) != 1:
            raise StateError(f"{where_text(path)} in the checkpoint has {len(tree)} tags, not one")
        ((tag, content),) = tree.items()
        if tag == "tensor":
            return self._tensor(content, live, path)
        if tag in _MAPPING_TYPES:
            return self._mapping(_MAPPING_TYPES[tag], content, live, path)
        if tag in _SEQUENCE_TYPES:
            items = self.value(_list(content, path), live, path)
            return _SEQUENCE_TYPES[tag](_keys(items, path) if tag != "tuple" else items)
        if tag == "state_of":
            return self._stateful(content, live, path)
        return self._rarer(tag, content, live, path)

    def _tensor(self, index: Tree, live: object, path: Path) -> torch.Tensor:
        if type(index) is int and index >= 0:
            with contextlib.suppress(IndexError):
                return self._make(index, live, where_text(path))
        raise StateError(f"{where_text(path)}: the checkpoint has no tensor {index!a}")

    def _mapping(self, kind: type, content: Tree, live: object, path: Path) -> Any:
        if isinstance(content, dict):
            pairs = list(content.items())
        else:
            found = [_list(pair, path, 2) for pair in _list(content, path)]
            keys = _keys([self.value(key, None, (*path, "")) for key, _ in found], path)
            pairs = [(key, pair[1]) for key, pair in zip(keys, found, strict=True)]
        result = {
            key: self.value(
                item, live.get(key) if isinstance(live, Mapping) else None, (*path, key)
            )
            for key, item in pairs
        }
        return result if kind is dict else kind(result)

    def _stateful(self, content: Tree, live: object, path: Path) -> Any:
        live = unwrapped(live)
        if not isinstance(live, Stateful):
            return self.value(content, live, path)
        state = self.value(content, live.state_dict(), path)
        self.stateful.append((live, state, where_text(path)))
        return state

    def _rarer(self, tag: str, content: Tree, live: object, path: Path) -> Any:
        if tag in ("namedtuple", "dataclass"):
            return self._record(tag, content, live, path)
        if tag == "pickle":
            return self._unpickled(content, path)
        try:
            return self._rare(tag, content, path)
        except _NOT_UNDERSTOOD as exc:
            raise StateError(f"{where_text(path)}: not a {tag} in the checkpoint: {exc}") from exc

    def _rare(self, tag: str, content: Tree, path: Path) -> Any:
        match tag:
            case "int":
                return int(content, 16)
            case "float":
                return _float_of(content)
            case "complex":
                return complex(*(_float_of(part) for part in content))
            case "str":
                return bytes.fromhex(content).decode("utf-8", "surrogatepass")
            case "bytes" | "bytearray":
                data = self._bytes(content, path)
                return data if tag == "bytes" else bytearray(data)
            case "numpy":
                described, shape, index = content
                array = self._tensor(index, None, path).numpy()
                return array.reshape(-1).view(np.dtype(_dtype_of(described))).reshape(shape)
            case "numpy_scalar":
                dtype = np.dtype(_dtype_of(content[0]))
                return np.frombuffer(bytes.fromhex(content[1]), dtype)[0]
            case "size":
                return torch.Size(content)
            case "dtype":
                return dtype_named(content)
            case "device":
                return torch.device(content)
            case "enum":
                return _member_of(content[0], content[1], path)
        raise StateError(
            f"{where_text(path)} in the checkpoint has the unknown tag {tag!r}: "
            "was it written by a newer Holdfast?"
        )

    def _record(self, tag: str, content: Tree, live: object, path: Path) -> Any:
        name, trees = _list(content, path, 2)
        kind = _class_of(name, path)
        fields = {
            name: self.value(item, getattr(live, name, None), (*path, _Field(name)))
            for name, item in (trees.items() if isinstance(trees, dict) else ())
        }
        if tag == "namedtuple":
            if fields.keys() != set(getattr(kind, "_fields", ())):
                raise UsageError(f"{where_text(path)} has other fields in the checkpoint than now")
            return kind(**fields)
        # Not through its constructor: a state is put back as it was, without running any code.
        record = object.__new__(kind)
        for name, item in fields.items():
            object.__setattr__(record, name, item)
        return record

    def _bytes(self, content: Tree, path: Path) -> bytes:
        if isinstance(content, str):
            return base64.b64decode(content)
        return self._tensor(content, None, path).numpy().tobytes()

    def _unpickled(self, content: Tree, path: Path) -> object:
        if not self._allow_pickle:
            raise UsageError(
                f"{where_text(path)} was saved with allow_pickle=True: load it with "
                "allow_pickle=True too, if you trust who wrote the checkpoint"
            )
        if not isinstance(content, dict) or len(content) != 1:
            raise StateError(f"{where_text(path)}: not a pickle in the checkpoint")
        ((_, data),) = content.items()
        return opaque.from_bytes(self._bytes(data, path))


def _scalar(value: Any) -> Tree:
    """A number or text; always exact."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if isinstance(value, float):
        # JSON has neither nan nor inf. The shortest text of any other float gives the same float.
        return value if value - value == 0 else {"float": struct.pack("<d", value).hex()}
    if isinstance(value, complex):
        return {"complex": [struct.pack("<d", part).hex() for part in (value.real, value.imag)]}
    if _is_text(value):
        return value
    return {"str": value.encode("utf-8", "surrogatepass").hex()}


def _float_of(text: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(text))
    return float(value)


def _is_text(value: Any) -> bool:
    """Whether it can be written as UTF-8: half a surrogate pair cannot."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_tensor(tensor: torch.Tensor, path: Path) -> None:
    kind = ""
    if hasattr(tensor, "__tensor_flatten__"):
        kind = f"a {type(tensor).__name__}, which is not one tensor but several"
    elif torch.nn.parameter.is_lazy(tensor):
        kind = "a parameter that has no shape yet (run the model once)"
    elif tensor.is_meta:
        kind = "a tensor on the meta device, which has no data"
    elif tensor.is_quantized:
        kind = "a quantised tensor (save its int_repr(), scale and zero point)"
    elif tensor.is_nested or tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout} (save its values and indices)"
    if kind:
        raise UsageError(f"{where_text(path)}: {kind} cannot be saved as it is")


def _at(live: object, index: int) -> object:
    if isinstance(live, list | tuple) and index < len(live):
        return live[index]
    return None


def _class_name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _list(content: Tree, path: Path, length: int | None = None) -> list[Tree]:
    if not isinstance(content, list) or len(content) != (length or len(content)):
        raise StateError(f"{where_text(path)} in the checkpoint is not a list as we write it")
    return content


def _keys(values: list[Any], path: Path) -> list[Any]:
    """Values for use as keys, or as members of a set."""
    try:
        for value in values:
            hash(value)
    except TypeError as exc:
        raise StateError(f"{where_text(path)} in the checkpoint: {exc}") from exc
    return values


def _member_of(name: str, member: str, path: Path) -> Any:
    kind = _class_of(name, path)
    if not issubclass(kind, enum.Enum) or member not in kind.__members__:
        raise UsageError(f"{where_text(path)} is {name} {member}, which this program does not have")
    return kind[member]


def _class_of(name: Tree, path: Path) -> Any:
    """A class that this program has imported already: a checkpoint never makes a program import."""
    if not isinstance(name, str):
        raise StateError(f"{where_text(path)}: not a class in the checkpoint")
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in qualified.split("."):
        found = getattr(found, step, None)
    is_record = dataclasses.is_dataclass(found) or hasattr(found, "_fields")
    if not isinstance(found, type) or not (is_record or issubclass(found, enum.Enum)):
        raise UsageError(
            f"{where_text(path)} is a {module}.{qualified}, which this program does not have: "
            "import it before load()"
        )
    return found


def _descr(dtype: np.dtype[Any]) -> Tree:
    """A structured dtype as lists."""
    return [[field[0], field[1], *(list(shape) for shape in field[2:])] for field in dtype.descr]


def _dtype_of(described: Tree) -> Any:
    if isinstance(described, str):
        return described
    return [(f[0], f[1], *(tuple(shape) for shape in f[2:])) for f in described]


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    kind = type(value)
    return f"a {kind.__qualname__} (of {kind.__module__})"

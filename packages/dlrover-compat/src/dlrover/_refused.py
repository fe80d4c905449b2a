# SPDX-License-Identifier: Apache-2.0
"""The names that this package lacks: one sentence for each, with the page and a replacement."""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

PAGE = "docs/from-dlrover.md"

INSTEAD = {
    "dlrover.trainer.torch.flash_checkpoint.deepspeed": (
        "use holdfast.torch.adapters.deepspeed.DeepSpeedCheckpointer",
        "checkpoints",
    ),
    "dlrover.trainer.torch.flash_checkpoint.hf_trainer": (
        "use holdfast.torch.adapters.transformers.FlashTrainer",
        "checkpoints",
    ),
    "dlrover.trainer.torch.flash_checkpoint.megatron": (
        "use holdfast.torch.adapters.megatron",
        "checkpoints",
    ),
    "dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt": (
        "Holdfast does not cover Megatron's dist_checkpointing",
        "checkpoints",
    ),
    "dlrover.trainer.torch.flash_checkpoint": (
        "use holdfast.torch.Checkpointer",
        "checkpoints",
    ),
    "dlrover.trainer.torch.node_check": ("Holdfast does not check nodes yet", "commands"),
    "dlrover.trainer.torch.elastic_run": ("use the command dlrover-run", "commands"),
    "dlrover.trainer.torch": ("use holdfast.torch", "data-and-trainer"),
    "dlrover.trainer": (
        "the TensorFlow executor does not exist yet; for data use "
        "holdfast.tensorflow.data.ShardedDataset",
        "tensorflow-unified-jobs-and-diagnosis",
    ),
    "dlrover.python.common.storage": (
        "give the checkpointer a directory or an fsspec URL",
        "checkpoints",
    ),
    "dlrover.python.elastic_agent.sharding": (
        "use holdfast.client.data.DataShards",
        "data-and-trainer",
    ),
    "dlrover.python.master": ("use `holdfast master` or the operator", "commands"),
    "dlrover.python.unified": (
        "jobs of several roles do not exist yet",
        "tensorflow-unified-jobs-and-diagnosis",
    ),
    "dlrover.python": (
        "what DLRover has inside has no counterpart here",
        "tensorflow-unified-jobs-and-diagnosis",
    ),
    "dlrover": ("Holdfast has nothing of that name", "imports"),
}
"""By the beginning of a dotted name: what to use instead, and the section of the page."""


class NotInHoldfastError(ImportError, NotImplementedError):
    """A name, an argument or a method of DLRover that Holdfast does not have."""


def sentence(name: str, instead: str = "") -> str:
    """Why `name` is not available, in one sentence."""
    beginning = name
    while beginning not in INSTEAD:
        beginning = beginning.rpartition(".")[0] or "dlrover"
    found, anchor = INSTEAD[beginning]
    return f"{name} is not available on Holdfast: {instead or found} ({PAGE}#{anchor})"


def refuse(name: str, instead: str = "") -> NoReturn:
    raise NotInHoldfastError(sentence(name, instead))


def missing(module: str) -> Callable[[str], object]:
    """A module's `__getattr__`, for names of DLRover's module that this one lacks."""

    def find(name: str) -> object:
        # Python itself asks modules for names like __path__, and expects an AttributeError.
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        refuse(f"{module}.{name}")

    return find


class Named:
    """A class of DLRover: methods that Holdfast's class lacks are refused in one sentence."""

    def __getattr__(self, name: str) -> object:
        # An AttributeError, so that hasattr() and copying still work.
        if name.startswith("_"):
            raise AttributeError(name)
        kind = type(self)
        raise AttributeError(sentence(f"{kind.__module__}.{kind.__qualname__}.{name}"))


class _Finder(importlib.abc.MetaPathFinder):
    """The last finder: Python asks it for modules of this package that do not exist."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.startswith("dlrover."):
            refuse(fullname)
        return None


def install() -> None:
    """Refuse missing modules in words; installed once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def refuse_beside_the_real_one() -> None:
    """Refuse the import if DLRover itself is installed: its files have the same names."""
    try:
        version = metadata.version("dlrover")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"dlrover {version} is installed beside holdfast-dlrover-compat, and both have the package "
        f"dlrover: uninstall both, then install the one that you want ({PAGE}#imports)"
    )

# SPDX-License-Identifier: Apache-2.0
"""How tensors get into a slot: from host memory by copies, from an accelerator by a side stream.

A stager returns *staged* work: host copies for the caller's threads, a moment after which the
accelerator may change its tensors, and an end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.checkpoint.copier import Copy, Task
from holdfast.torch.checkpoint.images import Hole, fill_hole, lies_in_a_row, tensor_at


@dataclass(frozen=True, slots=True)
class Placed:
    """A hole and where its file is in memory."""

    hole: Hole
    file: memoryview
    address: int
    """The address of the file's first byte."""


class Staged(Protocol):
    """Tensors on their way into a slot."""

    @property
    def tasks(self) -> Sequence[Task]:
        """Host copies, to be run by the caller, in any thread."""

    def hold_back_changes(self) -> None:
        """Before tensors change: later work on the accelerator must wait for the copies."""

    def finish(self) -> None:
        """Wait until all copies of the accelerator are in host memory."""


class Stager(Protocol):
    """Brings tensors into slots."""

    def mapped(self, address: int, length: int) -> None:
        """A slot's memory is mapped now."""

    def unmapping(self, address: int) -> None:
        """A slot's memory is about to be unmapped."""

    def stage(self, placed: Sequence[Placed]) -> Staged:
        """Begin to bring these tensors to their places."""


@dataclass(frozen=True, slots=True)
class _HostCopies:
    tasks: Sequence[Task]

    def hold_back_changes(self) -> None:
        """Nothing is queued: code that changes a tensor waits for the tasks."""

    def finish(self) -> None:
        """Nothing runs except the tasks."""


class HostStager:
    """For tensors in host memory: runs of bytes by address, all other tensors by torch."""

    def mapped(self, address: int, length: int) -> None:
        """Nothing to prepare."""

    def unmapping(self, address: int) -> None:
        """Nothing to undo."""

    def stage(self, placed: Sequence[Placed]) -> Staged:
        return _HostCopies([task for item in placed if (task := _host_task(item)) is not None])


def _host_task(placed: Placed) -> Task | None:
    hole = placed.hole
    if hole.tensor.nbytes == 0:
        return None
    if lies_in_a_row(hole.tensor):
        return Copy(hole.tensor.data_ptr(), placed.address + hole.offset, hole.tensor.nbytes)
    return lambda: fill_hole(hole, placed.file)


class Event(Protocol):
    """A point in a stream's queue."""

    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """The few operations that are needed of a device. `CudaAccelerator` is the real one."""

    def pin(self, address: int, length: int) -> None:
        """Make host memory reachable by the device's copy engine."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queue (target, source) copies on the side stream, behind all work queued so far."""

    def wait(self, event: Event) -> None:
        """Make work that is queued on the current stream from now on wait for the event."""


class DeviceStager:
    """For tensors on an accelerator: queued on a side stream, straight into pinned slot memory.

    Tensors in host memory among them are copied as by HostStager; if all are in host memory, the
    accelerator is never touched.
    """

    def __init__(self, accelerator: Callable[[], Accelerator]) -> None:
        self._make_accelerator = accelerator
        self._accelerator: Accelerator | None = None
        self._host = HostStager()
        self._mapped: dict[int, int] = {}
        self._pinned: set[int] = set()

    def mapped(self, address: int, length: int) -> None:
        self._mapped[address] = length

    def unmapping(self, address: int) -> None:
        del self._mapped[address]
        if address in self._pinned and self._accelerator is not None:
            self._pinned.remove(address)
            self._accelerator.unpin(address)

    def stage(self, placed: Sequence[Placed]) -> Staged:
        on_device = [item for item in placed if not item.hole.tensor.is_cpu]
        if not on_device:
            return self._host.stage(placed)
        on_host = [item for item in placed if item.hole.tensor.is_cpu]
        if self._accelerator is None:
            self._accelerator = self._make_accelerator()
        for address in self._mapped.keys() - self._pinned:
            self._accelerator.pin(address, self._mapped[address])
            self._pinned.add(address)
        event = self._accelerator.copy([(_target(item), item.hole.tensor) for item in on_device])
        return _DeviceCopies(self._host.stage(on_host).tasks, self._accelerator, event)


def _target(placed: Placed) -> torch.Tensor:
    tensor = placed.hole.tensor
    return tensor_at(placed.file, placed.hole.offset, tensor.dtype, tensor.shape)


@dataclass(frozen=True, slots=True)
class _DeviceCopies:
    tasks: Sequence[Task]
    accelerator: Accelerator
    event: Event

    def hold_back_changes(self) -> None:
        self.accelerator.wait(self.event)

    def finish(self) -> None:
        self.event.synchronize()


class CudaAccelerator:
    """CUDA, and devices that torch presents as CUDA."""

    def __init__(self) -> None:
        # torch ships no types for most of this module.
        self._cuda: Any = torch.cuda
        self._stream = self._cuda.Stream()

    def pin(self, address: int, length: int) -> None:
        self._cuda.check_error(self._cuda.cudart().cudaHostRegister(address, length, 0))

    def unpin(self, address: int) -> None:
        self._cuda.check_error(self._cuda.cudart().cudaHostUnregister(address))

    def copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
        event: Event = self._stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        self._cuda.current_stream().wait_event(event)

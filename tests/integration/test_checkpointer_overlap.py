# SPDX-License-Identifier: Apache-2.0
"""Saves that go on in the background: nothing changes under them unnoticed."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.copier import Pace
from holdfast.torch import Checkpointer
from holdfast.torch.checkpoint.images import Hole, Leaf, fill, safetensors_image, tensor_at
from holdfast.torch.checkpoint.overlap import GENTLE_BYTES_PER_S, BackgroundSave, Gate, gentle_pace
from holdfast.torch.checkpoint.staging import DeviceStager, Event, HostStager, Placed
from holdfast.torch.checkpoint.zip_image import memory_file
from tests.waiting import until

WAIT_S = 120.0


class Slow:
    """A tensor whose copy waits until the test lets it go on."""

    def __init__(self) -> None:
        self.may_copy = threading.Event()
        self.tensor = torch.ones(4)
        self.copied: list[list[float]] = []
        self.sealed = threading.Event()
        self.failures: list[str] = []
        self.pace = Pace(1e9)

    def copy(self) -> None:
        assert self.may_copy.wait(WAIT_S)
        self.copied.append(self.tensor.tolist())

    @property
    def tasks(self) -> list[Any]:
        return [self.copy]

    def hold_back_changes(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def start(self, timeout_s: float = WAIT_S) -> BackgroundSave:
        holes = [Hole(0, self.tensor, "model.weight")]
        return BackgroundSave(
            holes,
            self,
            self.tasks,
            self.pace,
            self.sealed.set,
            self.failures.append,
            timeout_s,
        )


def test_the_optimizer_waits_for_the_copy_and_only_then_changes_the_weights() -> None:
    slow, gate = Slow(), Gate()
    weight = torch.nn.Parameter(slow.tensor)
    slow.tensor = weight.detach()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(4)
    gate.watch([optimizer])
    gate.save = slow.start()
    step = threading.Thread(target=optimizer.step)
    step.start()
    step.join(0.2)
    assert step.is_alive()
    assert weight.tolist() == [1, 1, 1, 1]
    slow.may_copy.set()
    step.join(WAIT_S)
    gate.save.wait()
    assert slow.copied == [[1, 1, 1, 1]]
    assert weight.tolist() == [0, 0, 0, 0]
    assert slow.sealed.is_set()
    gate.close()


def test_a_copy_hurries_once_somebody_waits_for_it() -> None:
    slow = Slow()
    save = slow.start()
    assert (slow.pace.bytes_per_s, save.room_s) == (1e9, 0)
    change = threading.Thread(target=save.let_change)
    change.start()
    until(lambda: slow.pace.bytes_per_s == 0, WAIT_S)
    room_s = save.room_s
    assert room_s > 0
    slow.may_copy.set()
    change.join(WAIT_S)
    save.wait()
    assert save.room_s == room_s


def test_a_copy_takes_half_of_the_time_that_it_has_if_it_must() -> None:
    assert gentle_pace(10**9, room_s=0.0).bytes_per_s == 0  # The first: nobody knows.
    assert gentle_pace(10**9, room_s=60.0).bytes_per_s == GENTLE_BYTES_PER_S
    assert gentle_pace(10**9, room_s=0.1).bytes_per_s == 2e10


def test_a_load_into_the_model_waits_too() -> None:
    slow, gate = Slow(), Gate()
    model = torch.nn.Linear(2, 2)
    gate.watch([model])
    gate.save = slow.start()
    load = threading.Thread(target=model.load_state_dict, args=(model.state_dict(),))
    load.start()
    load.join(0.2)
    assert load.is_alive()
    slow.may_copy.set()
    load.join(WAIT_S)
    assert not load.is_alive()
    gate.save.wait()
    gate.close()


def test_a_tensor_that_changed_past_the_hooks_is_named_and_nothing_is_sealed() -> None:
    slow = Slow()
    save = slow.start()
    slow.tensor.add_(1)
    slow.may_copy.set()
    save.wait()
    assert not slow.sealed.is_set()
    (failure,) = slow.failures
    assert "model.weight was changed while it was copied" in failure


def test_a_copy_that_hangs_lets_the_training_go_on_and_is_not_sealed() -> None:
    slow = Slow()
    save = slow.start(timeout_s=0.2)
    save.let_change()
    slow.tensor.add_(1)
    slow.may_copy.set()
    save.wait()
    assert save.problem
    assert not slow.sealed.is_set()


def test_hooks_are_gone_after_close(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Checkpointer(tmp_path, overlap=True) as checkpointer:
        assert checkpointer.save(1, {"w": weight}, optimizer).taken
    slow, gate = Slow(), Gate()
    gate.watch([optimizer])
    gate.save = slow.start()
    gate.close()
    weight.grad = torch.ones(2)
    optimizer.step()
    slow.may_copy.set()
    gate.save.wait()


def test_files_of_a_framework_are_copied_before_the_save_returns(tmp_path: Path) -> None:
    """torch.save knows storages, not tensors: no version counter would tell of a change."""
    first, last = torch.zeros(16 * 2**20), torch.zeros(1000)
    with Checkpointer(tmp_path, overlap=True) as checkpointer:
        assert checkpointer.save_files(1, {"own.pt": {"first": first, "last": last}}).taken
        last += 1
        first[-1] = 1
        with checkpointer.load_files() or pytest.fail("nothing was saved") as files:
            loaded = torch.load(memory_file(files.file("own.pt")), weights_only=True)
    assert not loaded["last"].any()
    assert not loaded["first"].any()


def test_background_saves_of_a_real_training_are_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512))
    optimizer = torch.optim.Adam(model.parameters())
    copies: dict[int, list[torch.Tensor]] = {}
    with Checkpointer(tmp_path, overlap=True) as checkpointer:
        for step in range(6):
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            copies[step] = [tensor.clone() for tensor in model.state_dict().values()]
            assert checkpointer.save(step, model, optimizer).taken
        assert checkpointer.load(model, optimizer) == 5
    assert all(map(torch.equal, copies[5], model.state_dict().values()))


# ---- accelerators, by a device that the test plays -----------------------------------------------


class FakeEvent:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device

    def synchronize(self) -> None:
        self._device.run_side_stream()


class FakeDevice:
    """Two queues, as an accelerator has: what is queued happens when the test lets it."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.side: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits: list[Event] = []

    def pin(self, address: int, length: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = length

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        self.side += copies
        return FakeEvent(self)

    def wait(self, event: Event) -> None:
        self.waits.append(event)

    def run_side_stream(self) -> None:
        for target, _ in self.side:
            target.fill_(7)
        self.side = []


@pytest.fixture
def placed() -> list[Placed]:
    """A tensor on a device without memory, and one in host memory."""
    leaves = [Leaf("host", torch.ones(3)), Leaf("device", torch.empty(3, device="meta"))]
    image, _ = safetensors_image("x", leaves)
    buffer = memoryview(bytearray(image.length))
    return [Placed(hole, buffer, 1 << 20) for hole in image.holes]


def test_tensors_of_a_device_are_queued_and_the_device_holds_changes_back(
    placed: list[Placed],
) -> None:
    device = FakeDevice()
    stager = DeviceStager(lambda: device)
    stager.mapped(1 << 20, 5000)
    staged = stager.stage(placed)
    assert device.pinned == {1 << 20: 5000}
    assert len(staged.tasks) == 1
    assert len(device.side) == 1
    staged.hold_back_changes()
    assert len(device.waits) == 1
    hole = placed[1].hole
    seen = tensor_at(placed[1].file, hole.offset, torch.float32, (3,))
    assert seen.tolist() == [0, 0, 0]
    staged.finish()
    assert seen.tolist() == [7, 7, 7]
    stager.stage(placed)
    stager.unmapping(1 << 20)
    assert device.pinned == {}


def test_without_a_device_no_device_is_touched() -> None:
    def must_not_be_made() -> Any:
        raise AssertionError("there is no device")

    image, _ = safetensors_image("x", [Leaf("a", torch.ones(3)), Leaf("b", torch.ones(3, 3).t())])
    target = memoryview(bytearray(image.length))
    fill(image, target)
    for stager in (DeviceStager(must_not_be_made), HostStager()):
        staged = stager.stage([Placed(hole, target, 0) for hole in image.holes])
        assert len(staged.tasks) == 2

# SPDX-License-Identifier: Apache-2.0
"""The agreement of all ranks on what to load, and the parts while they are read.

Every rank first checks that a version fits, then takes its bytes, and confirms only if they are
those that were saved. Only when all ranks have taken the same version do they go on with it. So
either every rank has the same step or none has any; and a rank goes on with the bytes that were
verified, not with those that were in shared memory some time before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.checkpoint.copier import Copier, Task
from holdfast.checkpoint.filling import take
from holdfast.checkpoint.slots import Slot, SlotMeta
from holdfast.client.vault import VaultClient
from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.model.errors import RejectedError, StateError, UsageError
from holdfast.protocol.checkpoints import RestorePlan
from holdfast.torch.checkpoint.mappings import MappedSlots

TURNS_MAX = 1000
"""Each turn rules out a copy or ends the agreement; no job needs this many."""

NONSENSE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that an index with a wrong byte may cause."""


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part that can be read here, verified."""

    asked: str
    part: str
    """The part that it really is: another rank's, if the requested one is lost or never existed."""
    source: str
    """ "memory", "peer", "parity" or "storage"."""
    slot: Slot
    meta: SlotMeta
    digest: int
    """The digest of the slot's data when it was saved; -1 if it is not known."""

    def names(self) -> list[str]:
        """The files in it."""
        return [file.name for file in self.meta.files]

    def file(self, name: str) -> memoryview:
        """The bytes of a file, read only; no object may refer to them after the load."""
        return self.slot.file(name)


class Parts:
    """The parts of the version that is being restored, opened on request."""

    def __init__(
        self,
        client: VaultClient,
        slots: MappedSlots,
        version: Version,
        shape: Shape,
        copier: Copier,
        timeout_s: float,
    ) -> None:
        self.version = version
        self.shape = shape
        """The shape of what is restored: its world size is that of the world that saved."""
        self.rank = client.place.rank
        self.world_size = client.place.world_size
        self._client = client
        self._slots = slots
        self._copier = copier
        self._timeout_s = timeout_s
        self._open: dict[str, OpenPart] = {}
        self._bad: set[str] = set()
        self.is_taken = False
        """Whether any bytes were copied out of them."""

    def open(self, names: Sequence[str]) -> dict[str, OpenPart]:
        """Bring these parts here. RejectedError, StateError: one of them is not available."""
        missing = [name for name in names if name not in self._open]
        if missing:
            for opened in self._client.open_parts(self.version, missing):
                slot = self._slots.get(opened.path)
                meta = slot.read()
                if meta is None or meta.version != self.version:
                    raise StateError(
                        f"part {opened.part} of step {self.version.step} was overwritten in memory"
                    )
                self._open[opened.asked] = OpenPart(
                    opened.asked, opened.part, opened.source, slot, meta, opened.digest
                )
        return {name: self._open[name] for name in names}

    def take(self, tasks: Sequence[Task] = ()) -> None:
        """Copy out of the opened parts. Without tasks: check that the bytes are still the same.

        StateError: the bytes are not those that were saved. The digest comes with the copy.
        """
        self.is_taken = self.is_taken or bool(tasks)
        parts = list({part.part: part for part in self._open.values()}.values())
        slots = [(part.slot.data, part.slot.address, part.meta.data_length) for part in parts]
        digests = take(self._copier, slots, tasks, self._timeout_s)
        for part, digest in zip(parts, digests, strict=True):
            if part.digest not in (-1, digest):
                self._bad.add(part.part)
        if self._bad:
            raise StateError(
                f"the bytes of {', '.join(sorted(self._bad))} of step {self.version.step} changed "
                f"in memory after they were saved"
            )

    def close(self) -> None:
        """Everything has been read. StateError: an object still refers to the memory."""
        parts, self._open = self._open, {}
        for part in parts.values():
            part.slot.release_views()
        self._client.close_parts(sorted(self._bad))


class Loading(Protocol):
    """Loads a checkpoint into live objects, in three steps."""

    def prepare(self, parts: Parts) -> None:
        """Open what is needed and check that it fits, without changing live objects.

        UsageError: it does not fit. RejectedError, StateError: the ranks must try another version.
        Then this is called again.
        """

    def take(self) -> None:
        """Copy the bytes into live tensors and other objects of this process, by `Parts.take`.

        StateError: they are not those that were saved. Another version would overwrite them.
        """

    def fill(self) -> dict[str, object]:
        """Complete the live objects, when all ranks have taken the version; returns the other saved
        values: "extra", "data", "rng", and in a process without an agent "positions" of its
        data."""


def agree(
    client: VaultClient,
    slots: MappedSlots,
    loading: Loading,
    step: int,
    copier: Copier,
    timeout_s: float,
) -> tuple[RestorePlan, Parts | None]:
    """Agree on one version with all other ranks. With no parts there is nothing to restore.

    The caller closes the parts.
    """
    parts: Parts | None = None
    is_changed = False
    plan = client.restore(step=step, timeout_s=timeout_s)
    try:
        for _ in range(TURNS_MAX):
            prepared = NONE if parts is None else parts.version
            if plan.go:
                if plan.version != prepared:
                    raise StateError(
                        f"step {plan.version.step} was agreed on but step {prepared.step} is ready"
                    )
                if is_changed and parts is None:
                    raise StateError(
                        "no checkpoint could be restored, and the model has bytes of one that "
                        "another rank could not have: this process has to start again"
                    )
                agreed, parts = parts, None
                return plan, agreed
            problem, tried = "", plan.version
            if plan.version != prepared:
                if parts is not None:
                    parts.close()
                    parts = None
                if plan.version != NONE:
                    parts = Parts(client, slots, plan.version, plan.shape, copier, timeout_s)
                    problem = _problem(loading, parts)
                    is_changed = is_changed or parts.is_taken
                if problem and parts is not None:
                    parts.close()
                    parts = None
            plan = client.restore(
                prepared=NONE if parts is None else parts.version,
                problem=problem,
                tried=tried if problem else NONE,
                step=step,
                timeout_s=timeout_s,
            )
        raise StateError(f"the ranks did not agree on a checkpoint in {TURNS_MAX} turns")
    finally:
        if parts is not None:
            parts.close()


def _problem(loading: Loading, parts: Parts) -> str:
    """Why this rank cannot take the version; empty if it has taken it."""
    try:
        _take(loading, parts)
    except (RejectedError, StateError) as exc:
        return str(exc)
    return ""


def _take(loading: Loading, parts: Parts) -> None:
    try:
        loading.prepare(parts)
        loading.take()
    except (StateError, UsageError, *NONSENSE):
        # A part that does not fit may be damaged; then the user does not have to do anything.
        parts.take()
        raise

# SPDX-License-Identifier: Apache-2.0
"""What a training process asks the keeper of its memory checkpoints, as plain blocking calls.

The keeper is the vault in the agent. Without an agent (plain python, torchrun) the first process
of the node starts one of its own: see client/standalone.py.
"""

from collections.abc import Sequence
from pathlib import Path

from holdfast.client.connection import AgentClient
from holdfast.client.standalone import join_standalone
from holdfast.model.checkpoint import NONE, Series, Shape, Version
from holdfast.model.errors import RetryableError, TimedOutError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.data import Mark
from holdfast.runtime.settings import WorkerPlace, worker_place, worker_settings
from holdfast.runtime.token import read_token

ANSWER_S = 60.0
"""The limit for requests that the vault answers out of its own memory."""

SLOT_S = 90.0
"""The limit for a slot: longer than the vault waits for one to become free."""

TELL_S = 5.0
"""The limit for reports that may be lost: an agent that does not answer has cost enough time."""

AGREE_S = 600.0
"""The limit for requests that need every rank, or bytes from another node or storage."""


class VaultClient:
    """The vault as one rank sees it, for one series. Any thread and any forked child may use it."""

    def __init__(self, agent: AgentClient, place: WorkerPlace, *, is_standalone: bool) -> None:
        self.place = place
        self.is_standalone = is_standalone
        """True when no agent watches over this process: then nothing outlives its launcher."""
        self._agent = agent
        self._directory = ""

    def open_series(self, series: Series) -> None:
        """Say where checkpoints go and how they are kept. The first call; binds this client to
        them."""
        place = self.place
        self._directory = series.directory
        request = c.SeriesOpen(
            series, place.local_rank, place.rank, place.world_size, round=place.round
        )
        self._agent.ask(request, m.Done, ANSWER_S)

    def reserve(self, part: str, size: int) -> tuple[str, ...]:
        """Have the memory for a part of `size` bytes set aside and faulted in, in the background.

        Returns the slots' paths, to be mapped early. RejectedError says why there is not enough.
        """
        request = c.SlotReserve(self._directory, part, size)
        return self._agent.ask(request, c.SlotsReserved, ANSWER_S).paths

    def slot(
        self,
        part: str,
        step: int,
        size: int,
        untouched: tuple[str, ...] = (),
        *,
        persist: bool = False,
    ) -> c.SlotGrant:
        """Where to write this part of this step; a slot of `untouched` only if there is no other.

        `persist`: it goes to storage, so that a slot on disk will do. RejectedError: there is no
        room.
        """
        request = c.SlotAsk(self._directory, part, step, size, untouched, persist)
        return self._agent.ask(request, c.SlotGrant, SLOT_S)

    def sealed(
        self,
        part: str,
        version: Version,
        shape: Shape,
        path: str,
        *,
        persist: bool,
        waited_s: float = 0.0,
        marks: tuple[Mark, ...] | None = None,
        digest: int = -1,
    ) -> None:
        """Say that the slot is sealed; with `persist` the whole step goes to storage.

        `waited_s`: how long the training waited for it, for the metrics. `marks`: how far this rank
        was in data that follow the series, with its own part; None: there are none.
        `digest`: of the slot's data; -1 if it is not known yet.
        """
        request = c.SlotSealed(
            self._directory,
            part,
            version,
            shape,
            path,
            persist,
            waited_s,
            follows=marks is not None,
            marks=marks or (),
            digest=digest,
        )
        self._agent.ask(request, m.Done, ANSWER_S)

    def save_failed(self, step: int, why: str) -> None:
        """Say that this step could not be saved, so that people hear of it."""
        self._agent.ask(c.SaveFailed(self._directory, step, why), m.Done, TELL_S)

    def restore(
        self,
        *,
        prepared: Version = NONE,
        problem: str = "",
        tried: Version = NONE,
        fresh: bool = False,
        step: int = -1,
        timeout_s: float = AGREE_S,
    ) -> c.RestorePlan:
        """One turn of the agreement of all ranks on what to restore: see protocol.RestoreAsk.

        TimedOutError if the other ranks do not come to it in time.
        """
        place = self.place
        request = c.RestoreAsk(
            directory=self._directory,
            round=place.round,
            local_rank=place.local_rank,
            prepared=prepared,
            problem=problem,
            tried=tried,
            fresh=fresh,
            step=step,
        )
        try:
            return self._agent.ask(request, c.RestorePlan, timeout_s)
        except RetryableError as exc:
            raise TimedOutError(
                f"the {place.world_size} ranks did not agree on a checkpoint within "
                f"{timeout_s:g} s: does every rank call load, or save, as this one does?"
            ) from exc

    def open_parts(
        self, version: Version, parts: Sequence[str], timeout_s: float = AGREE_S
    ) -> tuple[c.OpenedPart, ...]:
        """Make these parts of the last plan's version readable in slots of this node.

        RejectedError says why one of them cannot be had.
        """
        request = c.PartsOpen(self._directory, version, tuple(parts), self.place.local_rank)
        return self._agent.ask(request, c.PartsOpened, timeout_s).parts

    def close_parts(self, bad: Sequence[str] = ()) -> None:
        """Say that the opened parts have been read, and which of them were not as they were
        saved."""
        request = c.PartsClose(self._directory, self.place.local_rank, tuple(bad))
        self._agent.ask(request, m.Done, ANSWER_S)

    def wait(self, timeout_s: float) -> c.PersistState:
        """Wait until nothing of this series is on its way to storage; TimedOutError if that takes
        longer."""
        request = c.PersistWait(self._directory, timeout_s)
        return self._agent.ask(request, c.PersistState, timeout_s)

    def remove(self, steps: Sequence[int]) -> None:
        """Remove committed steps from storage, but never the newest."""
        self._agent.ask(c.StepsRemove(self._directory, tuple(steps)), m.Done, AGREE_S)

    def close(self) -> None:
        """Close the connections; the vault goes on with what it was told."""
        self._agent.close()


def connect_vault() -> VaultClient:
    """The vault of this node: the agent's, or one that the processes of this node start."""
    place = worker_place()
    settings = worker_settings()
    if settings is None:
        return VaultClient(join_standalone(place), place, is_standalone=True)
    agent = AgentClient(
        settings.socket, read_token(Path(settings.token_file)), scope=settings.round
    )
    return VaultClient(agent, place, is_standalone=False)

# SPDX-License-Identifier: Apache-2.0
"""A Checkpointer that data follow: what it asks of them, and what it tells the vault."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.agent.relay import Relay
from holdfast.agent.vault.vault import Vault
from holdfast.client.data import DataShards
from holdfast.model.errors import UsageError
from holdfast.protocol.data import Consumed, DataMarked, Mark
from holdfast.runtime.token import make_token
from holdfast.runtime.transport import listen
from holdfast.torch import Checkpointer
from tests.hearing import Heard
from tests.integration.patient_master import PatientMaster

Run = Callable[[Callable[[Checkpointer], None]], list[tuple[Mark, ...]]]


class Source:
    """Data of which a test says how far they are."""

    def __init__(self) -> None:
        self.leases: dict[int, int] = {}
        self.restores = 0

    def marks(self) -> tuple[Mark, ...]:
        said, self.leases = self.leases, {}
        return (Mark("train", 1, tuple(Consumed(*one) for one in said.items())),)

    def restored(self) -> None:
        self.restores += 1

    def state_dict(self) -> dict[str, Any]:
        return {"name": "train"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("under an agent the position is in the commit")


def mark(leases: dict[int, int]) -> tuple[Mark, ...]:
    return (Mark("train", 1, tuple(Consumed(*one) for one in leases.items())),)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a program of one worker under a vault; what the master heard of its data."""
    memory, token = tmp_path / "memory", tmp_path / "token"
    memory.mkdir()
    environment = {
        "HOLDFAST_MEMORY_DIR": str(memory),
        "HOLDFAST_SOCKET": f"unix:{tmp_path}/vault.sock",
        "HOLDFAST_TOKEN_FILE": str(token),
        "HOLDFAST_ROUND": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def under_a_vault(program: Callable[[], None]) -> list[tuple[Mark, ...]]:
        secret, master = make_token(token), PatientMaster()
        async with contextlib.AsyncExitStack() as stack:
            vault = Vault(master, Heard(), secret, 1)
            stack.push_async_callback(vault.close)
            server = await listen(environment["HOLDFAST_SOCKET"], Relay(master, vault), secret)
            stack.push_async_callback(server.close)
            vault.begin_round(1, 0)
            await asyncio.to_thread(program)
            return [body.marks[0] for body in master.said(DataMarked)]

    def with_a_checkpointer(program: Callable[[Checkpointer], None]) -> list[tuple[Mark, ...]]:
        def checkpointed() -> None:
            with Checkpointer(tmp_path / "saves", breakpoint=False, slots=4) as checkpointer:
                program(checkpointer)

        work: Coroutine[None, None, list[tuple[Mark, ...]]] = under_a_vault(checkpointed)
        return asyncio.run(work)

    return with_a_checkpointer


@pytest.mark.parametrize("overlap", [False, True])
def test_the_position_at_the_moment_of_the_save_goes_with_it(run: Run, overlap: bool) -> None:
    source, model = Source(), torch.nn.Linear(2, 2)

    def program(checkpointer: Checkpointer) -> None:
        checkpointer.follow(source)
        assert checkpointer.load(model=model) is None
        assert source.restores == 1
        for step in (1, 2):
            source.leases = {7: 10 * step}
            assert checkpointer.save(step, model=model, overlap=overlap).taken
            source.leases = {7: 10 * step + 5}

    assert run(program) == [mark({7: 10}), mark({7: 20})]


def test_what_a_failed_save_said_is_said_with_the_next(run: Run) -> None:
    """A lease that ended is named once: were it lost, its samples would be trained again."""
    source, model = Source(), torch.nn.Linear(2, 2)

    def program(checkpointer: Checkpointer) -> None:
        checkpointer.follow(source)
        checkpointer.load(model=model)
        source.leases = {7: 100, 8: 1}
        assert not checkpointer.save(1, model=too_large()).taken
        source.leases = {8: 20}
        assert checkpointer.save(2, model=model).taken

    assert run(program) == [mark({7: 100, 8: 20})]


def too_large() -> torch.nn.Module:
    """More than any machine has, without a byte of memory."""
    return torch.nn.ParameterDict({"w": torch.zeros(1).expand(1 << 44)})


def test_data_must_be_brought_to_the_model_before_anything_is_saved(run: Run) -> None:
    model = torch.nn.Linear(2, 2)

    def program(checkpointer: Checkpointer) -> None:
        checkpointer.follow(Source())
        with pytest.raises(UsageError, match=r"call load\(\) before the first save"):
            checkpointer.save(1, model=model)

    assert run(program) == []


def test_data_that_come_too_late_are_refused(run: Run) -> None:
    def program(checkpointer: Checkpointer) -> None:
        checkpointer.load()
        with pytest.raises(UsageError, match="before its first save or load"):
            checkpointer.follow(Source())

    assert run(program) == []


def test_without_a_master_only_a_process_on_its_own_may_have_data_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    Checkpointer(tmp_path).follow(Source())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="The 4 processes of this training have no master"):
        Checkpointer(tmp_path).follow(Source())


def test_a_process_on_its_own_saves_where_its_data_are(tmp_path: Path) -> None:
    """Nobody has to think of it: data that follow a Checkpointer are in what it saves."""
    model = torch.nn.Linear(2, 2)

    def begun(checkpointer: Checkpointer) -> DataShards:
        return DataShards(
            "train", size=100, shard_size=30, shuffle="samples", checkpointer=checkpointer
        )

    with Checkpointer(tmp_path / "saves") as checkpointer:
        shards = begun(checkpointer)
        assert checkpointer.load(model=model) is None
        reading = shards.batches(16)
        before = [int(record) for _ in range(3) for record in next(reading)]
        assert checkpointer.save(3, model=model).taken
        next(reading)
        # Back in the same process, too.
        assert checkpointer.load(model=model) == 3
        fourth = next(shards.batches(16)).tolist()
        checkpointer.wait(120.0)
    with Checkpointer(tmp_path / "saves") as checkpointer:
        shards = begun(checkpointer)
        assert checkpointer.load(model=model) == 3
        after = [int(record) for batch in shards.batches(16) for record in batch]
    assert sorted(before + after) == list(range(100))
    assert fourth == after[:16]


def test_a_process_on_its_own_cannot_save_files_without_the_position_of_its_data(
    tmp_path: Path,
) -> None:
    with Checkpointer(tmp_path / "saves") as checkpointer:
        DataShards("train", size=100, checkpointer=checkpointer)
        for use in (lambda: checkpointer.save_files(1, {"a": b"b"}), checkpointer.load_files):
            with pytest.raises(UsageError, match=r"only save\(\) and load\(\) keep their position"):
                use()

# SPDX-License-Identifier: Apache-2.0
"""What a vault tells the master of the data of its ranks, at every version that they save."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from holdfast.model.checkpoint import Version
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.data import DataMarked
from tests.integration.vault_node import mark, node

DIR = "/checkpoints"
Run = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(memory))
    return asyncio.run


def test_one_word_for_all_ranks_of_a_node_before_the_version_goes_to_storage(
    tmp_path: Path, run: Run
) -> None:
    async def saves() -> None:
        async with node(tmp_path, DIR) as here:
            await here.save(0, 1, {7: 20}, persist=True)
            assert here.master.said(DataMarked) == []
            await here.save(1, 1, {8: 5}, persist=True)
            (ask,) = await here.master.hears(c.PersistAsk, 1)
            (marked,) = here.master.said(DataMarked)
            told = list(here.master.calls.values())
            assert told.index(marked) < told.index(ask)
            assert marked == DataMarked(
                DIR, 1, Version(0, 1), {0: mark({7: 20}), 1: mark({8: 5})}, 2, (Version(0, 1),)
            )

    run(saves())


def test_no_rank_waits_for_the_master(tmp_path: Path, run: Run) -> None:
    """The prior art's workers ask the master in their training loop, and stand still without it."""

    async def saves() -> None:
        async with node(tmp_path, DIR) as here:
            for step in range(1, 20):
                await here.save_both(step, {7: step})
            # Of what is not in memory any more nobody asks: the master gets two words, not twenty.
            await here.master.hears(DataMarked, 2)
            assert [body.version.step for body in here.master.said(DataMarked)] == [18, 19]

    run(saves())


def test_what_is_not_confirmed_is_said_again(tmp_path: Path, run: Run) -> None:
    """A lease that ended is named once by its rank. Another rank's save of that step failed."""

    async def saves() -> None:
        async with node(tmp_path, DIR) as here:
            await here.save_both(1, {7: 100, 8: 3})
            await here.save_both(2, {8: 30})
            first, second = await here.master.hears(DataMarked, 2)
            assert second.marks[0] == mark({7: 100, 8: 30})
            # Not every node marked step 1.
            here.master.answer(first, m.Refused("stale", "step 1 was overtaken"))
            here.master.answer(second, m.Done())
            await here.save_both(3, {8: 40})
            third = (await here.master.hears(DataMarked, 3))[-1]
            assert third.marks[0] == mark({8: 40})

    run(saves())


def test_what_left_the_memory_unconfirmed_is_said_with_the_next(tmp_path: Path, run: Run) -> None:
    async def saves() -> None:
        async with node(tmp_path, DIR) as here:
            await here.save_both(1, {7: 100})
            for step in (2, 3, 4, 5):
                await here.save_both(step, {8: step})
            newest = (await here.master.hears(DataMarked, 2))[-1]
            assert newest.marks[0] == mark({7: 100, 8: 5})
            assert newest.held == (Version(0, 4), Version(0, 5))

    run(saves())


def test_a_node_whose_ranks_read_nothing_says_so_when_others_read(tmp_path: Path, run: Run) -> None:
    async def saves(follows: bool) -> None:
        async with node(tmp_path, DIR, follows=follows) as here:
            for rank in (0, 1):
                await here.save(rank, 1, None, persist=True)
            await here.master.hears(c.PersistAsk, 1)
            marks = [body.marks for body in here.master.said(DataMarked)]
            assert marks == ([{0: (), 1: ()}] if follows else [])

    for follows in (True, False):
        run(saves(follows))

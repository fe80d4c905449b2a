# SPDX-License-Identifier: Apache-2.0
"""A death at any byte of a copy, of a worker or of its agent, loses no checkpoint."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.arena import Arena
from tests.integration.jobs import ROOT
from tests.integration.slot_kills import check

KILLS = 300


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", [1])
def test_a_worker_killed_at_any_byte_leaves_a_whole_checkpoint(memory: Path, seed: int) -> None:
    """The prior art copies into one buffer without a mark that it is being written."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.integration.slot_kills", str(memory), str(KILLS), str(seed)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    said = re.fullmatch(r"(\d+) kills, (\d+) during a copy, (\d+) steps saved\n", run.stdout)
    assert said is not None, run.stdout
    assert int(said[2]) >= KILLS // 4, "too few of the kills hit a copy to prove anything"
    assert int(said[3]) >= KILLS
    assert list(memory.iterdir()) == []


AGENT = """
import sys
from pathlib import Path
from holdfast.checkpoint.arena import Arena, PartKey
from holdfast.checkpoint.copier import Copier, Copy
from holdfast.checkpoint.memory import address_of
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version
from tests.integration.slot_kills import KEY, size_of, state_at

arena = Arena(Path(sys.argv[1]), "cats", "node-0")
arena.reserve(PartKey("/ckpt", "rank-00000"), 100 << 20, 2)
for step in range(1000000):
    path = arena.grant(KEY, size_of(step), 2)
    files = state_at(step)
    with Slot.open(path, writable=True) as slot:
        placed, _ = lay_out((name, len(content)) for name, content in files.items())
        slot.begin(Version(1, step))
        for file in placed:
            slot.data[file.offset : file.offset + file.length] = files[file.name]
        slot.seal(SlotMeta("/ckpt", "shared", Version(1, step), Shape(1, True), placed))
    arena.sealed(path)
    print(step, flush=True)
"""


def test_what_a_killed_agent_held_is_adopted_by_the_next(memory: Path) -> None:
    """The prior art's memory stays behind for ever, or is taken over by whoever has its name."""
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(memory)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stdout is not None
        for line in agent.stdout:
            if int(line) == 50:
                break
        while_alive = Arena(memory, "cats", "early")
        assert while_alive.adopt() == []
        agent.kill()
        reported = max(50, *map(int, agent.stdout.read().split()), 0)
        assert agent.wait(120) == -signal.SIGKILL
    while_alive.close()
    heir = Arena(memory, "cats", "node-0b")
    heir.adopt()
    check(heir, reported, reported + 1)
    heir.close()
    assert list(memory.iterdir()) == []

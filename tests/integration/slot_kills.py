# SPDX-License-Identifier: Apache-2.0
"""An agent and its workers, of which one after the other is killed while it copies.

`python -m tests.integration.slot_kills MEMORY_DIR KILLS SEED` runs the agent: the real arena. Each
worker is forked from it and saves step after step, of changing sizes, through the real copier, as
fast as it can. Half of them end themselves with SIGKILL at a random byte of a copy, the other half
are killed from outside after a random time. After every death the agent reads its slots: there
must be a sealed one, none older than the last that was reported, and each must hold exactly what
was saved. Prints how the workers died.
"""

import contextlib
import os
import random
import select
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from holdfast.checkpoint.arena import Arena, Busy, PartKey
from holdfast.checkpoint.copier import Copier, Copy, Task
from holdfast.checkpoint.memory import address_of
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version

KEY = PartKey("/ckpt", "shared")
WAIT_S = 120.0


def state_at(step: int) -> dict[str, bytes]:
    """What a step consists of: every byte tells the step, sizes differ from step to step."""
    sizes = random.Random(step)
    word = step.to_bytes(8, "little")
    return {name: word * sizes.randrange(1, 30_000) for name in ("model", "optimizer")}


def size_of(step: int) -> int:
    return lay_out((name, len(content)) for name, content in state_at(step).items())[1]


def worker(
    asks: int, answers: BinaryIO, first_step: int, chance: random.Random, dies_after: int
) -> None:
    """Save for ever, or until a chosen copy, in the middle of which it ends itself."""
    copier = Copier(threads=2)
    step = first_step
    while True:
        os.write(asks, b"a%d\n" % step)
        path = Path(answers.readline().decode().strip())
        with Slot.open(path, writable=True) as slot:
            files = state_at(step)
            placed, length = lay_out((name, len(content)) for name, content in files.items())
            version = Version(1, step)
            slot.begin(version)
            tasks: list[Task] = []
            for file in placed:
                source = address_of(memoryview(files[file.name]))
                target = slot.address + file.offset
                cut = chance.randrange(file.length + 1)
                tasks.append(Copy(source, target, cut))
                if step - first_step == dies_after:
                    tasks.append(lambda: os.kill(os.getpid(), signal.SIGKILL))
                tasks.append(Copy(source + cut, target + cut, file.length - cut))
            copier.run(tasks, WAIT_S)
            slot.seal(SlotMeta(KEY.directory, KEY.part, version, Shape(1, True), placed))
            assert length <= slot.capacity
        os.write(asks, f"s{path}\n".encode())
        step += 1


def one_life(arena: Arena, chance: random.Random, first_step: int) -> tuple[int, int]:
    """A worker from its fork to its death. The last step it reported, and the last it began."""
    asks, tell = os.pipe()
    hear, answers = os.pipe()
    # Half of them end themselves; the others are killed at any moment after their first step.
    dies_after = chance.randrange(1, 6) if chance.random() < 0.5 else -1
    pid = os.fork()
    if pid == 0:
        os.close(asks)
        os.close(answers)
        with open(hear, "rb") as answers_to_me:
            worker(tell, answers_to_me, first_step, random.Random(chance.random()), dies_after)
    os.close(tell)
    os.close(hear)
    reported, begun = first_step - 1, first_step - 1
    granted: Path | None = None
    lives_s = WAIT_S
    with open(asks, "rb", buffering=0) as requests:
        while True:
            if not select.select([requests], [], [], lives_s)[0]:
                os.kill(pid, signal.SIGKILL)
            line = requests.readline().decode()
            if not line:
                break
            if line.startswith("a"):
                begun = int(line[1:])
                answer = arena.grant(KEY, size_of(begun), 2)
                assert not isinstance(answer, Busy), answer.why
                granted = answer
                with contextlib.suppress(BrokenPipeError):  # It may be dead already.
                    os.write(answers, f"{granted}\n".encode())
            else:
                reported = arena.sealed(line[1:].strip()).meta.version.step
                granted = None
                if dies_after < 0:
                    lives_s = 0.004 * chance.random()
    os.close(answers)
    os.waitpid(pid, 0)
    if granted is not None:
        arena.give_back(granted)
    return reported, begun


def check(arena: Arena, reported: int, begun: int) -> int:
    """The newest step that is there, after everything that is there was read."""
    held = arena.holdings(KEY.directory)
    for one in held:
        with Slot.open(one.path, writable=False) as slot:
            meta = slot.read()
            assert meta == one.meta
            found = {file.name: bytes(slot.file(file.name)) for file in one.meta.files}
        assert found == state_at(one.meta.version.step), f"step {one.meta.version.step} is torn"
    newest = held[0].meta.version.step if held else -1
    assert reported <= newest <= begun, (reported, newest, begun)
    return newest


def main(memory_dir: str, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    arena = Arena(Path(memory_dir), "cats", "node-0")
    next_step = 0
    torn = 0
    try:
        for _ in range(kills):
            reported, begun = one_life(arena, chance, next_step)
            newest = check(arena, reported, begun)
            torn += newest < begun
            next_step = newest + 1
    finally:
        arena.close()
    print(f"{kills} kills, {torn} during a copy, {next_step} steps saved")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

# SPDX-License-Identifier: Apache-2.0
"""A training without torch: its state is a pattern of bytes that tells its step, rank by rank.

Every step it saves the state through the vault; at its start it restores what all ranks agree on
and proves that each byte is the one that was saved.
"""

import hashlib
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from multiplies import multiply
from steplog import FOLDER, RANK, ROUND, WORLD, fault, hold, is_to_finish, meet, note, pause

from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.client import current
from holdfast.client.vault import VaultClient, connect_vault
from holdfast.model.checkpoint import NONE, SHARED, Series, Shape, Version, rank_part
from holdfast.model.errors import HoldfastError, RejectedError
from holdfast.protocol import messages as m

SIZE = int(os.environ.get("VAULT_SIZE", "300000"))
IS_SHARED = os.environ.get("VAULT_SHARED", "1") == "1"
EVERY = int(os.environ.get("VAULT_EVERY", "0"))
"""Every so many steps go to storage."""
MAY_LACK = bool(os.environ.get("VAULT_MAY_LACK"))
"""Whether it goes on without what finds no room."""
LOOKS_AHEAD = bool(os.environ.get("VAULT_AHEAD"))
"""Whether it waits until what it restores was mapped by Holdfast, which knew that it would."""
SHAPE = Shape(WORLD, IS_SHARED)
WANTED = [rank_part(RANK), *([SHARED] if IS_SHARED else [])]
START = os.environ["TORCHELASTIC_RESTART_COUNT"]
LAST = int(os.environ.get("STEPS", "0"))


def content(part: str, step: int) -> bytes:
    """What a part holds at a step; no two differ in a few bytes only."""
    word = f"{part} at step {step};".encode()
    return (word * (SIZE // len(word) + 1))[:SIZE]


def restore(vault: VaultClient) -> int:
    """The step that all ranks go on from; 0 if there is nothing."""
    prepared, problem, tried = NONE, "", NONE
    while True:
        plan = vault.restore(prepared=prepared, problem=problem, tried=tried)
        for text in plan.notes:
            note(f"says {text}")
        if plan.go:
            break
        prepared, problem, tried = NONE, "", plan.version
        if plan.version == NONE:
            continue
        try:
            opened = vault.open_parts(plan.version, WANTED)
            prepared = plan.version
        except HoldfastError as exc:
            problem = str(exc)
            note(f"cannot {exc}", plan.version.step)
    if plan.version == NONE:
        note("loaded", -1)
        return 0
    step = plan.version.step
    digest = hashlib.sha256()
    for part in opened:
        assert part.digest >= 0, f"{part}: nobody could tell whether it changes from now on"
        while LOOKS_AHEAD and part.path not in Path("/proc/self/maps").read_text():
            pause()
        with Slot.open(part.path, writable=False) as slot:
            meta = slot.read()
            assert meta is not None, part
            assert meta.version == plan.version, meta
            found = bytes(slot.file(f"{part.part}.bin"))
            assert found == content(part.part, step), part
            digest.update(found)
        note(f"from {part.source}", step)
    vault.close_parts()
    note("restored", step)
    note("loaded", step, digest.hexdigest())
    return step


def written_parts() -> list[str]:
    is_first = int(os.environ["LOCAL_RANK"]) == 0
    return [rank_part(RANK), *([SHARED] if IS_SHARED and is_first else [])]


def save(vault: VaultClient, step: int) -> None:
    persist = EVERY > 0 and step % EVERY == 0
    whole = b"".join(content(part, step) for part in WANTED)
    note("saves", step, hashlib.sha256(whole).hexdigest())
    for part in written_parts():
        files, length = lay_out([(f"{part}.bin", SIZE)])
        try:
            grant = vault.slot(part, step, length, persist=persist and MAY_LACK)
        except RejectedError:
            if not MAY_LACK:
                raise
            return
        version = Version(grant.lineage, step)
        data = content(part, step)
        with Slot.open(grant.path, writable=True) as slot:
            slot.begin(version)
            slot.data[: SIZE // 2] = data[: SIZE // 2]
            if step == 3:
                fault("copy")
            slot.data[SIZE // 2 : SIZE] = data[SIZE // 2 :]
            slot.seal(SlotMeta(DIRECTORY, part, version, SHAPE, files))
        if step == 3:
            fault("sealed")
        vault.sealed(part, version, SHAPE, grant.path, persist=persist)
    note("saved", step)


def count() -> None:
    """Draw numbers of the whole job beside the training, and note each that was acknowledged."""
    client = current()
    assert client is not None
    with suppress(HoldfastError):  # The end of the job.
        while True:
            drawn = client.ask(m.KvAdd(0, "drawn", 1), m.Number, 600.0)
            note("drawn", drawn.number)
            pause(0.02)


DIRECTORY = os.environ["VAULT_DIRECTORY"]
note("main")
vault = connect_vault()
vault.open_series(
    Series(
        DIRECTORY,
        slots=int(os.environ.get("VAULT_SLOTS", "2")),
        replicas=int(os.environ.get("VAULT_REPLICAS", "0")),
        parity=int(os.environ.get("VAULT_PARITY", "0")),
        keep_last=int(os.environ.get("VAULT_KEEP", "0")),
    )
)
for part in written_parts():
    with suppress(RejectedError):  # There is less room: then what there is has to do.
        vault.reserve(part, lay_out([(f"{part}.bin", SIZE)])[1])
step = restore(vault)
if os.environ.get("VAULT_COUNTS"):
    threading.Thread(target=count, daemon=True).start()
while not LAST or step < LAST:
    step += 1
    if "1" in meet(f"{START}-step-{step}", str(int(is_to_finish()))):
        break
    save(vault, step)
    note("step", step)
    if step == 4:
        meet(f"{START}-saved-4")
        fault("step")
    if os.environ.get("VAULT_MULTIPLIES") and (RANK, ROUND, step) == (0, 1, 5):
        (FOLDER / "children").write_text(str(multiply()))
        note("multiplied", step)
        os.kill(os.getpid(), signal.SIGKILL)
    hold(step)
    pause(0.01)
vault.close()
note("end", step)

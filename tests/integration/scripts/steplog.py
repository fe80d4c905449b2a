# SPDX-License-Identifier: Apache-2.0
"""What the workers of the tests share: their log, their faults and a meeting point of files."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

FOLDER = Path(os.environ["STEPS_FOLDER"])
LOG = os.open(FOLDER / "steps.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ROUND = int(os.environ.get("HOLDFAST_ROUND", "0"))
PAUSE_S = 0.005
STEP_S = 0.02
_PAUSE = threading.Event()


def note(what: str, step: int = 0, state: str = "") -> None:
    """Write one event down. One write of one line: O_APPEND keeps the lines of all ranks whole."""
    event = {
        "t": time.monotonic(),
        "what": what,
        "step": step,
        "rank": RANK,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "world": WORLD,
        "round": ROUND,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "pid": os.getpid(),
        "agent": os.getppid(),
        "node": os.environ.get("STEPS_NODE", ""),
        "state": state,
    }
    os.write(LOG, (json.dumps(event) + "\n").encode())


def pause(seconds: float = PAUSE_S) -> None:
    _PAUSE.wait(seconds)


def is_to_finish() -> bool:
    return (FOLDER / "finish").exists()


def hold(step: int) -> None:
    """Wait after the step that $HOLD names, once, until `Jobs.go` is called; after that of $STAY
    for ever."""
    while step == int(os.environ.get("STAY", "0")):
        pause()
    if step == int(os.environ.get("HOLD", "0")):
        while not (FOLDER / "go").exists():
            pause()


def leave() -> NoReturn:
    """End well and at once: to take torch apart keeps Python busy for a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def meet(name: str, text: str = "") -> list[str]:
    """Wait for all ranks of the round, as a collective does; answers with everybody's text."""
    folder = FOLDER / "meetings" / str(ROUND) / name
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{RANK}.tmp"
    own.write_text(text)
    own.rename(folder / str(RANK))
    everybody = [folder / str(rank) for rank in range(WORLD)]
    while not all(path.exists() for path in everybody):
        pause()
    return [path.read_text() for path in everybody]


def wait_for_the_end_of_others() -> None:
    """Until the processes of all other ranks of this round are gone and reaped."""
    text = (FOLDER / "steps.log").read_bytes()
    # Somebody may be in the middle of a line.
    lines = [json.loads(line) for line in text[: text.rfind(b"\n")].splitlines()]
    others = {line["pid"] for line in lines if line["round"] == ROUND and line["rank"] != RANK}
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        pause()


def restored_step() -> int:
    """The last step that was saved; 0 at first."""
    try:
        return int((FOLDER / "saved").read_text())
    except FileNotFoundError:
        return 0


def save(step: int) -> None:
    if RANK == 0:
        temporary = FOLDER / "saved.tmp"
        temporary.write_text(str(step))
        temporary.rename(FOLDER / "saved")


def fault(place: str) -> None:
    """Fail here, if $FAULTS says that it is the turn of this place and rank.

    "kill step 1;exit import 0" says how, where and which rank: each happens once, in this order,
    and only one in each round.
    """
    faults = [text.split() for text in os.environ.get("FAULTS", "").split(";") if text]
    done = len(list(FOLDER.glob("fault-*")))
    if done >= len(faults) or faults[done][1:] != [place, str(RANK)]:
        return
    if any(path.read_text() == str(ROUND) for path in FOLDER.glob("fault-*")):
        return
    # Never there without its round: another rank may look for the next fault right now.
    temporary = FOLDER / f"next-fault.{RANK}"
    temporary.write_text(str(ROUND))
    temporary.rename(FOLDER / f"fault-{done}")
    note("fault")
    fail(faults[done][0])


def fail(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            sys.exit(1)
        case "raise":
            raise RuntimeError(f"the loss of rank {RANK} is not a number")
        case _:
            raise ValueError(f"no such fault: {how}")

# SPDX-License-Identifier: Apache-2.0
"""A vault for processes that no agent started: the first one of the node starts it, all join it.

They meet in a private folder whose name they can all work out: the vault's socket and its token are
there. How long the vault lives is decided in agent/standalone.py.
"""

import fcntl
import hashlib
import os
import secrets
import select
import socket
import subprocess
import sys
from pathlib import Path

from holdfast.client.connection import AgentClient
from holdfast.model.errors import RetryableError, StateError, UsageError
from holdfast.runtime.private import runtime_folder
from holdfast.runtime.settings import WorkerPlace
from holdfast.runtime.token import TOKEN_BYTES, read_token

START_S = 60.0
"""How long a new vault may take to be there; a busy machine starts Python slowly."""


def join_standalone(place: WorkerPlace) -> AgentClient:
    """The client of this node's own vault; the process that comes first starts the vault."""
    if place.group_world_size > 1 or place.world_size > place.local_world_size:
        raise UsageError(
            f"checkpoints of {place.group_world_size} nodes need Holdfast's agents: start the "
            "training with `holdfast run` instead of torchrun"
        )
    folder = _folder(place)
    token = _token(folder)
    path = folder / "vault.sock"
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The first process starts it; the others wait.
        if not _is_there(path):
            _start(place, path)
    finally:
        os.close(lock)
    return AgentClient(f"unix:{path}", token, scope=place.round, returns=False)


def _folder(place: WorkerPlace) -> Path:
    """Where the processes of this job meet; no other user can enter."""
    name = place.meeting_point or f"pid {os.getpid()}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    try:
        folder = runtime_folder(f"vault-{digest}")
    except (OSError, StateError) as exc:
        raise UsageError(f"{exc}; set XDG_RUNTIME_DIR to a folder that is yours alone") from exc
    if len(str(folder)) > 90:
        raise UsageError(f"the temporary directory has too long a path for a socket: {folder}")
    return folder


def _token(folder: Path) -> bytes:
    """The token of the folder. The first process draws it; it appears whole or not at all."""
    path, draft = folder / "token", folder / f"token.{os.getpid()}"
    if not path.exists():
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # Another process was faster: its token is the token.
        finally:
            draft.unlink()
    return read_token(path)


def _is_there(path: Path) -> bool:
    """Whether a vault listens on the socket now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _start(place: WorkerPlace, path: Path) -> None:
    """Start the vault and return when it listens."""
    ready, told = os.pipe()
    command = [sys.executable, "-m", "holdfast.agent.standalone", f"--socket={path}"]
    command += [f"--nproc={place.local_world_size}", f"--ready={told}"]
    if place.launcher >= 0:
        # It survives the workers that torchrun starts again, but not torchrun.
        command.append(f"--launcher={place.launcher}")
    try:
        # In a session of its own, so that Ctrl-C, which ends the training, does not end it before
        # it has brought to storage what was on its way there.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=(told,)
        )
        os.close(told)
        readable, _, _ = select.select([ready], [], [], START_S)
        if not readable or not os.read(ready, 1):
            process.kill()
            raise RetryableError(
                f"the checkpoint saver could not be started: it ended with code {process.wait()}"
            )
    finally:
        os.close(ready)

# SPDX-License-Identifier: Apache-2.0
"""From the options of `holdfast run` to one agent: shared by `run` and by nodes it launches."""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast import __version__
from holdfast.agent.agent import Agent, AgentEnd, AgentSettings
from holdfast.agent.group import Program
from holdfast.agent.network import own_address
from holdfast.agent.output import Write
from holdfast.agent.processes import RunMode
from holdfast.cli.console import Console
from holdfast.cli.logged import errors_in
from holdfast.cli.run_options import RunOptions, Std, std_of
from holdfast.core.node.environment import Launch
from holdfast.model.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.runtime import lifeline, tls
from holdfast.runtime.log_file import LogFile
from holdfast.runtime.observe import Say
from holdfast.runtime.private import require_own
from holdfast.runtime.process_names import own_name
from holdfast.runtime.settings import NodeSettings, worker_base
from holdfast.runtime.signals import EndSignals, Patience
from holdfast.runtime.token import read_token

FIRST_CONTACT_S = 60.0
"""How long the agent waits for a master that it cannot reach yet, unless `join_timeout` is shorter.
On a node that a platform launched it waits for `join_timeout`: its master may be on its way
back."""

FAREWELL_S = 5.0
"""The part of a platform's patience that must be left when everything is on storage: the time to
say farewell and to end. At most a fifth of that patience."""


def rules_of(options: RunOptions) -> m.JobRules:
    """What every node of the job must agree on."""
    return m.JobRules(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        node_unit=options.node_unit,
        last_call_s=options.last_call_s,
        join_timeout_s=options.join_timeout_s,
        max_restarts=options.max_restarts,
    )


async def run_agent(
    options: RunOptions,
    folder: Path,
    *,
    node: NodeSettings,
    console: Console,
    say: Say,
    signals: EndSignals,
    stop_job: Callable[[signal.Signals], None] | None = None,
    started: Callable[[Agent], None] = lambda agent: None,
) -> AgentEnd:
    """Run one agent against `options.master` until its part in the job is over.

    `stop_job` is called when a signal stops this node, if the job must stop with it.
    """
    assert options.master is not None
    if options.token_file is None:
        raise UsageError("the job's token is missing: give --token-file or HOLDFAST_TOKEN_FILE")
    has_tls = options.tls_ca is not None
    tls.require_tls(options.master, has_tls=has_tls, insecure=options.insecure)
    agent = Agent(_settings(options, folder, node, console), say)
    _obey_signals(agent, signals, node.lifeline, stop_job)
    started(agent)
    return await agent.run()


def _settings(
    options: RunOptions, folder: Path, node: NodeSettings, console: Console
) -> AgentSettings:
    assert options.master is not None
    assert options.token_file is not None
    leave_s = node.leave_s - min(FAREWELL_S, node.leave_s / 5)
    contact_s = min(FIRST_CONTACT_S, options.join_timeout_s)
    socket = folder / "agent.sock"
    if len(str(socket)) > 100:
        raise UsageError(f"the temporary directory has too long a path for a socket: {folder}")
    launch = Launch(
        nproc=options.nproc,
        role=options.role,
        run_id=_run_id(options),
        max_restarts=options.max_restarts,
        socket=f"unix:{socket}",
        token_file=str(options.token_file.absolute()),
        signals_to_handle=",".join(number.name for number in options.signals_to_handle),
        virtual_local_rank=options.virtual_local_rank,
    )
    program = Program(
        argv=(options.script, *options.script_args),
        mode=_mode(options),
        launch=launch,
        env=worker_base(),
        log_dir=log_folder(options, folder),
        console=_console(options, console),
        terminal_rank=-1 if options.terminal_rank is None else options.terminal_rank,
    )
    return AgentSettings(
        master=options.master,
        token=read_token(options.token_file),
        tls=tls.client_tls(options.tls_ca),
        rules=rules_of(options),
        program=program,
        host=options.local_addr or node.address or own_address(options.master),
        node_rank=-1 if options.node_rank is None else options.node_rank,
        node_id=node.node_id,
        topology=node.topology,
        runtime_dir=folder,
        grace_s=min(options.grace_s, leave_s / 2) if leave_s else options.grace_s,
        leave_s=leave_s,
        spares=options.spares,
        excluded_roots=_own_code(options),
        first_contact_s=options.join_timeout_s if node.node_id >= 0 else contact_s,
        process=own_name(),
    )


def _run_id(options: RunOptions) -> str:
    return options.rdzv_id or options.job or "job"


def log_folder(options: RunOptions, folder: Path) -> Path:
    """The job's own folder for logs, below that of the user or of the command.

    StateError if another user made it: Holdfast would write into a folder of that user.
    """
    logs = (options.log_dir or folder / "logs") / _run_id(options)
    with suppress(OSError):  # Without a folder no log is kept, and each round says why.
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(logs)
    return logs


@contextmanager
def own_log(options: RunOptions, folder: Path, name: str) -> Iterator[LogFile | None]:
    """The log file of this process among those of its job; None if there can be none."""
    path = log_folder(options, folder) / name
    try:
        log = LogFile(path)
    except OSError as exc:
        print(f"holdfast: there is no log file {path}: {exc}", file=sys.stderr)
        yield None
        return
    log(f"holdfast {__version__} is process {os.getpid()} on {socket.gethostname()}")
    try:
        with errors_in(log):
            yield log
    finally:
        log.close()


def _mode(options: RunOptions) -> RunMode:
    if options.no_python:
        return RunMode.COMMAND
    return RunMode.MODULE if options.module else RunMode.SCRIPT


def _own_code(options: RunOptions) -> tuple[str, ...]:
    """Folders with the user's own code, which may change between two starts."""
    roots = {os.getcwd()}
    if not options.module and not options.no_python:
        roots.add(str(Path(options.script).resolve().parent))
    return tuple(sorted(roots))


def _console(options: RunOptions, console: Console) -> Callable[[int, bool], Write | None]:
    """As with torchrun: redirected output goes only to files, unless it is also teed."""

    def choose(local_rank: int, error: bool) -> Write | None:
        stream = Std.ERR if error else Std.OUT
        shown = options.local_ranks_filter
        if shown is not None and local_rank not in shown:
            return None
        redirected = stream & std_of(options.redirects, local_rank)
        if redirected and not stream & std_of(options.tee, local_rank):
            return None
        return console.err if error else console.out

    return choose


def _obey_signals(
    agent: Agent, signals: EndSignals, line: int, stop_job: Callable[[signal.Signals], None] | None
) -> None:
    patience = Patience()

    def stopped(number: signal.Signals) -> None:
        if stop_job is not None:
            stop_job(number)
        agent.shut_down(
            f"this node was stopped by {number.name}",
            128 + number,
            with_job=stop_job is not None,
            at_once=patience.is_over(number),
        )

    def gone(at_once: bool) -> None:
        agent.shut_down("the launcher of the job is gone", 1, with_job=True, at_once=at_once)

    signals.hand_to(stopped)
    lifeline.watch(line, gone)


def make_folder() -> Path:
    """A private folder for sockets, logs and state of one command."""
    return Path(tempfile.mkdtemp(prefix="holdfast-"))


def last_words(end: m.JobEnded, console: Console, *, shows_errors: bool) -> None:
    """Print what the user sees last: the traceback of the first worker that failed. Leave it out if
    all workers failed alike and the console has just shown it."""
    cause = end.cause
    if end.ok or cause is None:
        return
    text = f"\nThe first failure: rank {cause.rank} on node rank {end.cause_node_rank}"
    text += f" (pid {cause.pid}) {cause.message}\n"
    if cause.traceback and not (cause.alike and shows_errors):
        text += cause.traceback.rstrip() + "\n"
    console.err(text.encode())

# SPDX-License-Identifier: Apache-2.0
"""`holdfast run`: start a job, or this node's part of one."""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop

from holdfast.agent import terminal
from holdfast.agent.agent import Agent, AgentEnd
from holdfast.cli.agent_side import (
    last_words,
    log_folder,
    make_folder,
    own_log,
    rules_of,
    run_agent,
)
from holdfast.cli.console import Console
from holdfast.cli.embedded import EXIT_JOB_FAILED, EmbeddedMaster, is_end_of_job
from holdfast.cli.observer import show_status
from holdfast.cli.run_flags import build_parser
from holdfast.cli.run_options import (
    RunOptions,
    check_files,
    check_script,
    count_accelerators,
    parse_run,
)
from holdfast.model.errors import UsageError
from holdfast.runtime.observe import Level, Say, sayer
from holdfast.runtime.settings import environment, node_settings
from holdfast.runtime.signals import EndSignals, Patience, hold_end_signals

STOP_S_MAX = 24 * 3600.0
"""How long a stopped job may bring checkpoints to storage, however slowly."""


ALONE_NOTE = (
    "the worker has this terminal: no status line, no file of its output, and no hang is looked "
    "for, unless --hang-after says so; --log-dir brings all of it back"
)

DEBUG_NOTE = (
    "rank {rank} has this terminal; {hangs}; ranks that wait for it give up when the time-out of "
    "their process group is over "
    "(torch.distributed.init_process_group(timeout=...))"
)
NO_HANGS = "no hang is looked for meanwhile, unless --hang-after says so"
HANGS_BY_MASTER = (
    "its master still looks for hangs, and restarts a world that stands at a prompt for long: "
    "start it with `holdfast master --hang-after off`"
)


class Parse(Protocol):
    """From a command line to options; see `parse_run`."""

    def __call__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        cpus: int,
        accelerators: int,
        job_suffix: str,
    ) -> RunOptions: ...


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command for shell completion; to run it, `main` reads the words itself."""
    parser = build_parser()
    commands.add_parser(
        "run", help=summary, parents=[parser], examples=parser.examples, add_help=False
    )


def main(argv: Sequence[str], parse: Parse = parse_run) -> int:
    """Parse, check, run; returns the exit code of the command."""
    env = environment()
    options = parse(
        argv,
        env,
        cpus=len(os.sched_getaffinity(0)),
        accelerators=count_accelerators(env.get("CUDA_VISIBLE_DEVICES")),
        job_suffix=secrets.token_hex(2),
    )
    check_script(options)
    check_files(options)
    options = _with_terminal(options)
    console = Console(is_lent=options.terminal_rank is not None)
    hold_end_signals()  # From here on there is something to clean up.
    folder = make_folder()
    try:
        with own_log(options, folder, _log_name(options)) as log:
            say = sayer("holdfast", console.err, least=options.log_level, file=log)
            end = _run_and_tell(options, folder, console, say)
    except BaseException as exc:
        # The cause may be only in the logs of a master or of workers. The log of this process alone
        # has nothing beyond the messages below.
        files = [path for path in (folder / "logs").rglob("*") if path.is_file()]
        has_logs = options.log_dir is None and len(files) > 1
        if has_logs and not isinstance(exc, UsageError):
            console.err(f"holdfast: {_where_logs_are(options, folder)}\n".encode())
        else:
            shutil.rmtree(folder, ignore_errors=True)
        console.close()
        raise
    if end.exit_code == 0 or options.log_dir is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if end.end is not None:
        shows_errors = not options.redirects and options.local_ranks_filter is None
        last_words(end.end, console, shows_errors=shows_errors)
    console.close()
    return end.exit_code


def _log_name(options: RunOptions) -> str:
    """The part of this process in its job. Nodes may share a folder, and two may be on one host."""
    if options.local_nodes + options.spare_nodes > 1:
        return "launcher.log"
    if options.master is None:
        return "agent.log"
    node_id = node_settings().node_id
    if node_id >= 0:
        return f"node-{node_id}.log"
    return f"agent-{socket.gethostname()}-{os.getpid()}.log"


def _run_and_tell(options: RunOptions, folder: Path, console: Console, say: Say) -> AgentEnd:
    """Run the job, and print one or two lines about its beginning and end."""
    for note in options.notes:
        say(note)
    for ignored in options.ignored:
        say(f"{ignored.option} has no effect: {ignored.reason}", Level.WARNING)
    is_stopped = False

    def stops(number: signal.Signals) -> None:
        nonlocal is_stopped
        is_stopped = True
        say(_how_it_stops(options, number, folder), Level.WARNING)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        end = runner.run(_run(options, folder, console, say, stops))
    if end.exit_code != 0 and not is_stopped:
        failed = end.end is not None and not end.end.stopped
        say(f"{'the job failed' if failed else 'stopped'}: {end.reason}", Level.ERROR)
        if options.log_dir is None:
            say(_where_logs_are(options, folder), Level.ERROR)
    return end


def _where_logs_are(options: RunOptions, folder: Path) -> str:
    if options.terminal_rank is not None and options.nproc == 1:
        # The only rank has the terminal, and no file.
        return f"the logs of agent and master are in {folder / 'logs'}"
    return f"the output of every rank is in {folder / 'logs'}"


def _how_it_stops(options: RunOptions, number: signal.Signals, folder: Path) -> str:
    """One line for a stop, when it is requested: what is in memory goes to storage first."""
    parts = [f"stopped by {number.name}"]
    if number == signal.SIGINT:
        parts.append("press Ctrl-C again to end at once, without saving")
    if options.state_dir is not None:
        parts.append("the same command on the same state directory goes on with the job")
    if options.log_dir is None:
        parts.append(_where_logs_are(options, folder))
    return "; ".join(parts)


def _with_terminal(options: RunOptions) -> RunOptions:
    """Give the terminal to the rank that must have it."""
    rank = options.debug_rank
    if rank is not None and not terminal.is_ours():
        raise UsageError("--debug-rank needs a terminal, and this command in its foreground")
    is_alone = options.nproc == options.max_nodes == 1 and options.master is None
    has_files = options.log_dir or options.redirects or options.tee
    shows_all = options.local_ranks_filter is None and not has_files
    if rank is None and is_alone and options.local_nodes + options.spare_nodes == 1 and shows_all:
        rank = 0 if terminal.is_ours() else None
    if rank is None:
        return options
    hangs = NO_HANGS if options.master is None else HANGS_BY_MASTER
    note = ALONE_NOTE if options.debug_rank is None else DEBUG_NOTE.format(rank=rank, hangs=hangs)
    # At a prompt a worker makes no steps, because it waits for a person.
    hang_after = "off" if options.hang_after == "auto" else options.hang_after
    return replace(options, terminal_rank=rank, hang_after=hang_after, notes=(*options.notes, note))


async def _run(
    options: RunOptions,
    folder: Path,
    console: Console,
    say: Say,
    stops: Callable[[signal.Signals], None],
) -> AgentEnd:
    signals = EndSignals(options.signals_to_handle, first=stops)
    if options.master is not None:
        node = node_settings()
        end = await run_agent(options, folder, node=node, console=console, say=say, signals=signals)
    elif options.local_nodes + options.spare_nodes > 1:
        end = await _run_local_nodes(options, folder, console, say, signals)
    else:
        end = await _run_alone(options, folder, console, say, signals)
    console.status("")
    return end


async def _run_alone(
    options: RunOptions, folder: Path, console: Console, say: Say, signals: EndSignals
) -> AgentEnd:
    """One node: the agent lives in this process, the master in a child of it."""
    async with _master(options, folder, [], console, say) as (master, ended):
        own = replace(options, master=master.address, token_file=master.token_file)
        agents: list[Agent] = []
        agent = asyncio.create_task(
            run_agent(
                own,
                folder,
                node=node_settings(),
                console=console,
                say=say,
                signals=signals,
                stop_job=lambda number: master.terminate(number, options.grace_s),
                started=agents.append,
            )
        )
        await asyncio.wait((agent, ended), return_when=asyncio.FIRST_COMPLETED)
        if not agent.done() and _will_end(agents[0], ended.result()):
            await asyncio.wait((agent,), timeout=options.grace_s + 10)
        if not agent.done():
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
            return _end_by(ended.result(), master)
        return await agent


def _will_end(agent: Agent, code: int) -> bool:
    """Whether the agent ends by itself when its master has ended with this code.

    It does if the master, or the signal that stopped both, has told it to. It does not if the job
    had ended before this command was started: then the agent would wait for a master in vain.
    """
    return code > 128 or (agent.has_joined and is_end_of_job(code))


def _end_by(code: int, master: EmbeddedMaster) -> AgentEnd:
    """How the job ended, from the exit code of its master."""
    if code == 0:
        return AgentEnd(0, "", None)
    if code == EXIT_JOB_FAILED:
        end = master.end()
        return AgentEnd(1, end.reason, end)
    if not is_end_of_job(code) and (number := master.stopped_by) is not None:
        return AgentEnd(128 + number, f"it was stopped by {number.name}", None)
    if is_end_of_job(code):
        return AgentEnd(code, "the master was told to stop the job", None)
    return AgentEnd(1, "the master could not serve, see above", None)


async def _run_local_nodes(
    options: RunOptions, folder: Path, console: Console, say: Say, signals: EndSignals
) -> AgentEnd:
    """Several nodes on this machine: the master launches and replaces their agents."""
    launch = folder / "launch.json"
    rules = msgspec.json.encode(rules_of(options)).decode()
    arguments = [
        *("--platform", "local", "--launch", str(launch), "--rules", rules),
        *("--spare-nodes", str(options.local_nodes + options.spare_nodes - options.max_nodes)),
    ]
    async with _master(options, folder, arguments, console, say, launch=launch) as (
        master,
        ended,
    ):
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[signal.Signals] = loop.create_future()
        patience, hurried = Patience(), asyncio.Event()

        def stopped(number: signal.Signals) -> None:
            if patience.is_over(number):
                master.hurry()
                hurried.set()
            if not stop.done():
                stop.set_result(number)

        signals.hand_to(stopped)
        await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            number = stop.result()
            master.terminate(number, options.grace_s)
            # The master ends by itself when its nodes have saved, or make no progress.
            impatient = asyncio.create_task(hurried.wait())
            both = (ended, impatient)
            await asyncio.wait(both, timeout=STOP_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            impatient.cancel()
            return AgentEnd(128 + number, f"it was stopped by {number.name}", None)
        return _end_by(ended.result(), master)


@contextlib.asynccontextmanager
async def _master(
    options: RunOptions,
    folder: Path,
    arguments: list[str],
    console: Console,
    say: Say,
    *,
    launch: Path | None = None,
) -> AsyncIterator[tuple[EmbeddedMaster, asyncio.Task[int]]]:
    """An embedded master for the time of the block; nothing of it is left afterwards."""
    state = options.state_dir or folder / "state"
    assert options.job is not None
    patience = [
        *("--lease", str(options.lease_s), "--hang-after", options.hang_after),
        *("--first-step-within", options.first_step_within),
        *(["--retry-mistakes"] if options.retry_mistakes else []),
    ]
    logging = [
        *("--log-dir", str(log_folder(options, folder))),
        *("--log-level", options.log_level.name.lower()),
    ]
    arguments = ["--job", options.job, *patience, *logging, *arguments]
    master = EmbeddedMaster(arguments, state, console, say)
    if launch is not None:
        node = replace(
            options,
            master=master.address,
            token_file=master.token_file,
            local_nodes=1,
            spare_nodes=0,
            log_dir=options.log_dir or folder / "logs",
        )
        launch.write_bytes(msgspec.json.encode(node, enc_hook=str))
    ended = asyncio.create_task(master.run())
    status = asyncio.create_task(show_status(master.address, master.token_file, console))
    try:
        yield master, ended
    finally:
        status.cancel()
        await master.stop()
        ended.cancel()
        await asyncio.gather(status, ended, return_exceptions=True)

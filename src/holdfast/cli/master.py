# SPDX-License-Identifier: Apache-2.0
"""`holdfast master`: the control plane of one job, as a process of its own."""

import argparse
import asyncio
import math
import os
import resource
import socket
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from holdfast import __version__, platforms
from holdfast.cli.embedded import (
    END_FILE,
    EXIT_BROKE_OFF,
    EXIT_JOB_FAILED,
    EXIT_STATE_AWAY,
    EXIT_STATE_SHUT,
)
from holdfast.cli.logged import errors_in
from holdfast.cli.run_flags import variables
from holdfast.cli.run_options import (
    DLROVER_LEVEL,
    check_job_name,
    dlrover_level,
    hang_after_s,
    parse_address,
    parse_level,
    seconds_or_off,
)
from holdfast.cli.unread import unread_note
from holdfast.master.process import MasterSettings, run_master
from holdfast.model.errors import AwayError, StateError, UsageError
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.ports.surroundings import ALONE
from holdfast.protocol.messages import JobEnded, JobRules
from holdfast.runtime.log_file import LogFile
from holdfast.runtime.observe import Level, Say, sayer
from holdfast.runtime.private import write_private
from holdfast.runtime.settings import environment

NONE = "none"
"""No platform: nodes come by themselves."""

EXIT_HANDED_OVER = 143
"""SIGTERM ended this master, as it ends any process; the job goes on under the next one."""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "master",
        help=summary,
        description="Run the control plane of one job. It can be killed and started again on the "
        "same state directory, here or elsewhere: the job goes on meanwhile.",
        examples=(
            "holdfast master --job bert --state /shared/bert",
            "holdfast master --job bert --listen 10.0.0.5:7070 --state /shared/bert --insecure",
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where agents connect; port 0 lets the kernel choose (default 127.0.0.1:0)",
    )
    parser.add_argument(
        "--state", required=True, type=Path, metavar="DIR", help="directory of the journal"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the job's token (default DIR/token, made if it is missing)",
    )
    parser.add_argument(
        "--http",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where /api/v1/job, /metrics and /healthz are served; 'off' for nowhere "
        "(default 127.0.0.1:0)",
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="keep a log in DIR/master.log (default: none)"
    )
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        help="what is said: debug, info, warning or error. Log files always have info; debug lines "
        "go to the files only (default: HOLDFAST_LOG_LEVEL, DLROVER_LOG_LEVEL, or info)",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address that is not loopback without certificates",
    )
    _add_platform(parser)
    _add_patience(parser)
    # For `holdfast run`, which starts its master with these; people have no use for them.
    parser.add_argument("--lifeline", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--reason", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--rules", help=argparse.SUPPRESS)
    parser.add_argument("--spare-nodes", type=int, default=0, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _add_platform(parser: argparse.ArgumentParser) -> None:
    """Who starts and removes nodes."""
    words = "; ".join(f"{name}: {text}" for name, text in platforms.NAMES.items())
    parser.add_argument(
        "--platform",
        choices=(NONE, *platforms.NAMES),
        default=NONE,
        help=f"none: nodes are started by people or their scheduler; {words} (default none)",
    )
    platforms.add_options(parser)


def _add_patience(parser: argparse.ArgumentParser) -> None:
    """How long the master waits before it calls something lost or hung."""
    spec = JobSpec()
    for name, unit in (
        ("beat", "seconds between two beats of an agent"),
        ("silence", "seconds of silence after which an agent is lost"),
        ("lease", "seconds without contact after which an agent holds its workers still"),
    ):
        default = getattr(spec, f"{name}_s")
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{unit} ({default:g})"
        )
    parser.add_argument(
        "--hang-after",
        default="auto",
        metavar="WHEN",
        help="workers that make no step for so many seconds hang and are restarted; auto: 5 times "
        "the longest pause of the job so far, at least 30 s; off: never (auto)",
    )
    parser.add_argument(
        "--first-step-within",
        default=f"{spec.first_step_s:g}",
        metavar="SECONDS",
        help="workers without a first step for so long are reported, and restarted if the job has "
        f"made steps before; off: no limit ({spec.first_step_s:g})",
    )
    parser.add_argument(
        "--retry-mistakes",
        action="store_true",
        help="restart also for a mistake in the program that is the same on all ranks before the "
        "first step: wrong arguments, a syntax error, a failed import",
    )


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.log_dir is None:
        return _serve(arguments, None)
    path = arguments.log_dir / "master.log"
    try:
        # The master of a launcher is started again under a healthy job: that needs it more than
        # its log, whatever has become of the folder.
        log = LogFile(path, late=arguments.lifeline >= 0)
    except OSError as exc:
        raise UsageError(f"there is no log file {path}: {exc}") from exc
    with closing(log):
        log(f"holdfast {__version__} is process {os.getpid()} on {socket.gethostname()}")
        with errors_in(log):
            return _serve(arguments, log)


def _level(arguments: argparse.Namespace) -> tuple[Level, str]:
    """What is said, and a note if the environment cannot be understood."""
    if arguments.log_level is not None:
        return parse_level(arguments.log_level, "--log-level"), ""
    env, name = environment(), "HOLDFAST_LOG_LEVEL"
    if not env.get(name) and (dlrovers := env.get(DLROVER_LEVEL)):
        return dlrover_level(dlrovers)
    return parse_level(env.get(name) or "info", name), ""


def _serve(arguments: argparse.Namespace, log: LogFile | None) -> int:
    least, note = _level(arguments)
    say = sayer("master", least=least, file=log)
    if note:
        say(note)
    if arguments.lifeline < 0:  # A launcher has said it already.
        for line in unread_note(environment(), variables()):
            say(line)
    settings = _settings(arguments)
    serves = False

    def announce(address: str) -> None:
        nonlocal serves
        serves = True
        if arguments.reason >= 0:
            os.ftruncate(arguments.reason, 0)
        if arguments.lifeline < 0:
            print(f"holdfast master listening on {address}", flush=True)

    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            end = runner.run(_serve_found(arguments, settings, say, announce))
        except AwayError as exc:
            if arguments.lifeline < 0:
                raise
            # Its launcher tries again, and tells the user what is news of this.
            say(str(exc), Level.DEBUG)
            os.ftruncate(arguments.reason, 0)
            os.pwrite(arguments.reason, str(exc).encode(), 0)
            return EXIT_STATE_AWAY if serves else EXIT_STATE_SHUT
        except StateError as exc:
            if not serves or arguments.lifeline < 0:
                raise
            say(str(exc), Level.ERROR)
            return EXIT_BROKE_OFF
        except Exception:
            if not serves or arguments.lifeline < 0:
                raise
            # A broken invariant. What is in the journal is right: the launcher starts another.
            say(traceback.format_exc(), Level.ERROR)
            return EXIT_BROKE_OFF
    if isinstance(end, int):
        return end
    if log is not None:
        # Under a launcher, which tells people how the job failed, this is the only word here.
        log(f"the job is over: {'it succeeded' if end.ok else end.reason}")
    if end.stopped:
        return 128 + end.stopped
    if end.ok or arguments.lifeline < 0:
        return 0 if end.ok else 1
    # The launcher may have no agent that would tell it the cause.
    write_private(arguments.state / END_FILE, msgspec.json.encode(end))
    return EXIT_JOB_FAILED


async def _serve_found(
    arguments: argparse.Namespace,
    settings: MasterSettings,
    say: Say,
    announce: Callable[[str], None],
) -> JobEnded | int:
    """Serve the job that the platform has; how it ended, or the exit code if that says all."""
    asked = platforms.Asked(job=settings.job, state=settings.state, spec=settings.spec)
    async with _opened(arguments, asked, say) as found:
        if isinstance(found, int):
            return found
        end = await run_master(
            replace(settings, state=found.state, spec=found.spec, hands_over=found.hands_over),
            say=say,
            announce=announce,
            surroundings=found.surroundings,
            lifeline=arguments.lifeline,
        )
    return EXIT_HANDED_OVER if end is None else end


def _opened(
    arguments: argparse.Namespace, asked: platforms.Asked, say: Say
) -> AbstractAsyncContextManager[platforms.Found | int]:
    if arguments.platform == NONE:
        return nullcontext(platforms.Found(state=asked.state, spec=asked.spec, surroundings=ALONE))
    return platforms.opener(arguments.platform)(arguments, asked, say)


def _settings(arguments: argparse.Namespace) -> MasterSettings:
    return MasterSettings(
        job=arguments.job,
        listen=arguments.listen,
        state=arguments.state,
        token_file=arguments.token_file,
        http="" if arguments.http == "off" else arguments.http,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        insecure=arguments.insecure,
        spec=_spec(arguments),
    )


def _check(arguments: argparse.Namespace) -> None:
    """Find mistakes that no code further down could name by their option."""
    check_job_name(arguments.job)
    parse_address(arguments.listen, "--listen", zero=True)
    if arguments.http != "off":
        parse_address(arguments.http, "--http", zero=True)
    for name in ("beat", "silence", "lease"):
        seconds = getattr(arguments, name)
        if not 0 < seconds < math.inf:
            raise UsageError(f"--{name} must be a number of seconds above 0, not {seconds:g}")
    if arguments.tls_key is not None and arguments.tls_cert is None:
        raise UsageError("--tls-key needs the certificate that it belongs to: give --tls-cert")


def _allow_many_connections() -> None:
    """Each agent is a connection: the usual limit of 1,024 files would stop the thousandth."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _spec(arguments: argparse.Namespace) -> JobSpec:
    spec = JobSpec(
        beat_s=arguments.beat,
        silence_s=arguments.silence,
        lease_s=arguments.lease,
        hang_after_s=hang_after_s(arguments.hang_after, "--hang-after"),
        first_step_s=seconds_or_off(arguments.first_step_within, "--first-step-within"),
        retry_mistakes=arguments.retry_mistakes,
    )
    if arguments.rules is None:
        return spec
    rules = msgspec.json.decode(arguments.rules, type=JobRules)
    return replace(
        spec,
        min_nodes=rules.min_nodes,
        max_nodes=rules.max_nodes,
        node_unit=rules.node_unit,
        last_call_s=rules.last_call_s,
        join_timeout_s=rules.join_timeout_s,
        worker_restarts={**spec.worker_restarts, ExitReason.ERROR: rules.max_restarts},
        managed=True,
        spare_nodes=arguments.spare_nodes,
    )

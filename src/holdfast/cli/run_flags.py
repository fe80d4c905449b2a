# SPDX-License-Identifier: Apache-2.0
"""What `holdfast run` accepts: one table of flags, and a user's answers to them.

The table is the only list of flags: the parser, the help and the tests read it. The meaning of an
answer, and which answers exclude each other, is in run_options.py. Until then every answer stays
text with the name of its source, so that a mistake is reported under the name the user typed, be it
a flag or an environment variable.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from holdfast.cli.parser import HelpfulParser, closest
from holdfast.model.errors import UsageError

TORCHRUN_PREFIX = "PET_"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Without a metavar it is a switch."""

    name: str
    metavar: str
    help: str
    env: str = ""
    """The environment variable that answers if the command line does not."""
    short: str = ""
    also: tuple[str, ...] = ()
    """The prior art's names of that variable, in their order; see `variables`."""

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    def variables(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """The variables that answer; the first one that is set wins.

        Holdfast's platforms set the prior art's names too, for scripts that read them. The agent
        there ignores these: it has Holdfast's own names, and the master numbers the nodes.
        """
        names = (self.env,) if "HOLDFAST_NODE_ID" in environ else (self.env, *self.also)
        return tuple(name for name in names if environ.get(name))


def _shared(
    name: str, metavar: str, help_text: str, short: str = "", also: tuple[str, ...] = ()
) -> Flag:
    """A flag of torchrun that also reads torchrun's PET_* variable."""
    env = TORCHRUN_PREFIX + name.replace("-", "_").upper()
    return Flag(name, metavar, help_text, env, short, also)


FLAGS: Mapping[str, tuple[Flag, ...]] = {
    "size of the job": (
        _shared(
            "nnodes",
            "MIN[:MAX]",
            "nodes the job runs on: a number, or the fewest and the most (default: 1, or the "
            "number given by --local-nodes)",
        ),
        _shared(
            "nproc-per-node",
            "N",
            "workers on each node: a number, cpu (one per CPU), gpu (one per GPU) or auto (one "
            "per GPU, or per CPU on a node without GPUs) (default: 1)",
        ),
        Flag("node-unit", "N", "the world always holds a multiple of N nodes (default: 1)"),
        _shared(
            "node-rank",
            "N",
            "the slot of this node, from 0, when a --master runs elsewhere (default: assigned by "
            "the master)",
            also=("NODE_RANK", "WORKER_RANK"),
        ),
        Flag(
            "local-nodes",
            "N",
            "run N nodes on this machine, each with its own agent; lost ones are started again "
            "(default: 1)",
        ),
        Flag(
            "spare-nodes",
            "K",
            "with --local-nodes: keep K more nodes ready to take the place of a lost one "
            "(default: 0)",
        ),
    ),
    "the master": (
        Flag(
            "master",
            "HOST:PORT",
            "the master that the nodes of this job share; an IPv6 address goes in brackets "
            "(default: one is started inside this command)",
            env="HOLDFAST_MASTER",
            also=("DLROVER_MASTER_ADDR",),
        ),
        Flag(
            "token-file",
            "FILE",
            "the job's secret token, as written by `holdfast master` (default: a new one for a "
            "master of our own)",
            env="HOLDFAST_TOKEN_FILE",
        ),
        Flag(
            "tls-ca",
            "FILE",
            "PEM file with the certificates to trust (default: no TLS)",
            env="HOLDFAST_TLS_CA",
        ),
        Flag("insecure", "", "allow connections to other machines without TLS (default: refused)"),
        Flag(
            "state",
            "DIR",
            "keep the state of the embedded master in DIR, so that the same command continues the "
            "job (default: a private temporary directory)",
        ),
        Flag(
            "lease",
            "SECONDS",
            "an agent that cannot reach the master for this long holds its workers still "
            "(default: 60)",
        ),
        Flag(
            "hang-after",
            "WHEN",
            "workers that make no step for so many seconds hang and are restarted; auto: 5 times "
            "the longest pause of the job so far, at least 30 s; off: never (default: auto)",
        ),
        Flag(
            "first-step-within",
            "SECONDS",
            "workers without a first step for so long are reported, and restarted if the job has "
            "made steps before; off: no limit (default: 7200)",
        ),
        Flag(
            "retry-mistakes",
            "",
            "restart also for a mistake in the program that is the same on all ranks before the "
            "first step: wrong arguments, a syntax error, a failed import (default: the job ends)",
        ),
        _shared(
            "standalone",
            "",
            "one node with a master of its own, whatever --rdzv-endpoint or HOLDFAST_MASTER say "
            "(default: off)",
        ),
        _shared("rdzv-id", "ID", "the run id that workers see (default: the name of the job)"),
        _shared(
            "rdzv-endpoint",
            "HOST:PORT",
            "with several nodes and without --master: the address of the master (default: none)",
        ),
        _shared(
            "rdzv-conf",
            "KEY=VALUE,...",
            "join_timeout: seconds that the job may stay without a world (default: 600); "
            "last_call_timeout: seconds that a world which could start waits for missing nodes "
            "(default: 30); torchrun's other keys are accepted and ignored",
        ),
        _shared(
            "local-addr",
            "HOST",
            "the address under which other nodes reach this one (default: POD_IP of a node that "
            "a platform launched, or the one that the connection to the master uses)",
        ),
    ),
    "workers": (
        Flag(
            "job",
            "NAME",
            "name of the job (default: made from the name of the script; with --master the name "
            "that the master has)",
        ),
        _shared("role", "NAME", "role of the workers (default: default)"),
        _shared(
            "max-restarts",
            "N",
            "how often failed workers are restarted before the job fails (default: 3; torchrun's "
            "default is 0)",
        ),
        Flag(
            "grace",
            "SECONDS",
            "time between SIGTERM and SIGKILL when workers are stopped (default: 10)",
        ),
        _shared(
            "shutdown-timeout",
            "SECONDS",
            "torchrun's name for --grace, in whole seconds; --grace wins (default: 10; "
            "torchrun's default is 30)",
        ),
        Flag("no-spares", "", "keep no pre-started process ready for restarts (default: off)"),
        _shared("module", "", "run the script as a module, like python -m (default: off)", "-m"),
        _shared("no-python", "", "run the script as a program, without python (default: off)"),
        _shared(
            "run-path",
            "",
            "run the script with runpy inside the worker's interpreter; wins over --no-python "
            "(default: off)",
        ),
        _shared(
            "virtual-local-rank",
            "",
            "every worker sees LOCAL_RANK 0 and only its own GPU, as device 0 (default: off)",
        ),
        _shared(
            "signals-to-handle",
            "NAME,...",
            "signals that stop the job in order and are passed on to the workers (default: "
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
        ),
    ),
    "output": (
        _shared(
            "log-dir",
            "DIR",
            "directory for the output of the workers, one file each, and for the logs of agent "
            "and master (default: a temporary directory)",
        ),
        Flag(
            "log-level",
            "LEVEL",
            "what agent and master say: debug, info, warning or error. Log files always have "
            "info; debug lines go to the files only (default: info)",
            env="HOLDFAST_LOG_LEVEL",
            also=("DLROVER_LOG_LEVEL",),
        ),
        _shared(
            "redirects",
            "STD",
            "what goes to files only: 0 nothing, 1 stdout, 2 stderr, 3 both, or per local rank as "
            "in 0:3,1:2 (default: 0)",
            "-r",
        ),
        _shared(
            "tee",
            "STD",
            "what goes to files and to the console, written as for --redirects (default: 0)",
            "-t",
        ),
        _shared(
            "local-ranks-filter",
            "N,...",
            "local ranks whose output the console shows (default: all)",
        ),
        Flag(
            "debug-rank",
            "N",
            "give this terminal to rank N, for pdb, breakpoint() and input(); the job waits for it "
            "(default: a single worker has the terminal, else no rank has)",
        ),
    ),
    "accepted for torchrun's sake, without effect (the reason is printed)": (
        _shared("rdzv-backend", "NAME", "c10d, static, etcd or etcd-v2 (default: none)"),
        _shared("master-addr", "HOST", "address of rank 0 (default: chosen in every round)"),
        _shared("master-port", "PORT", "port of rank 0 (default: chosen in every round)"),
        _shared("monitor-interval", "SECONDS", "polling interval (default: nothing polls)"),
        _shared("start-method", "NAME", "spawn, fork or forkserver (default: none)"),
        _shared("event-log-handler", "NAME", "handler of torchrun's events (default: none)"),
        _shared("duplicate-stdout-filters", "TEXT,...", "lines to copy (default: none)"),
        _shared("duplicate-stderr-filters", "TEXT,...", "lines to copy (default: none)"),
        Flag(
            "numa-binding",
            "MODE",
            "node, socket, exclusive or core-complex (default: no binding)",
        ),
    ),
    "refused": (Flag("logs-specs", "NAME", "plug-ins for torchrun's log files are not supported"),),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A user's answer to one flag, and its source."""

    text: str
    source: str

    def whole(self, *, least: int) -> int:
        try:
            number = int(self.text)
        except ValueError:
            number = least - 1
        if number < least:
            raise UsageError(
                f"{self.source} must be a whole number of at least {least}, not {self.text!r}"
            )
        return number

    def seconds(self, *, zero: bool = True) -> float:
        try:
            number = float(self.text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            least = "0 or more" if zero else "more than 0"
            raise UsageError(f"{self.source} must be {least} seconds, not {self.text!r}")
        return number

    def one_of(self, *choices: str) -> str:
        if self.text not in choices:
            raise UsageError(
                f"{self.source} must be one of {', '.join(choices)}, not {self.text!r}"
            )
        return self.text


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers of a user, from the command line first and the environment second."""

    script: str
    script_args: tuple[str, ...]
    by_name: Mapping[str, Answer]

    def get(self, name: str) -> Answer | None:
        return self.by_name.get(name)

    def text(self, name: str) -> str | None:
        answer = self.by_name.get(name)
        return None if answer is None else answer.text

    def path(self, name: str) -> Path | None:
        answer = self.by_name.get(name)
        return None if answer is None else Path(answer.text)

    def whole(self, name: str, *, least: int, default: int) -> int:
        answer = self.by_name.get(name)
        return default if answer is None else answer.whole(least=least)

    def is_on(self, name: str) -> bool:
        answer = self.by_name.get(name)
        if answer is None:
            return False
        try:
            return int(answer.text) != 0
        except ValueError:
            raise UsageError(f"{answer.source} must be 0 or 1, not {answer.text!r}") from None


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option that was accepted and has no effect."""

    option: str
    reason: str


_ROUND_PICKS_RANK_0 = (
    "the address of rank 0 is chosen in every round, so that it can move to another node; "
    "--master names the master"
)
_OWN_FILES = "every rank has a file of its own under --log-dir that can be searched"

_WITHOUT_EFFECT: tuple[tuple[str, Callable[[Answer], object], str], ...] = (
    (
        "rdzv-backend",
        lambda answer: answer.one_of("c10d", "static", "etcd", "etcd-v2"),
        "the master forms the world, so there is no other backend",
    ),
    ("master-addr", lambda answer: answer.text, _ROUND_PICKS_RANK_0),
    ("master-port", lambda answer: answer.whole(least=0), _ROUND_PICKS_RANK_0),
    ("monitor-interval", Answer.seconds, "nothing polls: a worker's end is seen at once"),
    (
        "start-method",
        lambda answer: answer.one_of("spawn", "fork", "forkserver"),
        "workers are forked from a warm spare or started afresh; --no-spares chooses the latter",
    ),
    (
        "event-log-handler",
        lambda answer: answer.text,
        "events are in the master's journal: see `holdfast status`",
    ),
    ("duplicate-stdout-filters", lambda answer: answer.text, _OWN_FILES),
    ("duplicate-stderr-filters", lambda answer: answer.text, _OWN_FILES),
    (
        "numa-binding",
        lambda answer: answer.one_of("node", "socket", "exclusive", "core-complex"),
        "workers are not bound to CPUs",
    ),
)
"""Flag, a check that still finds typing mistakes, and why the flag does nothing."""


def without_effect(answers: Answers) -> list[Ignored]:
    """The given flags that have no effect, each with the reason."""
    found: list[Ignored] = []
    for name, check, reason in _WITHOUT_EFFECT:
        if answer := answers.get(name):
            check(answer)
            found.append(Ignored(answer.source, reason))
    return found


class _Parser(HelpfulParser):
    """An argument parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


Flags = Mapping[str, tuple[Flag, ...]]
"""Flags by the title under which the help lists them."""


def build_parser(flags: Flags = FLAGS, command: str = "holdfast run") -> HelpfulParser:
    """The parser behind `holdfast run`, or a command like it; its help lists every flag."""
    parser = _Parser(
        prog=command,
        usage=f"{command} [options] script [script options]",
        description="Run a training script on every worker of a job and keep it running. "
        "Commands written for torchrun work as they are.",
        epilog="Every option may be written with underscores instead of dashes. Options of "
        "torchrun's are also read from the environment: PET_NNODES for --nnodes and so on; "
        "a switch is on when its variable is 1. HOLDFAST_MASTER, HOLDFAST_TOKEN_FILE, "
        "HOLDFAST_TLS_CA and HOLDFAST_LOG_LEVEL stand for --master, --token-file, --tls-ca and "
        "--log-level. The command line wins. DLRover's DLROVER_MASTER_ADDR, NODE_RANK and "
        "DLROVER_LOG_LEVEL come last.",
        examples=(
            f"{command} train.py --epochs 3",
            f"{command} --nproc-per-node 2 -m package.train --lr 0.1",
            f"{command} --local-nodes 2 --spare-nodes 1 train.py",
            f"{command} --nproc-per-node 4 --debug-rank 2 train.py",
            f"{command} --nnodes 2:8 --master 10.0.0.5:7070 --token-file token --insecure train.py",
        ),
        allow_abbrev=False,
        exit_on_error=False,
    )
    for title, group_flags in flags.items():
        group = parser.add_argument_group(title)
        for flag in group_flags:
            dashed, underscored = f"--{flag.name}", "--" + flag.name.replace("-", "_")
            names = [flag.short, dashed] if flag.short else [dashed]
            shape: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS}
            if flag.is_switch:
                shape |= {"action": "store_const", "const": "1"}
            else:
                shape |= {"metavar": flag.metavar}
            group.add_argument(*names, help=flag.help, **shape)
            if underscored != dashed:
                # Not an alias of the first name: the help would print every name twice.
                group.add_argument(underscored, help=argparse.SUPPRESS, **shape)
    parser.add_argument("script", help="the script, or with -m the module, to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="passed on to the script")
    return parser


def read_answers(
    argv: Sequence[str],
    environ: Mapping[str, str],
    flags: Flags = FLAGS,
    command: str = "holdfast run",
) -> Answers:
    """Collect the answers of the command line and the environment; `--help` prints and exits."""
    known = [flag for group in flags.values() for flag in group]
    try:
        parsed, unknown = build_parser(flags, command).parse_known_args(list(argv))
    except argparse.ArgumentError as mistake:
        raise UsageError(_sentence(mistake, command)) from None
    if unknown:
        raise UsageError(_unknown(unknown[0], known, command))
    typed: dict[str, Any] = vars(parsed)
    by_name: dict[str, Answer] = {}
    for flag in known:
        if flag.name in typed:
            by_name[flag.name] = Answer(typed[flag.name], f"--{flag.name}")
        elif found := flag.variables(environ):
            by_name[flag.name] = Answer(environ[found[0]], found[0])
    return Answers(typed["script"], tuple(typed["script_args"]), by_name)


def variables(flags: Flags = FLAGS) -> set[str]:
    """Every variable that can answer a flag."""
    known = [flag for group in flags.values() for flag in group]
    return {name for flag in known for name in (flag.env, *flag.also) if name}


def _sentence(mistake: argparse.ArgumentError, command: str) -> str:
    name, message = mistake.argument_name, mistake.message
    if name is None:
        # The only thing argparse can miss is the script: every flag is optional.
        return (
            "the script to run is missing: give its name after the options, as in "
            f"`{command} --nproc-per-node 2 train.py`"
        )
    if message.startswith("ignored explicit argument"):
        return f"{name} is a switch and takes no value"
    return f"{name} needs a value"


def _unknown(token: str, flags: Sequence[Flag], command: str) -> str:
    name = token.split("=", 1)[0]
    dashed = name.replace("_", "-")
    near = closest(dashed, (f"--{flag.name}" for flag in flags))
    hint = f"did you mean {near}?" if near else "options of the script go after its name"
    return f"{name} is not an option of {command}: {hint}"

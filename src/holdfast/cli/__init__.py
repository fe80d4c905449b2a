# SPDX-License-Identifier: Apache-2.0
"""The `holdfast` command: one file per subcommand."""

import functools
import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast import __version__
from holdfast.cli.parser import EXIT_USAGE, Parser
from holdfast.model.errors import HoldfastError, UsageError
from holdfast.runtime.signals import ignore_notices

EXIT_FAILED = 1

COMMANDS = {
    "run": "train: torchrun's flags, and a job that survives failures",
    "status": "show a job: nodes, world, step, goodput and incidents",
    "stop": "end a job for good: its memory goes to storage first",
    "demo": "watch a small job survive three kills",
    "ckpt": "list, verify, export and remove checkpoints",
    "data": "show the datasets of a job: progress, rate, leases and what was set aside",
    "master": "run the control plane of a job",
    "k8s": "jobs in a Kubernetes cluster: submit, status, logs, scale, ...",
    "operator": "look after the ElasticJobs of a Kubernetes cluster",
    "sim": "predict the goodput of a cluster: failures, spares, checkpoints and restarts",
    "completion": "print a script that lets the shell complete all of these",
}
"""In the order of `holdfast --help`. Each has a file of its name with an `add_parser`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 when the job failed, 2 for a mistake of the user."""
    ignore_notices()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _ending_at_ctrl_c():
            command = _find(words)
        return command()
    except UsageError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except HoldfastError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


@contextmanager
def _ending_at_ctrl_c() -> Iterator[None]:
    """Until a command begins, Ctrl-C just ends the process; from then on it is an exception.

    An exception within an import may be swallowed, and no cleaning up is needed yet. A script
    starts its background jobs with SIGINT ignored: a sender of SIGINT to one of them means it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _find(words: list[str]) -> Callable[[], int]:
    """The requested command, with its arguments."""
    # `run` has torchrun's grammar, in which everything after the script belongs to the script.
    if words[:1] == ["run"]:
        from holdfast.cli import run

        return functools.partial(run.main, words[1:])
    if words[:1] == ["dlrover-run"]:
        from holdfast.cli import dlrover_run, run

        return functools.partial(run.main, words[1:], dlrover_run.parse_dlrover_run)
    if words[:1] == ["node"]:
        from holdfast.cli import node

        return functools.partial(node.main, words[1:])
    arguments = build_parser(words[:1]).parse_args(words)
    return functools.partial(arguments.run, arguments)


def build_parser(needed: Sequence[str]) -> Parser:
    """The parser of `holdfast`. Only the `needed` commands get their arguments.

    The others are no more than a name and a line of help: to import the files of all commands takes
    half a second, and a master that is started again must be there soon.
    """
    parser = Parser(
        prog="holdfast",
        description="Keep distributed training running.",
        epilog="`holdfast COMMAND --help` explains a command.",
        examples=(
            "holdfast demo",
            "holdfast run --nproc-per-node 2 train.py",
            "holdfast status",
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in needed:
            importlib.import_module(f"holdfast.cli.{name}").add_parser(commands, summary)
        else:
            commands.add_parser(name, help=summary)
    return parser

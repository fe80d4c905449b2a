# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s`: jobs in a Kubernetes cluster, for people without kubectl at hand."""

import argparse
from pathlib import Path
from typing import TypeAlias

from holdfast.model.errors import UsageError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

SUSPEND_S = 900.0
"""Nodes may take minutes to save, and resumed ones to get a machine."""


def add_parser(commands: Commands, summary: str) -> None:
    """Declare the command and its subcommands."""
    parser = commands.add_parser(
        "k8s",
        help=summary,
        description="Deal with ElasticJobs in a Kubernetes cluster.",
        epilog="Exit codes: 0 done, 1 refused, failed or not reachable, 2 usage or a manifest with "
        "mistakes.",
        examples=(
            "holdfast k8s render job.yaml",
            "holdfast k8s submit job.yaml --wait",
            "holdfast k8s logs bert --rank 1 --follow",
            "holdfast k8s scale bert --replicas 6",
        ),
        allow_abbrev=False,
    )
    own = parser.add_subparsers(metavar="COMMAND", required=True, dest="action")
    _add_render(own)
    _add_submit(own)
    _add_status(own)
    _add_logs(own)
    _add_scale(own)
    _add_suspend(own, "suspend", "take all nodes of a job away, after they have saved")
    _add_suspend(own, "resume", "let a suspended job go on where it was")
    _add_delete(own)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        from holdfast.cli import k8s_actions, k8s_render
    except ModuleNotFoundError as exc:
        raise UsageError(f"{exc}: install holdfast[kubernetes]") from exc
    if arguments.action == "render":
        return k8s_render.render(arguments)
    return k8s_actions.run(arguments)


def _add_render(commands: Commands) -> None:
    parser = _add(
        commands,
        "render",
        "print what a manifest would create; needs no cluster",
        "holdfast k8s render job.yaml",
    )
    _add_files(parser)
    parser.add_argument(
        "-n", "--namespace", default="", metavar="NAME", help="for jobs that name none"
    )
    parser.add_argument(
        "--master-image",
        default="",
        metavar="IMAGE",
        help="the operator's default image for masters",
    )


def _add_submit(commands: Commands) -> None:
    parser = _add(
        commands,
        "submit",
        "create the jobs and scale plans of manifests",
        "holdfast k8s submit job.yaml --wait",
    )
    _add_files(parser)
    _add_cluster(parser)
    parser.add_argument(
        "--wait",
        action="store_true",
        help="until the jobs are over, telling what happens; exit code 1 if one failed",
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="for --wait: give up after this many seconds"
    )


def _add_status(commands: Commands) -> None:
    parser = _add(
        commands,
        "status",
        "show all jobs of a namespace, or one with its nodes",
        "holdfast k8s status bert -n research",
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB")
    _add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print the objects as JSON")


def _add_logs(commands: Commands) -> None:
    parser = _add(
        commands,
        "logs",
        "print what a node of a job, or its master, has printed",
        "holdfast k8s logs bert --rank 1 --follow",
    )
    parser.add_argument("job", metavar="JOB")
    _add_cluster(parser)
    parser.add_argument(
        "--rank", type=_count, default=0, metavar="N", help="of the node (default 0)"
    )
    parser.add_argument("--role", default="worker", metavar="ROLE", help="(default worker)")
    parser.add_argument("--master", action="store_true", help="the master's instead of a node's")
    parser.add_argument("-c", "--container", default="", metavar="NAME", help="(default: the main)")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="over all its pods, until the job is over",
    )
    parser.add_argument("--tail", type=_count, metavar="N", help="only the last lines")


def _add_scale(commands: Commands) -> None:
    parser = _add(
        commands,
        "scale",
        "change how many nodes a job has",
        "holdfast k8s scale bert --replicas 6",
    )
    parser.add_argument("job", metavar="JOB")
    _add_cluster(parser)
    parser.add_argument("--replicas", type=_count, required=True, metavar="N")
    parser.add_argument("--role", default="worker", metavar="ROLE", help="(default worker)")


def _add_suspend(commands: Commands, name: str, help: str) -> None:
    parser = _add(commands, name, help, f"holdfast k8s {name} bert")
    parser.add_argument("job", metavar="JOB")
    _add_cluster(parser)
    parser.add_argument(
        "--no-wait", action="store_true", help="ask for it, and leave it to the cluster"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=SUSPEND_S,
        metavar="S",
        help=f"wait at most this many seconds (default {SUSPEND_S:g}); exit code 1 if not done",
    )


def _add_delete(commands: Commands) -> None:
    parser = _add(
        commands,
        "delete",
        "delete jobs and everything that belongs to them",
        "holdfast k8s delete bert",
    )
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    _add_cluster(parser)


def _add(commands: Commands, name: str, help: str, example: str) -> argparse.ArgumentParser:
    sentence = f"{help[0].upper()}{help[1:]}."
    return commands.add_parser(
        name, help=help, description=sentence, examples=(example,), allow_abbrev=False
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help='manifests (YAML, several documents each); "-" reads standard input',
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="(default: as kubectl finds it)"
    )
    parser.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig")
    parser.add_argument(
        "-n", "--namespace", default="", metavar="NAME", help="(default: that of the context)"
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"must be whole seconds above 0, not {text!r}")
    return float(text)

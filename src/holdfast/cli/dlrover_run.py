# SPDX-License-Identifier: Apache-2.0
"""`dlrover-run`: the launch command of jobs written for DLRover, on Holdfast.

It is `holdfast run` with the flags that `dlrover-run` has beyond torchrun's. Each of them has its
effect, or is accepted and reported as without effect, or is refused with what to use instead.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from holdfast.cli import run_flags
from holdfast.cli.run_flags import Answer, Answers, Flag, Flags, Ignored, read_answers
from holdfast.cli.run_options import RunOptions, interpret
from holdfast.model.errors import UsageError

COMMAND = "dlrover-run"

_NO_CHECK = (
    "nodes are not checked before the training. A node that dies is replaced, and others are kept "
    "away from its host; a slow or half-broken one is neither found nor replaced yet"
)
_NOT_BOUND = "workers are not bound to CPUs or memory"
_NVIDIA = "nvidia.com/gpu"

_WITHOUT_EFFECT: tuple[tuple[Flag, Callable[[Answer], object], str], ...] = (
    (
        Flag("precheck", "N", "0, 1 or 2: check the nodes, and their network"),
        lambda answer: answer.one_of("0", "1", "2"),
        _NO_CHECK,
    ),
    (Flag("network-check", "", "check the network first"), lambda answer: None, _NO_CHECK),
    (Flag("comm-perf-test", "", "measure the network first"), lambda answer: None, _NO_CHECK),
    (
        Flag("exclude-straggler", "", "leave slow nodes out"),
        lambda answer: None,
        "no node is left out for being slow",
    ),
    (
        Flag("save-at-breakpoint", "", "save checkpoints in memory when workers fail"),
        lambda answer: None,
        "it belongs to the Checkpointer: `breakpoint=True`",
    ),
    (
        Flag("auto-tunning", "", "tune the data loader and the optimizer"),
        lambda answer: None,
        "nothing is tuned",
    ),
    (
        Flag("training-port", "PORT", "port of rank 0"),
        lambda answer: answer.whole(least=0),
        "a free port is chosen in every round",
    ),
    (Flag("numa-affinity", "", "bind workers to CPUs"), lambda answer: None, _NOT_BOUND),
    (
        Flag("membind-policy", "POLICY", "bind, preferred or none"),
        lambda answer: answer.one_of("bind", "preferred", "none"),
        _NOT_BOUND,
    ),
    (
        Flag("ucp-device-type", "NAME", "device of universal checkpoints"),
        lambda answer: answer.text,
        "DeepSpeed's universal checkpoints are not made at a restart",
    ),
)
"""Flag, a check that still finds typing mistakes, and why the flag does nothing."""

_WITH_EFFECT = (
    Flag(
        "auto-config",
        "",
        "take what is not given from the platform and the machine: as many nodes as NODE_NUM "
        "says, one worker per GPU (default: off)",
    ),
    Flag(
        "accelerator",
        "NAME",
        "nvidia.com/gpu, ascend-npu, mthreads.com/gpu or metax-tech.com/gpu; with another than "
        f"the first --nproc-per-node must be a number (default: {_NVIDIA})",
    ),
)

FLAGS: Flags = {
    **run_flags.FLAGS,
    "of dlrover-run": _WITH_EFFECT,
    "accepted for dlrover-run's sake, without effect (the reason is printed)": tuple(
        flag for flag, _, _ in _WITHOUT_EFFECT
    ),
}


def main() -> int:
    """The console script."""
    # Imported here: the package's own main finds this module in turn.
    from holdfast.cli import main as holdfast

    return holdfast([COMMAND, *sys.argv[1:]])


def parse_dlrover_run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cpus: int,
    accelerators: int,
    job_suffix: str = "",
) -> RunOptions:
    """Read the command line after `dlrover-run`; UsageError as of `parse_run`."""
    answers = read_answers(argv, environ, FLAGS, COMMAND)
    ignored: list[Ignored] = []
    for flag, check, reason in _WITHOUT_EFFECT:
        if answer := answers.get(flag.name):
            check(answer)
            ignored.append(Ignored(answer.source, reason))
    by_name = dict(answers.by_name)
    if answers.is_on("auto-config"):
        _configure(by_name, environ)
    _check_accelerator(by_name)
    _leave_to_the_master(by_name, ignored)
    options = interpret(
        Answers(answers.script, answers.script_args, by_name),
        environ,
        cpus=cpus,
        accelerators=accelerators,
        job_suffix=job_suffix,
    )
    return replace(options, ignored=(*ignored, *options.ignored))


def _configure(by_name: dict[str, Answer], environ: Mapping[str, str]) -> None:
    """Apply the settings of --auto-config; the user's own flags win."""
    if "NODE_NUM" in environ:
        by_name.setdefault("nnodes", Answer(environ["NODE_NUM"], "NODE_NUM"))
    by_name.setdefault("nproc-per-node", Answer("auto", "--auto-config"))


def _check_accelerator(by_name: Mapping[str, Answer]) -> None:
    accelerator, nproc = by_name.get("accelerator"), by_name.get("nproc-per-node")
    if accelerator is None:
        return
    accelerator.one_of(_NVIDIA, "ascend-npu", "mthreads.com/gpu", "metax-tech.com/gpu")
    if accelerator.text != _NVIDIA and nproc is not None and nproc.text in ("auto", "gpu"):
        raise UsageError(
            f"{accelerator.source} {accelerator.text}: only NVIDIA devices can be counted; say "
            "with --nproc-per-node N how many workers a node has"
        )


def _leave_to_the_master(by_name: dict[str, Answer], ignored: list[Ignored]) -> None:
    """If a platform has a master for this node, there is nothing else to choose."""
    standalone, master = by_name.get("standalone"), by_name.get("master")
    if standalone is not None and master is not None:
        ignored.append(Ignored(standalone.source, f"{master.source} names the job's master"))
        del by_name["standalone"]
    backend = by_name.get("rdzv-backend")
    if backend is not None and backend.text == "dlrover-master":
        ignored.append(Ignored(backend.source, "the master forms the world anyway"))
        del by_name["rdzv-backend"]

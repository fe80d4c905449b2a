# SPDX-License-Identifier: Apache-2.0
"""What the options of `holdfast run` mean, and which of them exclude each other.

Commands written for torchrun must run unchanged, so its flags are accepted with their meaning; if
Holdfast's design has no use for one, the user is told why instead of having to guess. Nothing here
looks at the machine or the environment by itself: both are arguments.
"""

import enum
import ipaddress
import math
import re
import shutil
import signal
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from holdfast.cli.run_conf import rdzv_conf
from holdfast.cli.run_flags import (
    Answer,
    Answers,
    Ignored,
    read_answers,
    variables,
    without_effect,
)
from holdfast.cli.unread import unread_note
from holdfast.model.errors import UsageError
from holdfast.runtime.observe import Level


class Std(enum.IntFlag):
    """A set of a worker's output streams, in torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One `holdfast run` command, checked."""

    min_nodes: int
    max_nodes: int
    node_unit: int
    local_nodes: int
    """Nodes that run on this machine from the start."""
    spare_nodes: int
    nproc: int
    role: str
    max_restarts: int

    job: str | None
    """None only with `master`: the job then has the name that the master knows."""
    rdzv_id: str | None
    """The run id that workers see; None for the name of the job."""
    rdzv_conf: Mapping[str, str]
    """As given; the keys that have an effect are the next two fields."""
    join_timeout_s: float
    last_call_s: float

    standalone: bool
    master: str | None
    """None for a master inside this command."""
    node_rank: int | None
    """None when the master assigns it."""
    local_addr: str | None
    token_file: Path | None
    tls_ca: Path | None
    insecure: bool
    state_dir: Path | None
    """None for a private temporary directory."""
    lease_s: float
    hang_after: str
    """A text for `hang_after_s`."""
    first_step_within: str
    """A text for `seconds_or_off`."""
    retry_mistakes: bool
    grace_s: float
    spares: bool
    signals_to_handle: tuple[signal.Signals, ...]

    log_dir: Path | None
    log_level: Level
    redirects: Std | Mapping[int, Std]
    tee: Std | Mapping[int, Std]
    local_ranks_filter: frozenset[int] | None
    """None for all of them."""
    debug_rank: int | None
    """The rank that the user wants to have the terminal."""
    terminal_rank: int | None
    """The rank that has it."""

    module: bool
    no_python: bool
    run_path: bool
    virtual_local_rank: bool
    script: str
    script_args: tuple[str, ...]

    ignored: tuple[Ignored, ...]
    notes: tuple[str, ...]
    """Sentences to print at the start."""


def parse_run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cpus: int,
    accelerators: int,
    job_suffix: str = "",
) -> RunOptions:
    """Read the command line after `holdfast run`.

    Raises UsageError with one sentence for every mistake; only `--help` exits. A random
    `job_suffix` keeps the default names of two jobs with the same script apart.
    """
    return interpret(
        read_answers(argv, environ),
        environ,
        cpus=cpus,
        accelerators=accelerators,
        job_suffix=job_suffix,
    )


def interpret(
    answers: Answers,
    environ: Mapping[str, str],
    *,
    cpus: int,
    accelerators: int,
    job_suffix: str = "",
) -> RunOptions:
    """The options for these answers, for any command that takes them."""
    if logs_specs := answers.get("logs-specs"):
        raise UsageError(
            f"{logs_specs.source} {logs_specs.text} is not supported: use --log-dir, --redirects "
            "and --tee instead"
        )
    asked = answers.text("nproc-per-node")
    nproc = 1 if asked is None else resolve_nproc(asked, cpus, accelerators)
    return _options(answers, nproc, environ, job_suffix)


def _options(
    answers: Answers, nproc: int, environ: Mapping[str, str], job_suffix: str
) -> RunOptions:
    conf, ignored = rdzv_conf(answers)
    notes = unread_note(environ, variables())
    remarks = _Remarks(ignored=without_effect(answers) + ignored, notes=notes)
    nodes = _node_counts(answers, remarks, is_launched="HOLDFAST_NODE_ID" in environ)
    place = _place(answers, nodes, remarks)
    lease, hang = answers.get("lease"), answers.get("hang-after") or Answer("auto", "")
    hang_after_s(hang.text, hang.source)
    first_step = answers.get("first-step-within") or Answer("7200", "")
    seconds_or_off(first_step.text, first_step.source)
    for answer in (hang, first_step, answers.get("retry-mistakes")):
        if place.master is not None and answer is not None and answer.source:
            remarks.ignore(answer, "`holdfast master` takes it")
    _check_program(answers)
    return RunOptions(
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        node_unit=nodes.unit,
        local_nodes=nodes.local,
        spare_nodes=nodes.spare,
        nproc=nproc,
        role=answers.text("role") or "default",
        max_restarts=answers.whole("max-restarts", least=0, default=3),
        job=_job_name(answers, place, job_suffix),
        rdzv_id=answers.text("rdzv-id"),
        rdzv_conf=conf.given,
        join_timeout_s=conf.join_timeout_s,
        last_call_s=conf.last_call_s,
        standalone=place.standalone,
        master=place.master,
        node_rank=place.node_rank,
        local_addr=answers.text("local-addr"),
        token_file=answers.path("token-file"),
        tls_ca=answers.path("tls-ca"),
        insecure=answers.is_on("insecure"),
        state_dir=answers.path("state"),
        lease_s=lease.seconds(zero=False) if lease else 60.0,
        hang_after=hang.text,
        first_step_within=first_step.text,
        retry_mistakes=answers.is_on("retry-mistakes"),
        grace_s=_grace_s(answers, environ, remarks),
        spares=not answers.is_on("no-spares"),
        signals_to_handle=_signals(answers.get("signals-to-handle")),
        log_dir=answers.path("log-dir"),
        log_level=_level(answers.get("log-level"), remarks),
        redirects=_std(answers.get("redirects")),
        tee=_std(answers.get("tee")),
        local_ranks_filter=_ranks(answers.get("local-ranks-filter")),
        debug_rank=_debug_rank(answers, nproc, nodes),
        terminal_rank=None,
        module=answers.is_on("module"),
        no_python=answers.is_on("no-python"),
        run_path=answers.is_on("run-path"),
        virtual_local_rank=answers.is_on("virtual-local-rank"),
        script=answers.script,
        script_args=answers.script_args,
        ignored=tuple(remarks.ignored),
        notes=tuple(remarks.notes),
    )


def resolve_nproc(text: str, cpus: int, accelerators: int) -> int:
    """The number of workers per node for this --nproc-per-node."""
    if text == "auto":
        return accelerators or cpus
    if text == "cpu":
        return cpus
    if text == "gpu":
        if accelerators == 0:
            raise UsageError("--nproc-per-node gpu: this node has no GPU, use cpu or a number")
        return accelerators
    if re.fullmatch(r"\+?\d+", text.strip()) and int(text) > 0:
        return int(text)
    raise UsageError(
        f"--nproc-per-node must be a whole number of at least 1, auto, cpu or gpu, not {text!r}"
    )


def count_accelerators(visible: str | None, devices: Path = Path("/dev")) -> int:
    """GPUs that a worker will see; `visible` is CUDA_VISIBLE_DEVICES, None when it is not set.

    Counts device files, because asking torch would take seconds and create a device context.
    As in CUDA, the list of visible devices ends at the first one that does not exist.
    """
    present = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if visible is None or present == 0:
        return present
    count = 0
    for entry in (entry.strip() for entry in visible.split(",")):
        is_index = entry.isdecimal() and int(entry) < present
        if not is_index and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def std_of(choice: Std | Mapping[int, Std], local_rank: int) -> Std:
    """The streams chosen for one local rank."""
    return choice if isinstance(choice, Std) else choice.get(local_rank, Std.NONE)


def parse_address(text: str, source: str, *, zero: bool = False) -> tuple[str, int]:
    """Split HOST:PORT or [IPV6]:PORT; `source` names the option in the error.

    Port 0, for a port that the kernel chooses, is only for listening addresses (`zero`).
    """
    match = re.fullmatch(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<name>[\w.-]+)):(?P<port>\d{1,5})", text)
    is_good = match is not None and (0 if zero else 1) <= int(match["port"]) < 65536
    if match is not None and match["ipv6"]:
        is_good = is_good and _is_ipv6(match["ipv6"])
    if match is None or not is_good:
        hint = ", with an IPv6 address in brackets" if text.count(":") > 1 else ""
        raise UsageError(f"{source} must be HOST:PORT{hint}, not {text!r}")
    return match["ipv6"] or match["name"], int(match["port"])


def check_job_name(name: str) -> None:
    """A job's name is part of file names and of what users see: refuse anything odd."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise UsageError(
            "--job must be at most 63 letters, digits, dots, dashes or underscores and begin with "
            f"a letter or digit, not {name!r}"
        )


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def check_script(options: RunOptions) -> None:
    """Refuse a script that cannot be run; a module is left to Python to find."""
    script = Path(options.script)
    if options.module:
        return
    if options.no_python and not options.run_path:
        if shutil.which(options.script) is None:
            why = "is not executable" if script.exists() else "does not exist"
            raise UsageError(f"{options.script} {why}")
    elif not script.exists():
        raise UsageError(f"{options.script} does not exist")
    elif script.is_dir() and not (script / "__main__.py").exists():
        raise UsageError(f"{options.script} is a directory without a __main__.py")


def check_files(options: RunOptions) -> None:
    """Refuse files named on the command line that do not exist."""
    for name, path in (
        ("--token-file", options.token_file),
        ("--tls-ca", options.tls_ca),
    ):
        if path is not None and not path.is_file():
            raise UsageError(f"{name} {path} is not a file")


@dataclass(frozen=True, slots=True)
class _Remarks:
    ignored: list[Ignored]
    notes: list[str]

    def ignore(self, answer: Answer, reason: str) -> None:
        self.ignored.append(Ignored(answer.source, reason))


class _NodeCounts(NamedTuple):
    least: int
    most: int
    unit: int
    local: int
    spare: int


def _node_counts(answers: Answers, remarks: _Remarks, *, is_launched: bool) -> _NodeCounts:
    local = answers.whole("local-nodes", least=1, default=1)
    spare = answers.whole("spare-nodes", least=0, default=0)
    unit = answers.whole("node-unit", least=1, default=1)
    asked = answers.get("nnodes")
    least, most = (local, local) if asked is None else _node_range(asked)
    if asked is not None and most < least:
        if not is_launched:
            raise UsageError(f"{asked.source} {asked.text}: the most is below the fewest")
        # As in `--nnodes 3:$NODE_NUM`: the platform has fewer nodes than the command asks for.
        remarks.notes.append(f"{asked.source} {asked.text}: the job has {most} nodes, so be it")
        least = most
    if spare and answers.get("local-nodes") is None:
        raise UsageError("--spare-nodes needs --local-nodes: other nodes are not ours to start")
    if answers.get("local-nodes") is not None and most > local + spare:
        raise UsageError(
            f"{most} nodes cannot run on {local} local nodes and {spare} spare nodes: lower "
            "--nnodes or raise --local-nodes"
        )
    if most // unit * unit < least:
        raise UsageError(f"no multiple of --node-unit {unit} lies between {least} and {most} nodes")
    return _NodeCounts(least, most, unit, local, spare)


def _level(answer: Answer | None, remarks: _Remarks) -> Level:
    if answer is None:
        return Level.INFO
    if answer.source != DLROVER_LEVEL:
        return parse_level(answer.text, answer.source)
    level, note = dlrover_level(answer.text)
    remarks.notes.extend([note] if note else [])
    return level


def _debug_rank(answers: Answers, nproc: int, nodes: _NodeCounts) -> int | None:
    answer = answers.get("debug-rank")
    if answer is None:
        return None
    rank = answer.whole(least=0)
    if nodes.local + nodes.spare > 1:
        raise UsageError(f"{answer.source} needs one node: --local-nodes have no terminal")
    if rank >= nproc * nodes.most:
        most = nproc * nodes.most
        raise UsageError(f"{answer.source} {rank}: the job has {most} ranks, from 0 to {most - 1}")
    return rank


def _node_range(answer: Answer) -> tuple[int, int]:
    try:
        bounds = [int(part) for part in answer.text.split(":")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2):
        raise UsageError(f"{answer.source} must be N or MIN:MAX, not {answer.text!r}")
    least, most = bounds[0], bounds[-1]
    if min(bounds) < 1:
        raise UsageError(f"{answer.source} {answer.text}: a job needs at least 1 node")
    return least, most


class _Place(NamedTuple):
    standalone: bool
    master: str | None
    node_rank: int | None


def _place(answers: Answers, nodes: _NodeCounts, remarks: _Remarks) -> _Place:
    """The master's address, and this node's slot."""
    standalone = answers.is_on("standalone")
    master = _master(answers, nodes, standalone, remarks)
    if master is None and nodes.most > 1 and answers.get("local-nodes") is None:
        raise UsageError(
            f"{nodes.most} nodes need a master that all of them reach: start `holdfast master` "
            "and give its address with --master HOST:PORT on every node, or run all nodes on "
            f"this machine with --local-nodes {nodes.most}"
        )
    if master is not None and answers.get("state") is not None:
        raise UsageError("--state belongs to the embedded master and cannot go with --master")
    node_rank = answers.get("node-rank")
    if node_rank is None:
        return _Place(standalone, master, None)
    rank = node_rank.whole(least=0)
    if master is None:
        remarks.ignore(node_rank, "the embedded master numbers the nodes itself")
        return _Place(standalone, None, None)
    return _Place(standalone, master, rank)


def _master(
    answers: Answers, nodes: _NodeCounts, standalone: bool, remarks: _Remarks
) -> str | None:
    own = "--standalone" if standalone else "--local-nodes" if answers.get("local-nodes") else None
    master, endpoint = answers.get("master"), answers.get("rdzv-endpoint")
    if master is not None:
        parse_address(master.text, master.source)
        if master.source == "DLROVER_MASTER_ADDR" and not own:
            remarks.notes.append(
                f"{master.source} {master.text} is taken as the address of --master"
            )
        if own and master.source == "--master":
            raise UsageError(f"{own} starts its own master and cannot go with --master")
        if own:
            remarks.ignore(master, f"{own} starts its own master")
            master = None
    if endpoint is None:
        return None if master is None else master.text
    if master is not None:
        remarks.ignore(endpoint, f"{master.source} already names the master")
        return master.text
    if own or nodes.most == 1:
        remarks.ignore(endpoint, "the nodes of this job are all here: the master is embedded")
        return None
    parse_address(endpoint.text, endpoint.source)
    remarks.notes.append(f"{endpoint.source} {endpoint.text} is taken as the address of --master")
    return endpoint.text


def _grace_s(answers: Answers, environ: Mapping[str, str], remarks: _Remarks) -> float:
    grace, shutdown = answers.get("grace"), answers.get("shutdown-timeout")
    if shutdown is None and (from_torch := environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")):
        shutdown = Answer(from_torch, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    shutdown_s = 10.0 if shutdown is None else float(shutdown.whole(least=0))
    if grace is None:
        return shutdown_s
    if shutdown is not None:
        remarks.ignore(shutdown, "--grace says the same and wins")
    return grace.seconds()


DLROVER_LEVEL = "DLROVER_LOG_LEVEL"

_PYTHONS_LEVELS = {"NOTSET": 0, "WARN": 30, "FATAL": 50, "CRITICAL": 50}


def dlrover_level(text: str) -> tuple[Level, str]:
    """The meaning of DLROVER_LOG_LEVEL, which has the names and numbers of Python's logging.

    It adds a note if the value means nothing: a cluster sets it for other programs, and no job must
    fail because of it.
    """
    name = text.strip().upper()
    if name in Level.__members__:
        return Level[name], ""
    number = int(name) if name.isdecimal() else _PYTHONS_LEVELS.get(name)
    if number is None:
        return Level.INFO, f"{DLROVER_LEVEL}={text!r} is no level of Python's logging: info it is"
    return next((level for level in Level if level >= number), Level.ERROR), ""


def parse_level(text: str, source: str) -> Level:
    """The meaning of --log-level; in capitals too."""
    try:
        return Level[text.upper()]
    except KeyError:
        names = ", ".join(level.name.lower() for level in Level)
        raise UsageError(f"{source} must be one of {names}, not {text!r}") from None


def hang_after_s(text: str, source: str) -> float | None:
    """The value of --hang-after for a JobSpec; UsageError if it is neither word nor number."""
    if text in ("auto", "off"):
        return None if text == "auto" else math.inf
    try:
        return Answer(text, source).seconds(zero=False)
    except UsageError:
        raise UsageError(f"{source} must be auto, off or seconds above 0, not {text!r}") from None


def seconds_or_off(text: str, source: str) -> float:
    """Seconds above 0; infinite for the word off."""
    try:
        return math.inf if text == "off" else Answer(text, source).seconds(zero=False)
    except UsageError:
        raise UsageError(f"{source} must be off or seconds above 0, not {text!r}") from None


def _check_program(answers: Answers) -> None:
    if answers.is_on("module"):
        for other in ("no-python", "run-path"):
            if answers.is_on(other):
                raise UsageError(f"--module and --{other} cannot go together")


def _job_name(answers: Answers, place: _Place, suffix: str) -> str | None:
    given = answers.text("job")
    if given is None and place.master is None:
        program = answers.script if answers.is_on("module") else Path(answers.script).stem
        words = re.findall(r"[a-z0-9]+", program.lower())
        stem = "-".join(words)[:40].strip("-") or "job"
        state = answers.path("state")
        if state is not None:
            # The same suffix for the same directory, because its journal belongs to one job.
            suffix = f"{zlib.crc32(str(state).encode()) & 0xFFFF:04x}"
        return f"{stem}-{suffix}" if suffix else stem
    if given is not None:
        check_job_name(given)
    return given


def _signals(answer: Answer | None) -> tuple[signal.Signals, ...]:
    if answer is None:
        return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    chosen: dict[signal.Signals, None] = {}
    for name in (name.strip() for name in answer.text.split(",")):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"{answer.source}: {name!r} is not a signal that can be handled")
        chosen[signal.Signals[name]] = None
    return tuple(chosen)


def _std(answer: Answer | None) -> Std | dict[int, Std]:
    if answer is None:
        return Std.NONE
    if re.fullmatch(r"[0-3]", answer.text):
        return Std(int(answer.text))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", answer.text):
        pairs = (pair.split(":") for pair in answer.text.split(","))
        return {int(rank): Std(int(streams)) for rank, streams in pairs}
    raise UsageError(
        f"{answer.source} must be 0, 1, 2 or 3, or one of them per local rank as in 0:1,1:2, "
        f"not {answer.text!r}"
    )


def _ranks(answer: Answer | None) -> frozenset[int] | None:
    if answer is None or not answer.text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", answer.text.replace(" ", "")):
        raise UsageError(
            f"{answer.source} must be local ranks with commas between them, as in 0,1,2, "
            f"not {answer.text!r}"
        )
    return frozenset(int(rank) for rank in answer.text.split(","))

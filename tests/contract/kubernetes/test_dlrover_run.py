# SPDX-License-Identifier: Apache-2.0
"""Every flag of `dlrover-run` has its effect, is said to have none, or is refused by name."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli import run_flags
from holdfast.cli.dlrover_run import FLAGS, parse_dlrover_run
from holdfast.cli.run_options import RunOptions, parse_run
from holdfast.model.errors import UsageError

RUN_MD = Path(__file__).parents[3] / "docs/run.md"
OWN = {
    flag.name: flag
    for title, flags in FLAGS.items()
    if title not in run_flags.FLAGS
    for flag in flags
}
IN_POD = {
    "HOLDFAST_MASTER": "elasticjob-j-dlrover-master.ns.svc:50001",
    "HOLDFAST_TOKEN_FILE": "/var/run/holdfast/token",
    "HOLDFAST_TLS_CA": "/var/run/holdfast/ca.crt",
    "HOLDFAST_NODE_ID": "7",
    "DLROVER_MASTER_ADDR": "elasticjob-j-dlrover-master.ns.svc:50001",
    "ELASTIC_JOB_NAME": "j",
    "JOB_UID": "u",
    "NODE_TYPE": "worker",
    "NODE_ID": "7",
    "NODE_NUM": "4",
    "NODE_RANK": "2",
    "POD_NAME": "j-edljob-worker-7",
    "POD_IP": "10.0.0.7",
    "NODE_IP": "192.168.0.1",
    "MONITOR_ENABLED": "true",
    "WORKER_TYPE": "worker",
    "WORKER_ID": "7",
    "WORKER_NUM": "4",
    "WORKER_RANK": "2",
    "RANK": "2",
    "WORLD_SIZE": "4",
}
"""What a node's pod has in its environment: ours, and the prior art's."""


def parse(*argv: str, env: Mapping[str, str] | None = None) -> RunOptions:
    return parse_dlrover_run(argv, env or {}, cpus=2, accelerators=0)


def mistake(*argv: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*argv, env=env)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


NOT_NEEDED = {
    "precheck": "1",
    "network-check": None,
    "comm-perf-test": None,
    "exclude-straggler": None,
    "save-at-breakpoint": None,
    "auto-tunning": None,
    "training-port": "60000",
    "numa-affinity": None,
    "membind-policy": "preferred",
    "ucp-device-type": "cpu",
}


IN_DOCS = {
    flag: here
    for flags, here in re.findall(r"^\| (`--.*?) \| (.*?) \|$", RUN_MD.read_text(), re.MULTILINE)
    for flag in re.findall(r"`(--[a-z-]+)", flags)
}
"""What docs/run.md says of each flag in its tables."""


def test_this_file_knows_every_flag() -> None:
    assert set(OWN) == {*NOT_NEEDED, "auto-config", "accelerator"}


@pytest.mark.parametrize("spelling", ["dashes", "underscores"])
@pytest.mark.parametrize("name", NOT_NEEDED)
def test_a_flag_without_effect_is_accepted_and_named_with_the_reason(
    name: str, spelling: str
) -> None:
    value = NOT_NEEDED[name]
    flag = f"--{name}" if spelling == "dashes" else f"--{name.replace('-', '_')}"
    options = parse(flag if value is None else f"{flag}={value}", "train.py")
    (ignored,) = options.ignored
    assert ignored.option == f"--{name}"
    # The page and the program say the same of it.
    assert f"ignored: {ignored.reason}" == IN_DOCS[f"--{name}"]
    assert replace(options, ignored=()) == parse("train.py")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--precheck", "3"], "--precheck must be one of 0, 1, 2"),
        (["--training_port", "many"], "--training-port must be a whole number"),
        (["--membind-policy", "strict"], "--membind-policy must be one of bind, preferred, none"),
        (["--accelerator", "tpu"], "--accelerator must be one of nvidia.com/gpu, ascend-npu"),
        (["--network-check=yes"], "--network-check is a switch and takes no value"),
        (["--network-chek"], "is not an option of dlrover-run: did you mean --network-check?"),
        (["--rdzv_conf", "wait=1"], "--rdzv-conf has no key 'wait'"),
    ],
)
def test_a_typing_mistake_is_named(argv: list[str], words: str) -> None:
    assert words in mistake(*argv, "train.py")


def test_auto_config_takes_nodes_and_workers_from_where_the_node_runs() -> None:
    options = parse("--auto-config", "train.py", env=IN_POD)
    assert (options.min_nodes, options.max_nodes, options.nproc) == (4, 4, 2)
    given = parse(
        "--auto_config", "--nnodes", "2:4", "--nproc_per_node", "3", "train.py", env=IN_POD
    )
    assert (given.min_nodes, given.max_nodes, given.nproc) == (2, 4, 3)
    assert parse("--auto-config", "train.py").max_nodes == 1


def test_devices_that_nobody_can_count_need_a_number_of_workers() -> None:
    sentence = mistake("--accelerator", "ascend-npu", "--nproc_per_node", "auto", "train.py")
    assert "--accelerator ascend-npu" in sentence
    assert "--nproc-per-node N" in sentence
    assert "--accelerator" in mistake("--accelerator=mthreads.com/gpu", "--auto-config", "t.py")
    assert parse("--accelerator", "ascend-npu", "--nproc_per_node", "8", "train.py").nproc == 8


def test_the_usual_command_in_a_pod() -> None:
    """`dlrover-run --network-check --nnodes=3:$NODE_NUM ...` finds master, token and trust."""
    options = parse(
        "--network-check", "--nnodes=3:4", "--nproc_per_node=8", "--max_restarts=3",
        "--rdzv_conf", "join_timeout=60,lastcall_timeout=20,pend_timeout=3600",
        "train.py", "--lr", "0.1", env=IN_POD,
    )  # fmt: skip
    assert (options.min_nodes, options.max_nodes, options.nproc) == (3, 4, 8)
    assert (options.join_timeout_s, options.last_call_s) == (60.0, 20.0)
    assert options.master == IN_POD["HOLDFAST_MASTER"]
    assert str(options.token_file) == "/var/run/holdfast/token"
    assert str(options.tls_ca) == "/var/run/holdfast/ca.crt"
    assert options.script_args == ("--lr", "0.1")
    assert {one.option for one in options.ignored} == {
        "--network-check",
        "--rdzv-conf pend_timeout",
    }


def test_more_nodes_asked_for_than_the_job_has_are_as_many_as_it_has() -> None:
    """`--nnodes=3:$NODE_NUM` in a job of two nodes."""
    options = parse("--nnodes=3:2", "train.py", env=IN_POD)
    assert (options.min_nodes, options.max_nodes) == (2, 2)
    assert "--nnodes 3:2" in options.notes[0]
    assert "the most is below the fewest" in mistake("--nnodes=3:2", "--master", "h:1", "train.py")
    assert "at least 1 node" in mistake("--nnodes=1:0", "train.py", env=IN_POD)


def test_standalone_gives_way_to_the_master_of_the_job() -> None:
    options = parse("--standalone", "train.py", env=IN_POD)
    assert options.master == IN_POD["HOLDFAST_MASTER"]
    assert [one.option for one in options.ignored] == ["--standalone"]
    assert parse("--standalone", "train.py").master is None


def test_the_prior_arts_backend_is_ours() -> None:
    (ignored,) = parse("--rdzv_backend", "dlrover-master", "train.py").ignored
    assert ignored.option == "--rdzv-backend"
    assert "must be one of c10d" in mistake("--rdzv_backend", "dlrover", "train.py")


def test_flags_of_torchrun_mean_the_same() -> None:
    argv = ["--nproc-per-node", "2", "--max_restarts", "1", "-r", "3", "-m", "pkg.train", "--x"]
    assert parse(*argv) == parse_run(argv, {}, cpus=2, accelerators=0)


def test_the_prior_arts_environment_is_not_taken_for_flags() -> None:
    """NODE_RANK, RANK, WORLD_SIZE and so on are of the node, not torchrun's of a worker."""
    ours = {name: value for name, value in IN_POD.items() if name.startswith("HOLDFAST_")}
    assert parse("train.py", env=IN_POD) == parse("train.py", env=ours)
    assert parse("train.py", env=IN_POD).node_rank is None


def test_the_command_explains_itself_and_its_mistakes() -> None:
    command = "from holdfast.cli.dlrover_run import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: dlrover-run [options] script")
    for name in OWN:
        assert f"--{name}" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-c", command, "--nnodes", "x", "train.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert wrong.returncode == 2
    assert wrong.stderr == "holdfast: --nnodes must be N or MIN:MAX, not 'x'\n"

# SPDX-License-Identifier: Apache-2.0
"""`holdfast run` reads a command as torchrun does: torch's own parser is the reference."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std as TorchStd

from holdfast.cli.run_flags import FLAGS
from holdfast.cli.run_options import RunOptions, parse_run


def parse(command: str, environ: Mapping[str, str]) -> RunOptions:
    return parse_run(command.split(), environ, cpus=2, accelerators=0)


SHARED_COMMANDS = [
    "train.py",
    "--standalone train.py",
    "--standalone --nnodes=1 --nproc-per-node=4 train.py --lr 0.1 --standalone",
    "--nnodes 1 --nproc_per_node 2 train.py --nnodes 7 --nproc_per_node 9",
    "--nnodes 1:1 train.py",
    "--nproc-per-node cpu train.py",
    "--nproc-per-node auto train.py",
    "-m pkg.train -m other",
    "--module pkg.train --module",
    "--no-python bash -c true",
    "--no_python ./program -h",
    "--run-path /abs/train.py --help",
    "--run_path --no-python train.py",
    "-r 3 -t 0:1,1:2 train.py -r 1",
    "-r3 -t1 train.py",
    "--redirects=0:3,1:0,2:1,3:2 --tee 2 train.py",
    "--max-restarts 5 --role trainer --rdzv-id run-7 train.py",
    "--max_restarts=0 --rdzv_id=x --log_dir /logs train.py",
    "--rdzv-backend c10d --rdzv-endpoint localhost:0 --nnodes 1 train.py a b",
    "--rdzv-conf join_timeout=30,last_call_timeout=2 train.py",
    "--local-ranks-filter 0,2 --signals-to-handle SIGTERM,SIGUSR1 train.py",
    "--master-addr 127.0.0.1 --master_port 29501 --node-rank 0 --local-addr me train.py",
    "--monitor-interval 5 --start-method fork --event-log-handler null train.py",
    "--numa-binding node --virtual-local-rank --shutdown-timeout 7 train.py",
    "--duplicate-stdout-filters a,b --duplicate_stderr_filters c train.py",
    "--nnodes 2 --nnodes 1 train.py",
    "--nnodes 2:4 --rdzv-endpoint h:29400 --nproc-per-node 8 train.py",
    "-- train.py --x",
    "train.py -- --x",
    "train.py --x -- --y",
    "--standalone train.py --config=a=b -1",
]


def assert_same(ours: RunOptions, theirs: Mapping[str, Any]) -> None:
    """Compare what torch's parser read with what ours did, for the flags that we honour."""
    assert ours.script == theirs["training_script"]
    assert list(ours.script_args) == theirs["training_script_args"]
    nodes = torchrun.parse_min_max_nnodes(theirs["nnodes"])
    assert (ours.min_nodes, ours.max_nodes) == nodes
    if theirs["nproc_per_node"] in ("auto", "cpu"):
        assert ours.nproc == 2
    else:
        assert ours.nproc == torchrun.determine_local_world_size(theirs["nproc_per_node"])
    for name in ("standalone", "module", "no_python", "run_path", "role", "virtual_local_rank"):
        assert getattr(ours, name) == theirs[name], name
    for name in ("redirects", "tee"):
        assert getattr(ours, name) == TorchStd.from_str(theirs[name]), name
    assert ours.log_dir == (theirs["log_dir"] and Path(theirs["log_dir"]))
    assert (ours.rdzv_id or "none") == theirs["rdzv_id"]
    assert [entry.name for entry in ours.signals_to_handle] == theirs["signals_to_handle"].split(
        ","
    )


@pytest.mark.parametrize("command", SHARED_COMMANDS)
def test_commands_mean_what_torchrun_reads(command: str) -> None:
    assert_same(parse(command, {}), vars(torchrun.get_args_parser().parse_args(command.split())))


SHARED_ENVIRONMENTS: list[dict[str, str]] = [
    {"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "3"},
    {"PET_STANDALONE": "1", "PET_ROLE": "actor", "PET_MAX_RESTARTS": "2"},
    {"PET_STANDALONE": "0", "PET_MODULE": "1"},
    {"PET_NO_PYTHON": "1", "PET_LOG_DIR": "/logs", "PET_REDIRECTS": "3", "PET_TEE": "0:1"},
    {"PET_RUN_PATH": "1", "PET_RDZV_ID": "seven", "PET_SIGNALS_TO_HANDLE": "SIGINT"},
    {"PET_VIRTUAL_LOCAL_RANK": "1", "PET_RDZV_ENDPOINT": ""},
]


READ_BY_TORCHRUN = """
import json, os, sys
from torch.distributed.run import get_args_parser
for environ, command in json.load(sys.stdin):
    os.environ.update(environ)
    print(json.dumps(vars(get_args_parser().parse_args(command.split()))))
    for name in environ:
        del os.environ[name]
"""


def test_environment_means_what_torchrun_reads() -> None:
    commands = ("train.py --x", "--nproc-per-node 5 --role boss train.py")
    cases = [(environ, command) for environ in SHARED_ENVIRONMENTS for command in commands]
    # In a process of its own, because torch reads the environment of the one it is in.
    read = subprocess.run(
        [sys.executable, "-c", READ_BY_TORCHRUN],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = read.stdout.splitlines()
    assert len(answers) == len(cases)
    for (environ, command), answer in zip(cases, answers, strict=True):
        assert_same(parse(command, environ), json.loads(answer))


def test_every_flag_of_torchrun_is_known() -> None:
    text = torchrun.get_args_parser().format_help()
    invocations = re.findall(r"^  (-.*?)(?:  |$)", text, flags=re.MULTILINE)
    listed = {name for line in invocations for name in re.findall(r"--([a-z][a-z_-]+)", line)}
    dashed = {name.replace("_", "-") for name in listed} - {"help"}
    assert {"nnodes", "standalone", "virtual-local-rank"} <= dashed
    assert dashed <= {flag.name for flags in FLAGS.values() for flag in flags}

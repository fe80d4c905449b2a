# SPDX-License-Identifier: Apache-2.0
"""Every option of `holdfast run` has an effect or a reason, and every mistake one sentence."""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from holdfast.cli.run_flags import FLAGS
from holdfast.cli.run_options import (
    RunOptions,
    Std,
    check_files,
    check_script,
    count_accelerators,
    parse_address,
    parse_run,
    resolve_nproc,
    std_of,
)
from holdfast.model.errors import UsageError
from holdfast.runtime.observe import Level

ALL_FLAGS = {flag.name: flag for flags in FLAGS.values() for flag in flags}


def parse(*argv: str, env: Mapping[str, str] | None = None) -> RunOptions:
    return parse_run(argv, env or {}, cpus=2, accelerators=0)


def mistake(*argv: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*argv, env=env)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


EFFECTS: dict[str, tuple[list[str], str, object]] = {
    "nnodes": (["--nnodes", "2:4", "--master", "h:1"], "max_nodes", 4),
    "nproc-per-node": (["--nproc-per-node", "3"], "nproc", 3),
    "node-unit": (["--nnodes", "2:4", "--node-unit", "2", "--master", "h:1"], "node_unit", 2),
    "node-rank": (["--master", "h:1", "--node-rank", "1"], "node_rank", 1),
    "local-nodes": (["--local-nodes", "3"], "min_nodes", 3),
    "spare-nodes": (["--local-nodes", "2", "--spare-nodes", "1"], "spare_nodes", 1),
    "master": (["--master", "[::1]:29400"], "master", "[::1]:29400"),
    "token-file": (["--token-file", "t"], "token_file", Path("t")),
    "tls-ca": (["--tls-ca", "ca.pem"], "tls_ca", Path("ca.pem")),
    "insecure": (["--insecure"], "insecure", True),
    "state": (["--state", "s"], "state_dir", Path("s")),
    "lease": (["--lease", "20.5"], "lease_s", 20.5),
    "first-step-within": (["--first-step-within", "off"], "first_step_within", "off"),
    "retry-mistakes": (["--retry-mistakes"], "retry_mistakes", True),
    "hang-after": (["--hang-after", "90"], "hang_after", "90"),
    "standalone": (["--standalone"], "standalone", True),
    "rdzv-id": (["--rdzv-id", "x"], "rdzv_id", "x"),
    "rdzv-endpoint": (["--nnodes", "2", "--rdzv-endpoint", "h:1"], "master", "h:1"),
    "rdzv-conf": (["--rdzv-conf", "join_timeout=5"], "join_timeout_s", 5.0),
    "local-addr": (["--local-addr", "10.0.0.1"], "local_addr", "10.0.0.1"),
    "job": (["--job", "night"], "job", "night"),
    "role": (["--role", "actor"], "role", "actor"),
    "max-restarts": (["--max-restarts", "0"], "max_restarts", 0),
    "grace": (["--grace", "0.5"], "grace_s", 0.5),
    "shutdown-timeout": (["--shutdown-timeout", "4"], "grace_s", 4.0),
    "no-spares": (["--no-spares"], "spares", False),
    "module": (["--module"], "module", True),
    "no-python": (["--no-python"], "no_python", True),
    "run-path": (["--run-path"], "run_path", True),
    "virtual-local-rank": (["--virtual-local-rank"], "virtual_local_rank", True),
    "signals-to-handle": (
        ["--signals-to-handle", "SIGUSR1, SIGTERM"],
        "signals_to_handle",
        (signal.SIGUSR1, signal.SIGTERM),
    ),
    "log-dir": (["--log-dir", "logs"], "log_dir", Path("logs")),
    "log-level": (["--log-level", "debug"], "log_level", Level.DEBUG),
    "redirects": (["--redirects", "12:1,1:2"], "redirects", {12: Std.OUT, 1: Std.ERR}),
    "tee": (["--tee", "3"], "tee", Std.ALL),
    "local-ranks-filter": (["--local-ranks-filter", "0,2"], "local_ranks_filter", {0, 2}),
    "debug-rank": (["--debug-rank", "0"], "debug_rank", 0),
}

WITHOUT_EFFECT: dict[str, tuple[str, str]] = {
    "rdzv-backend": ("etcd", "the master forms the world"),
    "master-addr": ("10.0.0.1", "chosen in every round"),
    "master-port": ("29500", "chosen in every round"),
    "monitor-interval": ("0.5", "nothing polls"),
    "start-method": ("forkserver", "warm spare"),
    "event-log-handler": ("console", "holdfast status"),
    "duplicate-stdout-filters": ("a,b", "--log-dir"),
    "duplicate-stderr-filters": ("a,b", "--log-dir"),
    "numa-binding": ("socket", "not bound"),
}


def test_every_flag_is_in_a_table() -> None:
    assert set(ALL_FLAGS) == {*EFFECTS, *WITHOUT_EFFECT, "logs-specs"}
    assert len(ALL_FLAGS) == sum(len(flags) for flags in FLAGS.values())


def with_underscores(argv: list[str]) -> list[str]:
    return [
        "--" + token.removeprefix("--").replace("-", "_") if token.startswith("--") else token
        for token in argv
    ]


@pytest.mark.parametrize("name", EFFECTS)
def test_flag_has_its_effect(name: str) -> None:
    argv, field, expected = EFFECTS[name]
    assert getattr(parse("train.py"), field) != expected
    options = parse(*argv, "train.py", "--x")
    assert getattr(options, field) == expected
    assert options.ignored == ()
    assert parse(*with_underscores(argv), "train.py", "--x") == options


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_flag_without_effect_says_why(name: str) -> None:
    value, reason = WITHOUT_EFFECT[name]
    plain, options = parse("train.py"), parse(f"--{name}", value, "train.py")
    assert [entry.option for entry in options.ignored] == [f"--{name}"]
    assert reason in options.ignored[0].reason
    for field in fields(RunOptions):
        if field.name != "ignored":
            assert getattr(options, field.name) == getattr(plain, field.name)
    assert parse(f"--{name.replace('-', '_')}", value, "train.py") == options


def test_the_log_level_comes_from_the_environment_too() -> None:
    both = {"DLROVER_LOG_LEVEL": "DEBUG", "HOLDFAST_LOG_LEVEL": "warning"}
    assert parse("train.py", env=both).log_level is Level.WARNING
    assert parse("train.py", env={"DLROVER_LOG_LEVEL": "DEBUG"}).log_level is Level.DEBUG
    assert "HOLDFAST_LOG_LEVEL must be one of debug, info, warning, error, not 'loud'" in mistake(
        "train.py", env={"HOLDFAST_LOG_LEVEL": "loud"}
    )


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("WARN", Level.WARNING),
        ("warning", Level.WARNING),
        ("CRITICAL", Level.ERROR),
        ("FATAL", Level.ERROR),
        ("NOTSET", Level.DEBUG),
        ("0", Level.DEBUG),
        ("15", Level.INFO),
        ("30", Level.WARNING),
        ("50", Level.ERROR),
    ],
)
def test_dlrovers_level_is_one_of_pythons_logging(text: str, level: Level) -> None:
    options = parse("train.py", env={"DLROVER_LOG_LEVEL": text})
    assert options.log_level is level
    assert not options.notes


def test_a_level_of_dlrovers_that_nobody_knows_keeps_no_job_from_starting() -> None:
    options = parse("train.py", env={"DLROVER_LOG_LEVEL": "loud"})
    assert options.log_level is Level.INFO
    (note,) = options.notes
    assert "DLROVER_LOG_LEVEL='loud' is no level" in note


def test_logs_specs_is_refused_by_name() -> None:
    assert "--logs-specs mine is not supported" in mistake("--logs-specs", "mine", "train.py")


@pytest.mark.parametrize("name", [name for name in EFFECTS if ALL_FLAGS[name].env])
def test_environment_answers_when_the_command_line_does_not(name: str) -> None:
    argv, field, expected = EFFECTS[name]
    at = argv.index(f"--{name}")
    is_switch = ALL_FLAGS[name].is_switch
    env = {ALL_FLAGS[name].env: "1" if is_switch else argv[at + 1]}
    rest = argv[:at] + argv[at + (1 if is_switch else 2) :]
    assert getattr(parse(*rest, "train.py", env=env), field) == expected


def test_command_line_wins_over_environment() -> None:
    env = {"PET_NPROC_PER_NODE": "8", "HOLDFAST_MASTER": "a:1", "PET_NNODES": "many"}
    options = parse("--nproc-per-node", "2", "--master", "b:2", "--nnodes", "2", "t.py", env=env)
    assert (options.nproc, options.master, options.max_nodes) == (2, "b:2", 2)


def test_defaults() -> None:
    options = parse("train.py")
    assert (options.min_nodes, options.max_nodes, options.local_nodes, options.nproc) == (
        1,
        1,
        1,
        1,
    )
    assert (options.max_restarts, options.grace_s, options.lease_s) == (3, 10.0, 60.0)
    assert (options.join_timeout_s, options.last_call_s) == (600.0, 30.0)
    assert options.spares
    assert options.master is None
    assert options.node_rank is None
    assert options.local_ranks_filter is None
    assert (options.ignored, options.notes) == ((), ())


MISTAKES: list[tuple[str, str]] = [
    ("", "the script to run is missing"),
    ("--standalone", "the script to run is missing"),
    ("--nnodes", "--nnodes needs a value"),
    ("--standalone=1 train.py", "takes no value"),
    ("--nproc 2 train.py", "did you mean --nproc-per-node?"),
    ("--max-restart 2 train.py", "did you mean --max-restarts?"),
    ("--lr=0.1 train.py", "options of the script go after its name"),
    ("--nnodes a train.py", "--nnodes must be N or MIN:MAX, not 'a'"),
    ("--nnodes 1:2:3 train.py", "--nnodes must be N or MIN:MAX"),
    ("--nnodes 1: train.py", "--nnodes must be N or MIN:MAX"),
    ("--nnodes 4:2 train.py", "the most is below the fewest"),
    ("--nnodes 0 train.py", "at least 1 node"),
    ("--nnodes -1 train.py", "at least 1 node"),
    ("--nproc-per-node 0 train.py", "--nproc-per-node must be a whole number of at least 1"),
    ("--nproc-per-node -1 train.py", "not '-1'"),
    ("--nproc-per-node many train.py", "not 'many'"),
    ("--nproc-per-node 1.5 train.py", "not '1.5'"),
    ("--nproc-per-node= train.py", "not ''"),
    ("--nproc-per-node gpu train.py", "has no GPU"),
    ("--max-restarts -1 train.py", "--max-restarts must be a whole number of at least 0"),
    ("--max-restarts x train.py", "--max-restarts must be a whole number"),
    ("--node-rank -1 --master h:1 train.py", "--node-rank must be a whole number of at least 0"),
    ("--node-unit 0 train.py", "--node-unit must be a whole number of at least 1"),
    ("--nnodes 3:3 --node-unit 2 --master h:1 train.py", "no multiple of --node-unit 2"),
    ("--local-nodes 0 train.py", "--local-nodes must be a whole number of at least 1"),
    ("--spare-nodes 1 train.py", "--spare-nodes needs --local-nodes"),
    ("--local-nodes 2 --spare-nodes -1 train.py", "--spare-nodes must be"),
    ("--local-nodes 2 --nnodes 1:4 --spare-nodes 1 train.py", "4 nodes cannot run on 2 local"),
    ("--local-nodes 2 --master h:1 train.py", "--local-nodes starts its own master"),
    ("--local-nodes 2 --debug-rank 0 train.py", "--local-nodes have no terminal"),
    ("--nproc-per-node 2 --debug-rank 2 train.py", "2 ranks, from 0 to 1"),
    ("--debug-rank first train.py", "--debug-rank must be a whole number of at least 0"),
    ("--standalone --master h:1 train.py", "--standalone starts its own master"),
    ("--nnodes 2 train.py", "--master HOST:PORT on every node"),
    ("--nnodes 1:2 train.py", "--local-nodes 2"),
    ("--nnodes 2 --standalone --rdzv-endpoint h:1 train.py", "need a master"),
    ("--nnodes 2 --node-rank 1 --master-addr h --master-port 1 t.py", "need a master"),
    ("--master h:1 --state d train.py", "--state belongs to the embedded master"),
    ("--master h train.py", "--master must be HOST:PORT, not 'h'"),
    ("--nnodes 2 --rdzv-endpoint h train.py", "--rdzv-endpoint must be HOST:PORT"),
    ("-m --no-python pkg", "--module and --no-python cannot go together"),
    ("-m --run-path pkg", "--module and --run-path cannot go together"),
    ("--rdzv-conf nonsense train.py", "--rdzv-conf must be KEY=VALUE pairs"),
    ("--rdzv-conf =3 train.py", "--rdzv-conf must be KEY=VALUE pairs"),
    ("--rdzv-conf join_timeout=3, train.py", "--rdzv-conf must be KEY=VALUE pairs"),
    ("--rdzv-conf jointimeout=3 train.py", "no key 'jointimeout': the keys are join_timeout"),
    ("--rdzv-conf join_timeout=soon train.py", "--rdzv-conf join_timeout must be more than 0"),
    ("--rdzv-conf timeout=0 train.py", "--rdzv-conf timeout must be more than 0 seconds"),
    ("--rdzv-conf last_call_timeout=-1 train.py", "last_call_timeout must be 0 or more"),
    ("--redirects 4 train.py", "--redirects must be 0, 1, 2 or 3"),
    ("--tee 0:1,1 train.py", "--tee must be 0, 1, 2 or 3"),
    ("--local-ranks-filter a train.py", "--local-ranks-filter must be local ranks"),
    ("--signals-to-handle SIGTERM,SIGNOPE train.py", "'SIGNOPE' is not a signal"),
    ("--signals-to-handle SIGKILL train.py", "'SIGKILL' is not a signal"),
    ("--grace -1 train.py", "--grace must be 0 or more seconds"),
    ("--grace inf train.py", "--grace must be 0 or more seconds"),
    ("--shutdown-timeout 1.5 train.py", "--shutdown-timeout must be a whole number"),
    ("--lease 0 train.py", "--lease must be more than 0 seconds"),
    ("--first-step-within 0 train.py", "--first-step-within must be off or seconds above 0"),
    ("--hang-after 0 train.py", "--hang-after must be auto, off or seconds above 0, not '0'"),
    ("--hang-after soon train.py", "--hang-after must be auto, off or seconds above 0"),
    ("--job a/b train.py", "--job must be"),
    ("--rdzv-backend zeus train.py", "--rdzv-backend must be one of c10d"),
    ("--start-method thread train.py", "--start-method must be one of spawn"),
    ("--numa-binding moon train.py", "--numa-binding must be one of node"),
    ("--monitor-interval x train.py", "--monitor-interval must be 0 or more seconds"),
    ("--master-port x train.py", "--master-port must be a whole number"),
]


@pytest.mark.parametrize(("command", "part"), MISTAKES)
def test_mistake_is_one_sentence(command: str, part: str) -> None:
    assert part in mistake(*command.split())


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"PET_NNODES": "4:2"}, "PET_NNODES 4:2"),
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE must be 0 or 1, not 'yes'"),
        ({"HOLDFAST_MASTER": "nowhere"}, "HOLDFAST_MASTER must be HOST:PORT"),
        ({"PET_MAX_RESTARTS": "x"}, "PET_MAX_RESTARTS must be a whole number"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT must be"),
    ],
)
def test_mistake_in_the_environment_names_the_variable(env: dict[str, str], part: str) -> None:
    assert part in mistake("train.py", env=env)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-1.lan:29400", "node-1.lan", 29400),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:9", "::1", 9),
    ],
)
def test_address_is_split(text: str, host: str, port: int) -> None:
    assert parse_address(text, "--master") == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", "h", "h:", ":1", "h:0", "h:65536", "h:x", "h:-1", "a b:1", "http://h:1"),
        *("[::1]", "[::1", "[h]:1", "[]:1", "[::1]:0"),
    ],
)
def test_bad_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--master must be HOST:PORT"):
        parse_address(text, "--master")


def test_ipv6_without_brackets_is_told_about_them() -> None:
    with pytest.raises(UsageError, match="in brackets"):
        parse_address("fe80::1:29400", "--master")


def test_local_nodes_set_the_size_unless_nnodes_does() -> None:
    fixed = parse("--local-nodes", "3", "train.py")
    assert (fixed.min_nodes, fixed.max_nodes, fixed.local_nodes) == (3, 3, 3)
    elastic = parse("--local-nodes", "3", "--spare-nodes", "1", "--nnodes", "1:4", "train.py")
    assert (elastic.min_nodes, elastic.max_nodes, elastic.local_nodes) == (1, 4, 3)


def test_rdzv_endpoint_becomes_the_master_only_where_one_is_needed() -> None:
    several = parse("--nnodes", "2", "--rdzv-endpoint", "h:29400", "train.py")
    assert several.master == "h:29400"
    assert several.notes == ("--rdzv-endpoint h:29400 is taken as the address of --master",)
    both = parse("--nnodes", "2", "--master", "a:1", "--rdzv-endpoint", "h:2", "train.py")
    assert (both.master, both.ignored[0].option) == ("a:1", "--rdzv-endpoint")
    for local in ([], ["--standalone"], ["--local-nodes", "2"]):
        alone = parse(*local, "--rdzv-endpoint", "localhost:0", "train.py")
        assert alone.master is None
        assert [entry.option for entry in alone.ignored] == ["--rdzv-endpoint"]


@pytest.mark.parametrize("own", [["--standalone"], ["--local-nodes", "2"]])
def test_a_master_in_the_environment_gives_way(own: list[str]) -> None:
    options = parse(*own, "train.py", env={"HOLDFAST_MASTER": "h:1"})
    assert options.master is None
    assert [entry.option for entry in options.ignored] == ["HOLDFAST_MASTER"]


def test_embedded_master_numbers_its_nodes() -> None:
    options = parse("train.py", env={"PET_NODE_RANK": "3"})
    assert options.node_rank is None
    assert [entry.option for entry in options.ignored] == ["PET_NODE_RANK"]


def test_rdzv_conf_keys() -> None:
    conf = "timeout=9,lastcall_timeout=0, close_timeout=1,read_timeout=2,keep_alive_interval=3"
    options = parse("--rdzv-conf", conf + ",keep_alive_max_attempt=4", "train.py")
    assert (options.join_timeout_s, options.last_call_s) == (9.0, 0.0)
    assert options.rdzv_conf["close_timeout"] == "1"
    assert [entry.option for entry in options.ignored] == [
        "--rdzv-conf close_timeout",
        "--rdzv-conf read_timeout",
        "--rdzv-conf keep_alive_interval",
        "--rdzv-conf keep_alive_max_attempt",
    ]
    assert parse("--rdzv-conf", "timeout=9,join_timeout=8", "t.py").join_timeout_s == 8.0


def test_grace_has_two_names() -> None:
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "40"}
    assert parse("train.py", env=env).grace_s == 40.0
    assert parse("--shutdown-timeout", "5", "train.py", env=env).grace_s == 5.0
    both = parse("--shutdown-timeout", "5", "--grace", "2", "train.py")
    assert (both.grace_s, both.ignored[0].option) == (2.0, "--shutdown-timeout")


def test_nproc_words() -> None:
    assert resolve_nproc("auto", cpus=8, accelerators=4) == 4
    assert resolve_nproc("auto", cpus=8, accelerators=0) == 8
    assert resolve_nproc("cpu", cpus=8, accelerators=4) == 8
    assert resolve_nproc("gpu", cpus=8, accelerators=4) == 4
    assert resolve_nproc("16", cpus=8, accelerators=4) == 16


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("0,2", 2),
        ("0,7,1", 1),
        ("-1", 0),
        (" 1 , 2", 2),
        ("GPU-1234,MIG-5678", 2),
        ("NoDevFiles", 0),
    ],
)
def test_gpus_are_counted_by_their_device_files(
    visible: str | None, count: int, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_accelerators(visible, tmp_path) == count


def test_no_gpu_is_visible_where_none_is(tmp_path: Path) -> None:
    assert count_accelerators("0,1", tmp_path) == 0


def test_streams_of_one_rank() -> None:
    assert std_of(Std.ERR, 5) is Std.ERR
    assert std_of({1: Std.ALL}, 1) is Std.ALL
    assert std_of({1: Std.ALL}, 0) is Std.NONE


@pytest.mark.parametrize(
    ("argv", "suffix", "name"),
    [
        (["src/Train_GPT.py"], "4f", "train-gpt-4f"),
        (["-m", "pkg.train"], "4f", "pkg-train-4f"),
        (["train.py"], "", "train"),
        (["..."], "x", "job-x"),
        (["--job", "night.1", "train.py"], "4f", "night.1"),
        (["--master", "h:1", "train.py"], "4f", None),
        (["--master", "h:1", "--job", "a", "train.py"], "4f", "a"),
    ],
)
def test_name_of_the_job(argv: list[str], suffix: str, name: str | None) -> None:
    assert parse_run(argv, {}, cpus=1, accelerators=0, job_suffix=suffix).job == name


def test_script_must_be_there(tmp_path: Path) -> None:
    script, package = tmp_path / "train.py", tmp_path / "package"
    script.write_text("")
    package.mkdir()
    for runnable in ([str(script)], ["-m", "any.module"], ["--no-python", "true"]):
        check_script(parse(*runnable))
    for argv, sentence in (
        (["/nowhere/train.py"], "/nowhere/train.py does not exist"),
        (["--run-path", "--no-python", "/nowhere/train.py"], "/nowhere/train.py does not exist"),
        (["--no-python", "/nowhere/train"], "/nowhere/train does not exist"),
        (["--no-python", str(script)], f"{script} is not executable"),
        ([str(package)], f"{package} is a directory without a __main__.py"),
    ):
        with pytest.raises(UsageError) as caught:
            check_script(parse(*argv))
        assert str(caught.value) == sentence
    (package / "__main__.py").touch()
    check_script(parse(str(package)))


@pytest.mark.parametrize("flag", ["--token-file", "--tls-ca"])
def test_named_files_must_be_there(flag: str, tmp_path: Path) -> None:
    there = tmp_path / "file"
    there.touch()
    check_files(parse(flag, str(there), "train.py"))
    with pytest.raises(UsageError, match=f"{flag} .*missing is not a file"):
        check_files(parse(flag, str(tmp_path / "missing"), "train.py"))


def test_help_lists_every_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--nnodes", "2", "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  (?:-\w(?: STD)?, )?--([a-z-]+)", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted([*ALL_FLAGS, "help"])
    assert "torchrun's default is 0" in " ".join(text.split())
    for flag in ALL_FLAGS.values():
        assert "default:" in flag.help or flag.name == "logs-specs"


def test_help_after_the_script_is_the_scripts() -> None:
    assert parse("train.py", "--help").script_args == ("--help",)


def test_reading_options_does_not_import_torch() -> None:
    code = "import sys, holdfast.cli.run_options; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )

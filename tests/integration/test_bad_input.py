# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users and of their machines: one sentence, the right exit code, nothing lost."""

import datetime
import hashlib
import ipaddress
import os
import secrets
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast.ports.journal import Entry
from holdfast.protocol import messages as m
from holdfast.runtime.journal import SqliteJournal
from holdfast.runtime.token import make_token
from tests.disks import small_disk
from tests.integration.control import JOB, client_of
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs

USAGE = 2
FAILED = 1
IDLES = str(SCRIPTS / "idles.py")


def complaint(command: Command, code: int) -> str:
    """The one line that a refused command wrote."""
    assert (command.wait(), command.out) == (code, []), command.text
    (line,) = command.err
    assert line.startswith("holdfast: ")
    return line.removeprefix("holdfast: ")


@pytest.fixture
def files(jobs: Jobs) -> Path:
    """A folder with a script, and with everything that can be wrong about a token."""
    jobs.write("train.py", "print('trains')\n")
    (jobs.folder / "package").mkdir()
    make_token(jobs.folder / "token")
    make_token(jobs.folder / "open")
    (jobs.folder / "open").chmod(0o644)
    jobs.write("short", "abc\n")
    (jobs.folder / "short").chmod(0o600)
    return jobs.folder


REMOTE = ("run", "--master", "127.0.0.1:9", "--token-file")
AWAY = ("run", "--nnodes", "2", "--master", "10.1.2.3:7070", "--token-file")
SERVE = ("master", "--job", "j", "--state", "state")

MISTAKES: dict[tuple[str, ...], str] = {
    ("trian",): "'trian' is not a command of holdfast: choose from run, ",
    ("run",): "the script to run is missing",
    ("run", "trian.py"): "trian.py does not exist",
    ("run", "package"): "package is a directory without a __main__.py",
    ("run", "--no-python", "train.py"): "train.py is not executable",
    ("run", "--nproc", "2", "train.py"): "--nproc is not an option of holdfast run",
    ("run", "--nproc-per-node", "0", "train.py"): "--nproc-per-node must be a whole number",
    ("run", "--nnodes", "2", "train.py"): "2 nodes need a master that all of them reach",
    ("run", "--master", "127.0.0.1", "train.py"): "--master must be HOST:PORT, not '127.0.0.1'",
    ("run", "--master", "127.0.0.1:9", "train.py"): "the job's token is missing",
    (*REMOTE, "nowhere", "train.py"): "--token-file nowhere is not a file",
    (*REMOTE, "open", "train.py"): "the token file open is open to other users: run chmod 600",
    (*REMOTE, "short", "train.py"): "the token in short is shorter than 16 characters",
    (*AWAY, "token", "train.py"): "10.1.2.3:7070 is not a loopback address: give certificates",
    (*REMOTE, "token", "--tls-ca", "nowhere", "train.py"): "--tls-ca nowhere is not a file",
    (*REMOTE, "token", "--tls-ca", "train.py", "train.py"): "authority train.py cannot be used",
    ("master",): "the following arguments are required: --job, --state",
    ("master", "--job", "../j", "--state", "state"): "--job must be at most 63 letters",
    (*SERVE, "--listen", "nonsense"): "--listen must be HOST:PORT, not 'nonsense'",
    (*SERVE, "--listen", "127.0.0.1:99999"): "--listen must be HOST:PORT",
    (*SERVE, "--listen", "0.0.0.0:0"): "0.0.0.0:0 is not a loopback address: give certificates",
    (*SERVE, "--http", "nonsense"): "must be HOST:PORT, not 'nonsense'",
    (*SERVE, "--beat", "-1"): "--beat must be a number of seconds above 0, not -1",
    (*SERVE, "--lease", "nan"): "--lease must be a number of seconds above 0, not nan",
    (*SERVE, "--beat", "soon"): "argument --beat: invalid float value: 'soon'",
    (*SERVE, "--silence", "2"): "must be longer than",
    (*SERVE, "--hang-after", "-1"): "--hang-after must be auto, off or seconds above 0, not '-1'",
    (*SERVE, "--token-file", "open"): "the token file open is open to other users",
    (*SERVE, "--token-file", "short"): "the token in short is shorter than 16 characters",
    (*SERVE, "--tls-cert", "nowhere"): "the certificate nowhere cannot be used",
    (*SERVE, "--tls-cert", "train.py"): "the certificate train.py cannot be used",
    (*SERVE, "--tls-key", "train.py"): "--tls-key needs the certificate",
    ("status",): "no job runs here",
    ("status", "--job", "j"): "no job 'j' runs here",
}


@pytest.mark.parametrize("part", range(3))
@pytest.mark.usefixtures("files")
def test_mistakes_on_the_command_line(jobs: Jobs, part: int) -> None:
    """All at once, which is faster: none of them does anything."""
    cases = list(MISTAKES.items())[part::3]
    # Commands of one state directory would refuse each other.
    started = [
        (jobs.start(*(f"state{n}" if word == "state" else word for word in words)), sentence)
        for n, (words, sentence) in enumerate(cases)
    ]
    for command, sentence in started:
        assert sentence in complaint(command, USAGE)


def test_a_master_that_cannot_be_reached(jobs: Jobs, files: Path) -> None:
    words = ("--token-file", "token", "--rdzv-conf", "join_timeout=1", "train.py")
    nobody = f"{secrets.token_hex(8)}.invalid:29400"
    unknown = jobs.run("--insecure", "--master", nobody, *words)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # Nobody else gets this port, and nobody listens on it.
        port = bound.getsockname()[1]
        refusing = jobs.run("--master", f"127.0.0.1:{port}", *words)
        said = complaint(refusing, FAILED)
    assert said.startswith(f"the master does not answer: 127.0.0.1:{port}: Connection refused")
    assert complaint(unknown, FAILED).endswith("(tried for 1 s)")
    assert not list(files.glob("tmp/holdfast-*"))


def test_something_else_where_the_master_should_be(jobs: Jobs, files: Path) -> None:
    words = ("--token-file", str(files / "token"), "train.py")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        node = jobs.run("--master", address, *words)
        peer, _ = server.accept()
        with peer:
            peer.sendall(b"220 mail.example.org ESMTP\r\n")
            said = complaint(node, USAGE)
    assert said.startswith(f"no master of this job at {address}: a frame of ")


def test_nodes_that_do_not_belong_to_the_job(jobs: Jobs, files: Path) -> None:
    master = jobs.master("--http", "off")
    first = jobs.node(master, "--no-spares", IDLES)
    jobs.wait_for("main")
    stranger = jobs.run("--master", master.address, "--token-file", "token", "train.py")
    other_rules = jobs.node(master, "--nnodes", "1:3", "train.py")
    assert "wrong token: this is not the token of the job" in complaint(stranger, USAGE)
    assert "other rules than its job: max_nodes is 1, not 3" in complaint(other_rules, USAGE)
    jobs.finish()
    first.succeeds()
    master.succeeds()
    assert len(jobs.events("main")) == 1


def test_a_port_or_a_state_directory_in_use(jobs: Jobs) -> None:
    master = jobs.master("--http", "off")
    state = str(jobs.folder / "state")
    same_state = jobs.start("master", "--job", JOB, "--state", state)
    words = ("--job", JOB, "--state", str(jobs.folder / "other"))
    same_port = jobs.start("master", *words, "--listen", master.address)
    said = complaint(same_state, FAILED)
    assert f"{state} is in use by another master (pid {master.pid})" in said
    said = complaint(same_port, FAILED)
    assert said == f"cannot listen on {master.address}: Address already in use"
    assert client_of(master).ask(m.KvAdd(0, "n", 1), m.Number, LIMIT_S).number == 1


def test_state_directories_that_cannot_be(jobs: Jobs, files: Path) -> None:
    serve = ("master", "--job", JOB, "--state")
    above = jobs.start(*serve, str(files / "no" / "state"))
    no_folder = jobs.start(*serve, str(files / "train.py"))
    no_note = jobs.start(*serve, str(files / "state"), XDG_RUNTIME_DIR="/proc")
    assert "a folder above it does not exist" in complaint(above, FAILED)
    assert "it is not a folder" in complaint(no_folder, FAILED)
    assert "set XDG_RUNTIME_DIR to a folder" in complaint(no_note, FAILED)


def test_journals_that_cannot_be_read(jobs: Jobs) -> None:
    """Each is refused with its reason and left as it was."""
    reasons = {
        "garbage": "is damaged",
        "newer": "was written by a newer Holdfast (format 99)",
        "record": "record 0 of the journal cannot be understood",
        "foreign": "belongs to the job 'mine', not 'test'",
    }
    folders = {name: jobs.folder / name for name in reasons}
    for name, folder in folders.items():
        with closing(SqliteJournal.open(folder, job="mine" if name == "foreign" else JOB)) as new:
            if name == "record":
                new.append([Entry(0.0, 0.0, b"\x92\xa6Flying\x01")])
    (folders["garbage"] / "journal.db").write_bytes(secrets.token_bytes(20_000))
    with closing(sqlite3.connect(folders["newer"] / "journal.db")) as db, db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    before = {name: digest(folder) for name, folder in folders.items()}
    started = {
        name: jobs.start("master", "--job", JOB, "--state", str(folder))
        for name, folder in folders.items()
    }
    for name, command in started.items():
        assert reasons[name] in complaint(command, FAILED)
    assert {name: digest(folder) for name, folder in folders.items()} == before


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "journal.db").read_bytes()).hexdigest()


def test_a_script_with_a_syntax_error(jobs: Jobs) -> None:
    jobs.write("broken.py", "def train(:\n    pass\n")
    run = jobs.run("--max-restarts", "0", "--no-spares", "broken.py")
    assert run.wait() == FAILED
    last = "\n".join(run.err[-8:])
    assert "def train(:" in last
    assert "SyntaxError: invalid syntax" in last
    assert "bootstrap.py" not in run.text


# ---- TLS ------------------------------------------------------------------------------------


def self_signed(folder: Path, name: str, days: float = 1.0) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority and ends then, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([here]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    certificate_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    certificate_file.write_bytes(certificate.public_bytes(pem))
    plain = serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return certificate_file, key_file


def test_tls(jobs: Jobs, files: Path) -> None:
    """With certificates an open address is fine, and only who trusts the certificate gets in."""
    certificate, key = self_signed(files, "ours")
    other, _ = self_signed(files, "other")
    secure = ("--tls-cert", str(certificate), "--tls-key", str(key), "--http", "off")
    master = jobs.master(*secure, listen="0.0.0.0:0")
    master.address = master.address.replace("0.0.0.0", "127.0.0.1")
    distrusts = jobs.node(master, "--no-spares", "--tls-ca", str(other), "train.py")
    readable = jobs.node(master, "--no-spares", "--rdzv-conf", "join_timeout=2", "train.py")
    assert "its certificate is not trusted here" in complaint(distrusts, USAGE)
    assert "no answer in time on an open connection; does it want TLS?" in complaint(
        readable, FAILED
    )
    jobs.node(master, "--no-spares", "--tls-ca", str(certificate), "train.py").succeeds()
    master.succeeds()


def test_a_plain_master_is_not_taken_for_a_secure_one(jobs: Jobs, files: Path) -> None:
    certificate, _ = self_signed(files, "ours")
    master = jobs.master("--http", "off")
    node = jobs.node(master, "--tls-ca", str(certificate), "train.py")
    assert "it does not speak TLS" in complaint(node, USAGE)


# ---- disks ----------------------------------------------------------------------------------


@pytest.fixture
def disk(jobs: Jobs) -> Iterator[Path]:
    """A file system of 1 MB."""
    with small_disk(jobs.folder / "disk", "size=1m") as folder:
        yield folder
        for command in jobs.commands:
            command.kill()


def fill(disk: Path, *, keep: int) -> Path:
    """Use the disk up but for so many bytes; deleting the file frees it again."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    ballast.write_bytes(b"\0" * max(0, free.f_bavail * free.f_bsize - keep))
    return ballast


def test_a_full_or_read_only_disk_at_the_start(jobs: Jobs, disk: Path) -> None:
    state = disk / "state"
    state.mkdir(mode=0o700)
    ballast = fill(disk, keep=0)
    serve = ("master", "--job", JOB, "--state", str(state))
    assert "is full; free some space" in complaint(jobs.start(*serve), FAILED)
    ballast.unlink()
    remount = ["mount", "-o", "remount,{}", str(disk)]
    subprocess.run([word.format("ro") for word in remount], check=True, timeout=120)
    assert "its file system is read-only" in complaint(jobs.start(*serve), FAILED)
    subprocess.run([word.format("rw") for word in remount], check=True, timeout=120)
    jobs.master("--http", "off", state=state)


def test_a_disk_that_fills_up_while_a_job_runs(jobs: Jobs, disk: Path) -> None:
    """The master says so and waits; with some space it goes on, and so do all others."""
    state = disk / "state"
    master = jobs.master("--http", "off", state=state)
    node = jobs.node(master, "--no-spares", IDLES)
    jobs.wait_for("main")
    ballast = fill(disk, keep=150_000)
    values = [secrets.token_bytes(20_000) for _ in range(15)]
    with ThreadPoolExecutor(1) as thread:
        acknowledged: list[int] = []

        def set_all() -> None:
            client = client_of(master)
            for number, value in enumerate(values):
                client.ask(m.KvSet(0, str(number), value), m.Done, LIMIT_S)
                acknowledged.append(number)

        setting = thread.submit(set_all)
        master.wait_line("the disk with .* is full")
        assert len(acknowledged) < len(values)
        ballast.unlink()
        # The one that was under way is acknowledged now, and the others follow.
        setting.result(LIMIT_S)
    # What was acknowledged is durable: another master finds it.
    master.kill()
    again = jobs.master("--http", "off", state=state, listen=master.address)
    keys = tuple(map(str, range(len(values))))
    found = client_of(again).ask(m.KvGet(0, keys, LIMIT_S), m.Values, LIMIT_S)
    assert found.values == tuple(values)
    jobs.finish()
    node.succeeds()
    again.succeeds()
    assert len(jobs.events("main")) == 1


def test_weakness_a_temporary_directory_too_long_for_a_socket(jobs: Jobs, files: Path) -> None:
    """There: the limit on the path of a Unix socket was not checked."""
    deep = files / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    node = jobs.run(*REMOTE[1:], "token", "train.py", TMPDIR=str(deep))
    assert complaint(node, USAGE).startswith("the temporary directory has too long a path")

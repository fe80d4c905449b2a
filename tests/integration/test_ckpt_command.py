# SPDX-License-Identifier: Apache-2.0
"""`holdfast ckpt` as its user sees it: tables, JSON, exit codes, and what it refuses."""

import io
import json
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.checkpoint.storage import open_storage
from holdfast.cli import main
from holdfast.model.checkpoint import SHARED, Series, Version
from tests.storages import load, make_state, s3_server, save

START_S = 60
STATE = make_state(1)


@pytest.fixture
def series(tmp_path: Path) -> Series:
    """Two checkpoints."""
    series = Series(str(tmp_path / "ckpt"))
    fill(series, tmp_path)
    return series


def fill(series: Series, scratch: Path) -> None:
    storage = open_storage(series.directory)
    for step in (100, 200):
        save(storage, series, Version(1, step), STATE, f"a{step}", scratch)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def ckpt(*words: str) -> Done:
    """The command without a process of its own: there are dozens, and each would take a second."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["ckpt", *words])
    return Done(code, out.getvalue(), err.getvalue())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_show_cuts_no_path_on_60_columns(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = ckpt("show", series.directory).stdout
    assert f"{series.directory}/step-0000000200" in "".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 60


def test_ls_lists_the_newest_first(series: Series) -> None:
    shown = ckpt("ls", series.directory)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["step", "ranks", "size", "created", "name", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["200", "100"]
    assert max(map(len, lines)) <= 80
    found = [
        json.loads(line) for line in ckpt("ls", series.directory, "--json").stdout.splitlines()
    ]
    assert [one["step"] for one in found] == [200, 100]
    assert found[0]["name"] == "step-0000000200"
    assert found[0]["size"] == sum(len(c) for files in STATE.values() for c in files.values())
    assert found[0]["problems"] == []


def test_ls_says_what_is_damaged(series: Series) -> None:
    Path(series.directory, "step-0000000100", "shared.json").unlink()
    shown = ckpt("ls", series.directory)
    assert shown.returncode == 1
    assert "damaged" in shown.stdout


def test_show_tells_what_is_in_a_checkpoint(series: Series) -> None:
    shown = ckpt("show", series.directory, "100")
    assert shown.returncode == 0
    for name in ("shared.safetensors", "rng/rank-00001.bin", "100 of lineage 1"):
        assert name in shown.stdout
    manifest = json.loads(ckpt("show", series.directory, "--json").stdout)
    assert manifest["step"] == 200
    assert {file["part"] for file in manifest["files"]} == {SHARED, "rank-00000", "rank-00001"}


def test_verify_finds_what_is_wrong(series: Series) -> None:
    good = ckpt("verify", series.directory)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.count("all well") == 2
    flip(Path(series.directory, "step-0000000100", "shared.safetensors"))
    bad = ckpt("verify", series.directory)
    assert bad.returncode == 1
    assert "step 100: " in bad.stdout
    assert "shared.safetensors is damaged" in bad.stdout
    assert ckpt("verify", series.directory, "200").returncode == 0
    lines = ckpt("verify", series.directory, "--json").stdout.splitlines()
    assert [len(json.loads(line)["problems"]) for line in lines] == [0, 1]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("step-0000000100/manifest.json", "manifest.json"),
        ("step-0000000200/rank-00000.json", "damaged"),
        ("latest", "latest does not name the newest"),
    ],
)
def test_verify_finds_a_flipped_byte_anywhere(series: Series, name: str, word: str) -> None:
    flip(Path(series.directory, name))
    shown = ckpt("verify", series.directory)
    assert shown.returncode == 1
    assert word in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    "name", ["step-0000000100/manifest.json", "step-0000000200/shared.json", "latest"]
)
def test_verify_finds_every_missing_file(series: Series, name: str) -> None:
    Path(series.directory, name).unlink()
    assert ckpt("verify", series.directory).returncode == 1


def test_export_copies_and_verifies(series: Series, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert ckpt("export", series.directory, "100", "--to", str(target)).returncode == 0
    content = STATE[SHARED]["shared.safetensors"]
    assert (target / "shared.safetensors").read_bytes() == content
    assert (target / "rng" / "rank-00000.bin").exists()
    again = ckpt("export", series.directory, "100", "--to", str(target))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    flip(Path(series.directory, "step-0000000200", "shared.safetensors"))
    bad = ckpt("export", series.directory, "--to", str(tmp_path / "bad"))
    assert (bad.returncode, "is damaged" in bad.stderr) == (1, True)
    assert not (tmp_path / "bad").exists()


def test_a_copy_is_a_checkpoint_again(series: Series, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "step-0000000100"
    assert ckpt("export", series.directory, "100", "--to", str(target)).returncode == 0
    moved = Series(str(target.parent))
    assert load(open_storage(moved.directory), moved, Version(1, 100), tmp_path) == STATE


def test_rm_asks_and_spares_the_newest(series: Series) -> None:
    refused = ckpt("rm", series.directory, "200", "--yes")
    assert (refused.returncode, "is the newest" in refused.stderr) == (2, True)
    unasked = ckpt("rm", series.directory, "100")
    assert (unasked.returncode, "--yes" in unasked.stderr) == (2, True)
    assert len(list(Path(series.directory).glob("step-*"))) == 2
    assert ckpt("rm", series.directory, "100", "--yes").returncode == 0
    assert ckpt("rm", series.directory, "100", "--yes").returncode == 1
    assert [path.name for path in Path(series.directory).glob("step-*")] == ["step-0000000200"]
    assert ckpt("rm", series.directory, "200", "--yes", "--force").returncode == 0
    assert not Path(series.directory, "latest").exists()


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", 2), (b"y\n", 1)])
def test_rm_obeys_the_answer(series: Series, answer: bytes, left: int) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "ckpt", "rm", series.directory, "100"],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
    ) as process:
        os.write(ours, answer)
        process.wait(START_S)
    os.close(ours)
    os.close(theirs)
    assert len(list(Path(series.directory).glob("step-*"))) == left


def test_a_progress_bar_is_shown_on_a_terminal_only(series: Series) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "holdfast.cli", "ckpt", "verify", series.directory]
    environ = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environ) as process:
        assert process.wait(START_S) == 0
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    assert b"verifying" in shown
    assert b"\x1b[" in shown


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("ls", "/no/such/directory"), 2, "is not a directory"),
        (("show", "{dir}", "7"), 1, "no checkpoint of step 7"),
        (("show", "{dir}", "seven"), 2, "a step is a number"),
        (("verify", "nosuchscheme://x"), 2, "nosuchscheme"),
        (("frobnicate", "{dir}"), 2, "is not a command of holdfast ckpt"),
    ],
)
def test_mistakes_get_one_sentence(
    series: Series, words: tuple[str, ...], code: int, said: str
) -> None:
    done = ckpt(*(word.format(dir=series.directory) for word in words))
    assert done.returncode == code
    assert done.stderr.startswith("holdfast: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_empty_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert ckpt("ls", str(tmp_path)).returncode == 0
    assert ckpt("verify", str(tmp_path)).returncode == 1


def test_urls_work_too(tmp_path: Path) -> None:
    with s3_server() as url:
        series = Series(f"{url}/run")
        fill(series, tmp_path)
        assert ckpt("verify", series.directory).returncode == 0
        target = tmp_path / "out"
        assert ckpt("export", series.directory, "200", "--to", str(target)).returncode == 0
        assert (target / "shared.json").read_bytes() == STATE[SHARED]["shared.json"]
        assert ckpt("rm", series.directory, "100", "--yes").returncode == 0
        shown = ckpt("ls", series.directory, "--json").stdout.splitlines()
        assert [json.loads(line)["step"] for line in shown] == [200]

# SPDX-License-Identifier: Apache-2.0
"""An agent's cgroup where none can be made, or it does not do what it should.

The folders are plain ones. What a kernel does with a real one is tried in
`tests/integration/test_processes.py`, where one can be made.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent import cgroups, guardian

LIMIT_S = 120.0
MEMBERS = "cgroup.procs"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """That of a process in a group "unit", with version 1 mounted beside version 2."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("2:memory:/other\n0::/unit\n")
    (tmp_path / "proc/self/mounts").write_text(
        f"cgroup {tmp_path}/memory cgroup rw,memory 0 0\ncgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"
    )
    (tmp_path / "v2/unit").mkdir(parents=True)
    (tmp_path / "v2/unit" / MEMBERS).write_text(f"1\n{os.getpid()}\n")
    return tmp_path / "proc"


def test_a_group_that_cannot_be_ended_as_a_whole_is_not_kept(proc: Path) -> None:
    """As before Linux 5.14, and as in a plain folder."""
    unit = proc.parent / "v2/unit"
    assert cgroups.make("ours", proc) == ""
    assert [each.name for each in unit.iterdir()] == [MEMBERS]


def test_a_group_with_that_name_is_left_alone(proc: Path) -> None:
    theirs = proc.parent / "v2/unit/ours"
    theirs.mkdir()
    (theirs / "cgroup.kill").touch()
    assert cgroups.make("ours", proc) == ""
    assert (theirs / "cgroup.kill").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("proc/self/cgroup", "2:memory:/other\n"),
        ("proc/self/cgroup", "0::/elsewhere\n"),
        ("proc/self/mounts", "cgroup /x cgroup rw,memory 0 0\n"),
        (f"v2/unit/{MEMBERS}", "1\n"),
    ],
    ids=["version 1 only", "another part of the tree", "not mounted", "another one's group"],
)
def test_where_the_own_group_is_not_to_be_found_none_is_made(
    proc: Path, file: str, text: str
) -> None:
    (proc.parent / file).write_text(text)
    assert cgroups.make("ours", proc) == ""
    assert not (proc.parent / "v2/unit/ours").exists()


def test_without_a_proc_none_is_made(tmp_path: Path) -> None:
    assert cgroups.make("ours", tmp_path) == ""


def test_a_process_joins_by_its_number(tmp_path: Path) -> None:
    (tmp_path / MEMBERS).touch()
    cgroups.join(str(tmp_path), 1234)
    assert (tmp_path / MEMBERS).read_text() == "1234"


def test_a_group_that_is_gone_keeps_nobody_from_starting(tmp_path: Path) -> None:
    cgroups.join(str(tmp_path / "gone"), 1234)
    assert not (tmp_path / "gone").exists()


def end_guardian_of(group: Path) -> None:
    """Run a guardian whose agent ends at once, and wait for its end."""
    mark = f"{os.getpid()}-of-nobody"
    command = guardian.command(sys.executable, mark, str(group))
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("populated", [0, 1], ids=["it empties", "it never empties"])
def test_a_guardian_kills_the_group_and_waits_for_it_only_so_long(
    tmp_path: Path, populated: int
) -> None:
    (tmp_path / "cgroup.kill").touch()
    (tmp_path / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
    end_guardian_of(tmp_path)
    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_a_guardian_ends_without_the_group_that_it_was_told_of(tmp_path: Path) -> None:
    end_guardian_of(tmp_path / "gone")

# SPDX-License-Identifier: Apache-2.0
"""Every tutorial does what its page says: in an empty folder, with the wheel and nothing of src."""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import pytest

from tests.tutorials import Command, Console, File, PageError, blocks, follow, missing_line

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NOT_RUN_MAX = 5
LIMIT_S = 240.0


def build_wheel(folder: Path) -> None:
    """From a copy, so that no build of another process and no leftover in the tree gets into it."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=LIMIT_S)


def link_libraries(folder: Path) -> None:
    """All that is installed here, except Holdfast itself."""
    folder.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if "holdfast" not in installed.name:
            (folder / installed.name).symlink_to(installed)


def make_environment(folder: Path) -> None:
    """A virtual environment with Holdfast from the wheel."""
    build_wheel(folder)
    link_libraries(folder / "libraries")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    command = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps"]
    command += ["--no-index", str(next(folder.glob("*.whl")))]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    torchrun = folder / "env" / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)


@pytest.fixture(scope="session")
def wheel_and_environment() -> Path:
    """Made once in a run, by the first worker of pytest-xdist that needs it."""
    folder = Path(tempfile.gettempdir()) / "tutorials"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            make_environment(folder)
            (folder / "ready").touch()
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, wheel_and_environment: Path, tmp_path: Path) -> None:
    folder, logs = tmp_path / "empty", tmp_path / "logs"
    folder.mkdir()
    logs.mkdir()
    shutil.copy(next(wheel_and_environment.glob("*.whl")), folder)
    environment = {
        **os.environ,
        "PATH": f"{wheel_and_environment / 'env' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(wheel_and_environment / "libraries"),
        "XDG_RUNTIME_DIR": str(logs),
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    follow(page.read_text(), folder, environment, logs)


def test_hardly_anything_is_left_out() -> None:
    not_run = [
        block.commands[0].text
        for page in PAGES
        for block in blocks(page.read_text())
        if isinstance(block, Console) and block.not_run
    ]
    assert len(not_run) <= NOT_RUN_MAX, not_run


PAGE = """
<!-- file: hello.txt -->
```text
hello
```

```console
$ cat hello.txt; \\
  echo 12 files
hello
... files
$ until [ -e over ]; do echo waiting; sleep 0.1; done
waiting
```

<!-- second terminal, once the first shows: waiting -->

```console
$ touch over
```

<!-- not run: it would fail -->
```console
$ false
```
"""


def test_a_page_is_read() -> None:
    assert list(blocks(PAGE)) == [
        File("hello.txt", "hello\n"),
        Console(
            (
                Command("cat hello.txt; \\\n  echo 12 files", ("hello", "... files")),
                Command("until [ -e over ]; do echo waiting; sleep 0.1; done", ("waiting",)),
            )
        ),
        Console((Command("touch over", ()),), after="waiting"),
        Console((Command("false", ()),), not_run="it would fail"),
    ]


def test_a_page_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    follow(PAGE, folder, os.environ, tmp_path)
    assert (folder / "over").exists()


@pytest.mark.parametrize(
    "block",
    ["$ false", "$ echo one; echo two\ntwo\none", "$ echo one\nOne", "$ echo one more\none"],
    ids=["it fails", "another order", "another text", "half of a line"],
)
def test_a_page_that_is_wrong_is_found(block: str, tmp_path: Path) -> None:
    with pytest.raises(PageError):
        follow(f"```console\n{block}\n```\n", tmp_path, os.environ, tmp_path)


def test_dots_stand_for_any_text() -> None:
    output = "17:02:11 master: round 2 begins\nstep 3 of 9\nover\n"
    assert missing_line(("...", "... round 2 ...", "step ... of 9", "over"), output) is None
    assert missing_line(("over", "step ..."), output) == "step ..."

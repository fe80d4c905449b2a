# SPDX-License-Identifier: Apache-2.0
"""The leftovers check of tests/conftest.py finds what a careless test leaves, and nothing else.

Also: what it hands out together stays together.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TOGETHER

ROOT = Path(__file__).resolve().parents[2]

LEAKS = {
    "process": (
        "import subprocess\n"
        "def test_leak():\n"
        "    subprocess.Popen(['tail', '-f', '/dev/null'], start_new_session=True)\n",
        "tail -f /dev/null",
    ),
    "folder": (
        "import tempfile\ndef test_leak():\n    tempfile.mkdtemp(prefix='holdfast-leak-')\n",
        "holdfast-leak-",
    ),
    "shared memory": (
        "import os, pathlib\n"
        "def test_leak():\n"
        "    folder = pathlib.Path(os.environ['HOLDFAST_TEST_SHM'])\n"
        "    (folder / 'holdfast-arena').write_bytes(b'x')\n",
        "/holdfast-arena",
    ),
}


def run_pytest(
    folder: Path, test: str, *options: str, name: str = "test_inner.py"
) -> subprocess.CompletedProcess[str]:
    """A whole pytest run of its own over one test file, with our conftest as a plugin."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(test)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOLDFAST_TEST_SHM": str(folder),
        "HOLDFAST_TEST_DYING_S": "2",
        # Other plugins take longer to load than these tests take to run.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = ("-p", "tests.conftest", "--rootdir", str(folder), "-c", os.devnull, *options)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("kind", LEAKS)
@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_a_leak_fails_the_run(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    test, shown = LEAKS[kind]
    done = run_pytest(tmp_path, test, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "left behind by the tests" in done.stdout
    assert shown in done.stdout


def test_a_clean_run_passes_and_its_folder_is_gone(tmp_path: Path) -> None:
    test = (
        "import subprocess, tempfile\n"
        "def test_clean():\n"
        "    subprocess.run(['true'], check=True)\n"
        "    print('folder', tempfile.gettempdir())\n"
    )
    done = run_pytest(tmp_path, test, "-s")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = next(line.split()[-1] for line in done.stdout.splitlines() if "folder " in line)
    assert not Path(folder).exists()


def test_a_failed_run_keeps_its_files_and_its_status(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_bad(tmp_path):\n    assert not tmp_path\n")
    assert done.returncode == 1
    kept = [line for line in done.stdout.splitlines() if "files of this run are kept in" in line]
    assert len(kept) == 1
    assert "left behind" not in done.stdout


@pytest.mark.parametrize(("name", "workers"), [(TOGETHER[0], 1), ("test_inner.py", 2)])
def test_a_file_that_loads_something_large_stays_in_one_worker(
    name: str, workers: int, tmp_path: Path
) -> None:
    test = (
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_it(number):\n"
        "    pass\n"
    )
    done = run_pytest(tmp_path, test, "-p", "xdist", "-n", "2", "-v", name=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(re.findall(r"\[(gw\d)\] .*PASSED", done.stdout))) == workers

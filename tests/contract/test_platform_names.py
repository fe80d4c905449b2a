# SPDX-License-Identifier: Apache-2.0
"""Platforms are looked up by name: each has what `holdfast master` asks of it, and no more is
imported than is used."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import platforms

HELP = (
    "import sys\n"
    "from holdfast.cli import main\n"
    "try:\n"
    "    main(['master', '--help'])\n"
    "except SystemExit:\n"
    "    pass\n"
    "sys.exit(' '.join({'httpx', 'ray'} & set(sys.modules)) or 0)\n"
)


@pytest.mark.parametrize("name", platforms.NAMES)
def test_each_finds_its_job(name: str) -> None:
    assert list(inspect.signature(platforms.opener(name)).parameters) == [
        "arguments",
        "asked",
        "say",
    ]


def test_help_has_the_options_of_all_and_imports_none_of_them() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, timeout=120, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "--kubeconfig" in shown.stdout
    assert all(f"{name}:" in " ".join(shown.stdout.split()) for name in platforms.NAMES)


def test_the_local_platform_is_for_launchers(tmp_path: Path) -> None:
    master = [sys.executable, "-m", "holdfast.cli", "master", "--job", "j", "--platform", "local"]
    refused = subprocess.run(
        [*master, "--state", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 2
    assert "--platform local is for `holdfast run`" in refused.stderr

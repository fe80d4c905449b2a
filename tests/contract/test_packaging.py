# SPDX-License-Identifier: Apache-2.0
"""What is installed: one version, one wheel for every Python, an sdist with everything.

`make release` does this with published tools and installs the result; here setuptools' own hooks
build from a copy of the tree, without a network.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from holdfast import __version__

ROOT = Path(__file__).resolve().parents[2]
IGNORED = shutil.ignore_patterns(
    ".*_cache", ".ci", ".git", ".hypothesis", ".venv", "__pycache__", "*.egg-info", "*.so", "build"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy without what builds leave behind, in a folder whose name has a space."""
    shutil.copytree(ROOT, tmp_path / "a copy", ignore=IGNORED)
    return tmp_path / "a copy"


def build(hook: str, tree: Path, compiler: str | None = None) -> Path:
    """Let setuptools build as pip would, and return what it made."""
    program = (
        "import sys\nfrom setuptools import build_meta\n"
        f"sys.stderr.write('made: ' + build_meta.{hook}('made') + '\\n')\n"
    )
    (tree / "made").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env=os.environ | ({"CC": compiler} if compiler else {}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = re.findall(r"^made: (.*)$", done.stderr, re.MULTILINE)
    return tree / "made" / str(made)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_wheel_serves_every_python(tree: Path) -> None:
    wheel = build("build_wheel", tree)
    assert wheel.name.startswith(f"holdfast-{__version__}-cp311-abi3-linux_")
    names = names_in(wheel)
    assert "holdfast/checkpoint/_streaming.abi3.so" in names
    assert {"holdfast/py.typed", "holdfast/__main__.py"} <= names
    assert {name.split("/")[0] for name in names} == {
        "holdfast",
        f"holdfast-{__version__}.dist-info",
    }


def test_without_a_compiler_the_wheel_has_no_extension(tree: Path) -> None:
    names = names_in(build("build_wheel", tree, compiler="false"))
    assert "holdfast/checkpoint/copier.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_the_sdist_has_all_that_a_clone_has(tree: Path) -> None:
    with tarfile.open(build("build_sdist", tree)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("bench", "deploy", "docs", "examples", "packages", "scripts", "src", "tests"):
        files = [path for path in (tree / folder).rglob("*") if path.is_file()]
        missing = {str(path.relative_to(tree)) for path in files} - names
        assert {name for name in missing if ".egg-info" not in name} == set()
    assert {"CHANGELOG.md", "LICENSE", "Makefile", "SECURITY.md", "setup.py"} <= names


def test_the_version_is_in_one_place() -> None:
    """The chart cannot read it from the package, and the changelog must speak of it."""
    chart = yaml.safe_load((ROOT / "deploy/helm/holdfast/Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert __version__ not in (ROOT / "pyproject.toml").read_text()
    assert __version__ not in (ROOT / "setup.py").read_text()
    compat = tomllib.loads((ROOT / "packages/dlrover-compat/pyproject.toml").read_text())["project"]
    assert compat["version"] == __version__
    assert compat["dependencies"] == [f"holdfast[torch]=={__version__}"]


def test_the_imports_of_dlrover_are_a_distribution_of_their_own(tree: Path, tmp_path: Path) -> None:
    wheel = build("build_wheel", tree / "packages/dlrover-compat")
    assert {name.split("/")[0] for name in names_in(wheel)} == {
        "dlrover",
        f"holdfast_dlrover_compat-{__version__}.dist-info",
    }
    where = "from dlrover.python.elastic_agent.sharding import client; print(client.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", where],
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.startswith(str(wheel)), done.stderr

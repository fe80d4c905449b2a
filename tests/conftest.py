# SPDX-License-Identifier: Apache-2.0
"""Proves at the end of every run that the tests left nothing behind.

Every run gets a name, which all its processes inherit in HOLDFAST_TEST_RUN, and its own temporary
folder (TMPDIR), so that runs side by side on one machine do not see each other's remains. Only the
controller of pytest-xdist (or the one process without it) makes and checks them.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.soaking import WHOLE

# A busy machine must not fail a test, and chance must not fail the check of a change that has
# nothing to do with it: only `make soak` tries new examples.
settings.register_profile(
    "holdfast",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="HOLDFAST_SOAK_SEEDS" not in os.environ,
)
settings.load_profile("holdfast")

RUN_VARIABLE = "HOLDFAST_TEST_RUN"
# Only the test of this check sets these, so as not to disturb the runs beside it, and to be quick.
SHARED_MEMORY = Path(os.environ.get("HOLDFAST_TEST_SHM", "/dev/shm"))
DYING_S = float(os.environ.get("HOLDFAST_TEST_DYING_S", "60"))
"""What was told to stop may take this long to be gone."""

LONGEST_FIRST = (
    "kube/test_jobs.py",
    "e2e/",
    "sim/test_mutants.py",
    "sim/test_fresh_seeds.py",
    "integration/adapters/",
    "integration/test_flash_",
    "integration/test_sharded.py",
    "integration/test_data_exactly_once.py",
    "integration/test_elastic_training.py",
    "integration/test_master_kills.py",
    "kube/",
    "integration/",
    "sim/",
    "tidy/test_leftovers.py",
)
"""What takes long begins early, so that at the end no worker of pytest-xdist waits for another."""

TOGETHER = (
    "integration/adapters/test_ray_data.py",
    "integration/adapters/test_tensorflow_data.py",
    "integration/test_http.py",
    "integration/test_status.py",
    "compat/test_from_dlrover.py",
)
"""Files whose tests share something that is dear to start or to load: once, not in each worker of
pytest-xdist. (Its own `xdist_group` does nothing since pytest 9.2.)"""


@dataclass
class Run:
    """What the controller remembers from the start of the run to its end."""

    name: str
    folder: Path
    memory: Path
    """Where the run's jobs keep their checkpoints in memory."""
    shared_memory_before: frozenset[Path]
    leftovers: list[str] = field(default_factory=list)
    has_failures: bool = False


RUN_KEY = pytest.StashKey[Run]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name the run before pytest-xdist starts its workers and before pytest chooses its folder."""
    if hasattr(config, "workerinput"):
        return
    # Short, because Unix socket paths under it may have 107 bytes only.
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    run = Run(
        name=f"{os.getpid()}-{secrets.token_hex(8)}",
        folder=folder,
        memory=Path(tempfile.mkdtemp(prefix="hf-memory-", dir="/dev/shm")),
        shared_memory_before=frozenset(SHARED_MEMORY.glob("holdfast*")),
    )
    os.environ[RUN_VARIABLE] = run.name
    # Threads that spin while they wait for each other make a machine with many processes crawl.
    os.environ["OMP_NUM_THREADS"] = "1"
    # torch asks a name server for the name of each of its clients, even on the loopback: an answer
    # that is lost costs every process group and store of the suite 1 s instead of 5.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    # What jobs that were killed as a whole leave in memory goes with the run.
    os.environ["HOLDFAST_MEMORY_DIR"] = str(run.memory)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if config.option.basetemp is None:
        config.option.basetemp = str(folder / "t")
    config.stash[RUN_KEY] = run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make soak` runs. The rest in the order of LONGEST_FIRST, and the files'
    own order within it."""

    def place(item: pytest.Item) -> int:
        file = str(item.path).rpartition("/tests/")[2]
        starts = [number for number, start in enumerate(LONGEST_FIRST) if file.startswith(start)]
        return starts[0] if starts else len(LONGEST_FIRST)

    if not WHOLE:
        for_soak = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]
        config.hook.pytest_deselected(items=for_soak)
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands the tests out one by one, but a file of TOGETHER as a whole, and that first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Look around after everything else, pytest-xdist's workers included, has ended."""
    yield
    run = session.config.stash.get(RUN_KEY, None)
    if run is None:
        return
    run.has_failures = session.exitstatus != pytest.ExitCode.OK
    run.leftovers += end_leftover_processes(run.name)
    run.leftovers += leftover_shared_memory(run.shared_memory_before)
    run.leftovers += [f"folder {path}" for path in sorted(run.folder.glob("holdfast*"))]
    if run.leftovers:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was left, below the results, where it is seen."""
    run = config.stash.get(RUN_KEY, None)
    if run is None:
        return
    if run.has_failures:
        terminalreporter.write_line(f"files of this run are kept in {run.folder}")
    if run.leftovers:
        terminalreporter.section("left behind by the tests", sep="=", red=True, bold=True)
        for line in run.leftovers:
            terminalreporter.write_line(line, red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's folder, unless a failed test's files may be wanted to find out why."""
    run = config.stash.get(RUN_KEY, None)
    if run is None:
        return
    shutil.rmtree(run.memory, ignore_errors=True)
    if not run.has_failures:
        shutil.rmtree(run.folder, ignore_errors=True)


def processes_of(run_name: str) -> Iterator[psutil.Process]:
    """Living processes that inherited the name of this run, without the caller itself."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == run_name:
                yield process
        except psutil.Error:
            continue  # It ended meanwhile, is a zombie, or belongs to somebody else.


def end_leftover_processes(run_name: str) -> list[str]:
    """Give what is dying a moment; describe and kill the rest, so that it disturbs no later run."""
    _, alive = psutil.wait_procs(list(processes_of(run_name)), timeout=DYING_S)
    described = []
    # Listed again: what was there at first may have started something on its way out.
    for process in {*alive, *processes_of(run_name)}:
        try:
            described.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.Error:
            continue
    return sorted(described)


def leftover_shared_memory(before: frozenset[Path]) -> list[str]:
    """New segments that no living process has mapped: those of a run beside this one are mapped."""
    new = {path for path in SHARED_MEMORY.glob("holdfast*") if path not in before}
    in_use: set[str] = set()
    for process in psutil.process_iter() if new else ():
        try:
            in_use.update(mapped.path for mapped in process.memory_maps())
            in_use.update(opened.path for opened in process.open_files())
        except psutil.Error:
            continue
    return [f"shared memory {path}" for path in sorted(new) if not held(path, in_use)]


def held(path: Path, in_use: set[str]) -> bool:
    """Whether a process holds this file, or, if it is a folder, something in it."""
    return any(used == str(path) or used.startswith(f"{path}/") for used in in_use)

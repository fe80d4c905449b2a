# SPDX-License-Identifier: Apache-2.0
"""A node that stands still in the middle of a commit, on every storage, at every call.

Meanwhile others commit. Then it goes on with what it had decided long ago, or dies. Whatever was
committed is whole, byte for byte; the tracker names the newest; and the late one does not claim
what is not there.

Every run tries every call on file systems and on objects in memory: `checkpoint/objects.py` is all
that knows the difference, and takes both kinds of objects through fsspec. On a server that speaks
S3, which is slow, every run tries one row of each test at every 4th call; `make soak` tries all.
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec
import pytest
from msgspec.structs import replace

from holdfast.checkpoint.commit import commit, put_in_order, tracker_text
from holdfast.checkpoint.manifest import (
    Committed,
    find_committed,
    is_whole,
    list_all,
    list_committed,
    read_manifest,
)
from holdfast.checkpoint.naming import own_name, version_at
from holdfast.checkpoint.places import abandon, clean_leftovers
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.retention import apply_retention, remove_steps
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import Storage
from holdfast.checkpoint.verify import verify_checkpoint
from holdfast.model.checkpoint import Series, Version
from holdfast.model.errors import FencedError, HoldfastError
from tests.soaking import WHOLE
from tests.storages import (
    IMPATIENT,
    State,
    load,
    make_state,
    order_for,
    s3_server,
    save,
    write_state,
)

OLD, MINE, NEWER, LATER = Version(1, 7), Version(2, 7), Version(3, 7), Version(2, 8)
NEXT = Version(4, 9)
STATES: dict[Version, State] = {
    version: make_state(number + 2, ranks=1, size=5000)
    for number, version in enumerate((OLD, MINE, NEWER, LATER, NEXT))
}
ATTEMPTS = {OLD: "m-1", MINE: "m-2", NEWER: "m-3", LATER: "m-4", NEXT: "m-5"}


class WithoutExchange(PosixStorage):
    """A file system on which two directories cannot swap names, as with NFS."""

    def exchange(self, one: str, other: str) -> bool:
        return False


class Died(BaseException):
    """Nobody handles this: to the storage it is the same as a kill."""


class Interrupted:
    """A storage whose user stands still right before its n-th call, and may die at a later one."""

    def __init__(
        self, storage: Storage, number: int, meanwhile: Callable[[], None], dies_at: int = 0
    ) -> None:
        self._storage = storage
        self._number = number
        self._meanwhile = meanwhile
        self._dies_at = dies_at
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        if not callable(value) or name in ("full", "free_bytes"):
            return value
        self.count += 1
        if self.count == self._number:
            self._meanwhile()
        if self.count == self._dies_at:
            raise Died
        return value


@dataclass
class Scene:
    """A directory in which a first node does something late, and what others did meanwhile."""

    storage: Storage
    series: Series
    scratch: Path
    #: What was acknowledged by others, and not removed since.
    must_stay: list[Version]

    @staticmethod
    def of(storage: Storage, scratch: Path, text: str = "{name}") -> "Scene":
        return Scene(storage, Series(storage.url, tracker_text=text, keep_last=1), scratch, [])

    def save(self, version: Version) -> None:
        save(self.storage, self.series, version, STATES[version], ATTEMPTS[version], self.scratch)

    # ---- what others do meanwhile ----------------------------------------------------------------

    def same(self, order: Any) -> None:
        """Another node is told to commit the same attempt."""
        commit(self.storage, self.series, order, patience=IMPATIENT)
        self.must_stay = [order.version]

    def newer(self, order: Any) -> None:
        """Training went back and came to the step again."""
        self.save(NEWER)
        self.must_stay = [NEWER]

    def later(self, order: Any) -> None:
        """The same attempt, then the next step; then only the newest is kept."""
        self.same(order)
        self.save(LATER)
        apply_retention(self.storage, self.series)
        clean_leftovers(self.storage, ())
        self.must_stay = [LATER]

    def other(self, order: Any) -> None:
        """The next step without the one that the first is about to commit."""
        self.save(LATER)
        apply_retention(self.storage, self.series)
        self.must_stay = [LATER]

    def opened(self, order: Any) -> None:
        """Another node begins to write here."""
        put_in_order(self.storage, self.series)

    def taken(self, order: Any) -> None:
        """Another node that begins to write here has taken it, and looks at it."""
        name = self.series.name(MINE.step)
        if version_at(self.storage, name) == MINE:
            self.storage.rename(name, own_name(name))

    def is_half_done(self) -> bool:
        """Whether the newest checkpoint is mine, and the tracker or the plain name another's."""
        newest = list_committed(self.storage, self.series)[0]
        is_named = not self.storage.can_rename or newest.name == self.series.name(MINE.step)
        is_told = self.storage.get("latest") == tracker_text(self.series, newest)
        return newest.version == MINE and not (is_named and is_told)

    # ---- afterwards ------------------------------------------------------------------------------

    def check(self, *, claims: bool = False) -> None:
        found = list_committed(self.storage, self.series)
        for one in found:
            self.check_bytes(one)
        assert self.storage.get("latest") == tracker_text(self.series, found[0])
        versions = {one.version for one in found}
        assert versions >= set(self.must_stay)
        assert not claims or MINE in versions

    def check_tracker(self, *, has_old: bool = True) -> None:
        """It leads to the newest, which is whole; on file systems so does the plain name."""
        found = list_committed(self.storage, self.series)
        if not found and not has_old:
            return
        newest = found[0]
        self.check_bytes(newest)
        assert self.storage.get("latest") == tracker_text(self.series, newest)
        if self.storage.can_rename:
            assert newest.name == self.series.name(newest.version.step)

    def check_bytes(self, one: Committed) -> None:
        assert verify_checkpoint(self.storage, one).problems == ()
        assert load(self.storage, self.series, one.version, self.scratch) == STATES[one.version]

    def check_after_death(self) -> None:
        """What others have committed is there; the rest is in order after the next commit."""
        for version in self.must_stay:
            self.check_bytes(find_committed(self.storage, self.series, version))
        self.save(NEXT)
        apply_retention(self.storage, self.series)
        clean_leftovers(self.storage, (), older_than_s=-60)
        self.must_stay = [NEXT]
        self.check()
        assert len(self.storage.folders("")) == 1


KINDS = ("disk", "nfs", "objects", "s3")
MEANWHILE = ("same", "newer", "later", "other")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def on_every_storage(
    names: str, *axes: Collection[object], s3: tuple[object, ...] = ()
) -> pytest.MarkDecorator:
    """All combinations of the axes on all storages; on S3 only that one, the others in a soak."""
    rows = [
        pytest.param(
            kind, *values, marks=[pytest.mark.soak] if kind == "s3" and values != s3 else []
        )
        for kind, *rest in itertools.product(KINDS, *axes)
        for values in [tuple(rest)]
    ]
    return pytest.mark.parametrize(f"storages,{names}", rows, indirect=["storages"])


@pytest.fixture(params=KINDS)
def storages(request: pytest.FixtureRequest, in_memory: Path) -> Iterator[Iterator[Storage]]:
    """As many empty ones of a kind as are wanted."""
    numbers = itertools.count()
    match request.param:
        case "disk":
            yield (PosixStorage(f"{in_memory}/{n}") for n in numbers)
        case "nfs":
            yield (WithoutExchange(f"{in_memory}/{n}") for n in numbers)
        case "objects":
            yield (open_storage(f"memory://{in_memory}/{n}") for n in numbers)
            fsspec.filesystem("memory").store.clear()
        case _:
            url = request.getfixturevalue("s3")
            yield (open_storage(f"{url}{in_memory}/{n}") for n in numbers)


def begin(
    storage: Storage, scratch: Path, *, has_old: bool, text: str = "{name}"
) -> tuple[Scene, Any]:
    """A directory in which the attempt of the first node is ready to be committed."""
    scene = Scene.of(storage, scratch, text)
    if has_old:
        scene.save(OLD)
    files = write_state(storage, scene.series, MINE, STATES[MINE], ATTEMPTS[MINE], scratch)
    return scene, order_for(scene.series, MINE, ATTEMPTS[MINE], files)


def every_call(request: pytest.FixtureRequest, meanwhile: str = "") -> Iterator[int]:
    """All of them; on S3, which is slow and has the code of objects in memory, some, but in a
    soak."""
    if WHOLE or "[s3" not in request.node.name:
        return itertools.count(1)
    return itertools.count(1 + len(meanwhile) % 4, 4)


@on_every_storage("meanwhile,has_old", MEANWHILE, [False, True], s3=("later", True))
def test_a_commit_that_stands_still_at_every_call(
    request: pytest.FixtureRequest,
    storages: Iterator[Storage],
    tmp_path: Path,
    meanwhile: str,
    has_old: bool,
) -> None:
    for number in every_call(request, meanwhile):
        scene, order = begin(next(storages), tmp_path, has_old=has_old)
        late = Interrupted(scene.storage, number, partial(getattr(scene, meanwhile), order))
        claims = True
        try:
            commit(late, scene.series, order, patience=IMPATIENT)
        except HoldfastError:
            claims = False
        if late.count < number:
            break
        scene.check(claims=claims)
        if meanwhile == "same":
            assert claims
    assert number > 10


@pytest.mark.parametrize("storages", ["disk", "nfs", "objects"], indirect=True)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_commit_that_stands_still_and_then_dies(
    storages: Iterator[Storage], tmp_path: Path, meanwhile: str
) -> None:
    for number in itertools.count(1):
        for dies_at in itertools.count(number):
            scene, order = begin(next(storages), tmp_path, has_old=True)
            others = partial(getattr(scene, meanwhile), order)
            late = Interrupted(scene.storage, number, others, dies_at)
            with suppress(Died, HoldfastError):
                commit(late, scene.series, order, patience=IMPATIENT)
            if late.count < dies_at:
                break
            scene.check_after_death()
        if late.count < number:
            break


@on_every_storage("dies", [False, True], s3=(True,))
def test_a_retention_that_stands_still_at_every_call(
    request: pytest.FixtureRequest, storages: Iterator[Storage], tmp_path: Path, dies: bool
) -> None:
    """The step that it is about to remove is saved again."""
    for number in every_call(request):
        scene = Scene.of(next(storages), tmp_path)
        scene.save(OLD)
        scene.save(LATER)
        others = partial(scene.newer, None)
        late = Interrupted(scene.storage, number, others, number + 1 if dies else 0)
        with suppress(Died):
            apply_retention(late, scene.series)
        if late.count < number:
            break
        if dies:
            scene.check_after_death()
        else:
            scene.check()
    assert number > 5


def test_a_removal_of_the_last_step_that_stands_still_at_every_call(
    request: pytest.FixtureRequest, storages: Iterator[Storage], tmp_path: Path
) -> None:
    """A job commits its next step beside `holdfast ckpt rm --force`."""
    for number in every_call(request):
        scene = Scene.of(next(storages), tmp_path)
        scene.save(OLD)
        late = Interrupted(scene.storage, number, partial(scene.other, None))
        remove_steps(late, scene.series, {OLD.step}, newest_too=True)
        if late.count < number:
            break
        scene.check()
    assert scene.storage.get("latest") is None
    assert number > 5


@on_every_storage("meanwhile", ["newer", "same"], s3=("newer",))
def test_a_writer_that_stands_still_at_every_call(
    storages: Iterator[Storage], tmp_path: Path, meanwhile: str
) -> None:
    """Others have written its part, or all of another attempt, and that is committed."""
    for number in itertools.count(1):
        scene = Scene.of(next(storages), tmp_path)
        mine = (scene.series, MINE)

        def others() -> None:
            version = NEWER if meanwhile == "newer" else MINE
            scene.save(version)  # noqa: B023
            scene.must_stay = [version]  # noqa: B023

        late = Interrupted(scene.storage, number, others)
        (tmp_path / "late").mkdir(exist_ok=True)
        part = {"rank-00000": STATES[MINE]["rank-00000"]}
        with suppress(HoldfastError, FileNotFoundError):
            write_state(late, *mine, part, ATTEMPTS[MINE], tmp_path / "late")
        for left in (tmp_path / "late").iterdir():
            left.unlink()
        if late.count < number:
            break
        if meanwhile == "newer":
            abandon(scene.storage, ATTEMPTS[MINE])
        scene.check()
    assert number > 2


@on_every_storage("meanwhile", ["same", "newer", "later"], s3=("newer",))
def test_a_fence_that_closes_meanwhile_ends_every_change(
    request: pytest.FixtureRequest, storages: Iterator[Storage], tmp_path: Path, meanwhile: str
) -> None:
    for number in every_call(request, meanwhile):
        scene, order = begin(next(storages), tmp_path, has_old=False)
        before: list[dict[str, int]] = []

        def others() -> None:
            getattr(scene, meanwhile)(order)  # noqa: B023
            before.append(scene.storage.files(""))  # noqa: B023

        def check() -> None:
            if before:  # noqa: B023
                raise FencedError("the master has given this node up")

        late = Interrupted(scene.storage, number, others)
        with suppress(HoldfastError):
            commit(late, scene.series, order, patience=IMPATIENT, fence=check)
            assert late.count < number or scene.storage.files("") == before[0]
        if late.count < number:
            break
        scene.check()


# ---- nobody else commits afterwards --------------------------------------------------------------


@on_every_storage(
    "text,is_later,has_old",
    ["{name}", "{step}"],
    [False, True],
    [False, True],
    s3=("{name}", False, True),
)
def test_a_fence_that_closes_at_every_check_leaves_a_tracker_that_leads_somewhere(
    request: pytest.FixtureRequest,
    storages: Iterator[Storage],
    tmp_path: Path,
    text: str,
    is_later: bool,
    has_old: bool,
) -> None:
    """Between two renames: then no checkpoint had the name that the tracker says."""
    for number in every_call(request):
        scene, order = begin(next(storages), tmp_path, has_old=has_old, text=text)
        if is_later:  # The step is not the newest one.
            scene.save(NEXT)
        checks = itertools.count(1)

        def check() -> None:
            if next(checks) >= number:  # noqa: B023
                raise FencedError("the master has given this node up")

        claims = False
        with suppress(FencedError):
            commit(scene.storage, scene.series, order, patience=IMPATIENT, fence=check)
            claims = True
        scene.check_tracker(has_old=has_old)
        # What is there was not refused, and the other way round.
        versions = {one.version for one in list_committed(scene.storage, scene.series)}
        assert claims == (MINE in versions)
        if scene.storage.can_rename and claims:
            plain = find_committed(scene.storage, scene.series, MINE).name
            assert plain == scene.series.name(MINE.step)
        if next(checks) <= number:
            break
    assert number >= 2


@pytest.mark.parametrize("storages", ["disk", "nfs", "objects"], indirect=True)
@pytest.mark.parametrize("text", ["{name}", "{step}"])
@pytest.mark.parametrize("has_old", [False, True])
def test_a_death_at_every_call_is_mended_when_the_next_begins_to_write(
    storages: Iterator[Storage], tmp_path: Path, text: str, has_old: bool
) -> None:
    for number in itertools.count(1):
        scene, order = begin(next(storages), tmp_path, has_old=has_old, text=text)
        late = Interrupted(scene.storage, 0, lambda: None, number)
        with suppress(Died):
            commit(late, scene.series, order, patience=IMPATIENT)
        before = {one.version for one in list_all(scene.storage, scene.series).committed}
        put_in_order(scene.storage, scene.series)
        scene.check_tracker(has_old=has_old)
        after = {one.version for one in list_all(scene.storage, scene.series).committed}
        assert after == before
        if late.count < number:
            break
        # It has changed nothing that the next commit could not do without it.
        scene.check_after_death()
    assert number > 10


@pytest.mark.parametrize("storages", ["disk", "nfs", "objects"], indirect=True)
@pytest.mark.parametrize("ending", ["goes on", "dies", "is fenced"])
@pytest.mark.parametrize("meanwhile", [*MEANWHILE, "opened"])
def test_an_opening_that_stands_still_at_every_call(
    storages: Iterator[Storage], tmp_path: Path, meanwhile: str, ending: str
) -> None:
    """It mends what a death has left, and others commit: the same attempt, or something newer."""
    seen = 0
    for dies_at in itertools.count(1):
        for number in itertools.count(1):
            scene, order = begin(next(storages), tmp_path, has_old=True)
            dead = Interrupted(scene.storage, 0, lambda: None, dies_at)
            with suppress(Died):
                commit(dead, scene.series, order, patience=IMPATIENT)
            if not scene.is_half_done():
                break
            others = partial(getattr(scene, meanwhile), order)
            late = Interrupted(scene.storage, number, others, number + 1 if ending == "dies" else 0)

            def check() -> None:
                if ending == "is fenced" and late.count >= number:  # noqa: B023
                    raise FencedError("the master has given this node up")

            with suppress(Died, FencedError):
                put_in_order(late, scene.series, check)
            if late.count < number:
                break
            seen += 1
            if ending == "dies":
                scene.check_after_death()
                continue
            if meanwhile == "opened":
                put_in_order(scene.storage, scene.series)
            scene.check()
            scene.check_tracker()
        if dead.count < dies_at:
            break
    assert seen > 10


@pytest.mark.parametrize("storages", ["disk", "nfs", "objects"], indirect=True)
@pytest.mark.parametrize("meanwhile", ["opened", "taken"])
@pytest.mark.parametrize("has_old", [False, True])
def test_a_commit_during_which_another_node_opens_the_directory(
    storages: Iterator[Storage], tmp_path: Path, has_old: bool, meanwhile: str
) -> None:
    """What is half done because somebody is at it is not mended at its cost."""
    for number in itertools.count(1):
        scene, order = begin(next(storages), tmp_path, has_old=has_old)
        late = Interrupted(scene.storage, number, partial(getattr(scene, meanwhile), order))
        commit(late, scene.series, order, patience=IMPATIENT)
        if late.count < number:
            break
        if meanwhile == "taken":
            scene.opened(order)
        scene.check(claims=True)
        scene.check_tracker()
    assert number > 10


@pytest.mark.parametrize("storages", ["disk", "nfs", "objects"], indirect=True)
def test_an_opening_leaves_alone_what_leads_to_a_damaged_checkpoint(
    storages: Iterator[Storage], tmp_path: Path
) -> None:
    """The older one is what the job has restored."""
    seen = nameless = 0
    for number in itertools.count(1):
        scene, order = begin(next(storages), tmp_path, has_old=True)
        late = Interrupted(scene.storage, 0, lambda: None, number)
        with suppress(Died):
            commit(late, scene.series, order, patience=IMPATIENT)
        newest = list_committed(scene.storage, scene.series)[0]
        if newest.version == MINE:
            seen += 1
            scene.storage.remove(f"{newest.name}/{newest.manifest.files[0].name}")
            name, told = scene.series.name(MINE.step), scene.storage.get("latest")
            before, folders = scene.storage.files(""), scene.storage.folders("")
            put_in_order(scene.storage, scene.series)
            assert scene.storage.get("latest") == told
            if name in folders or not scene.storage.can_rename:
                assert scene.storage.files("") == before
            else:  # On NFS, between two renames: the tracker leads to the older one again.
                nameless += 1
                manifest = read_manifest(scene.storage, name)
                assert manifest is not None
                assert is_whole(scene.storage, Committed(name, manifest))
                assert told == name.encode()
        if late.count < number:
            break
    assert seen > 1
    assert (nameless > 0) == isinstance(scene.storage, WithoutExchange)


@pytest.mark.parametrize("storages", ["disk", "nfs"], indirect=True)
def test_a_whole_checkpoint_takes_the_plain_name_of_a_damaged_one_of_its_version(
    storages: Iterator[Storage], tmp_path: Path
) -> None:
    scene, order = begin(next(storages), tmp_path, has_old=False)
    commit(scene.storage, scene.series, order, patience=IMPATIENT)
    name = scene.series.name(MINE.step)
    (damaged,) = list_committed(scene.storage, scene.series)
    scene.storage.remove(f"{name}/{damaged.manifest.files[0].name}")
    scene.save(MINE)
    assert scene.storage.get("latest") == name.encode()
    assert [one.name for one in list_all(scene.storage, scene.series).committed] == [name]
    scene.must_stay = [MINE]
    scene.check()


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("storages", ["disk", "nfs", "objects"], indirect=True)
def test_retention_removes_what_a_newer_version_has_replaced(
    storages: Iterator[Storage], tmp_path: Path, is_damaged: bool, keep_last: int
) -> None:
    """Who gave it the name was fenced by then, or put in order what a dead node had left."""
    scene, order = begin(next(storages), tmp_path, has_old=True)
    series = replace(scene.series, keep_last=keep_last)
    for number in itertools.count(1):
        with suppress(Died):
            late = Interrupted(scene.storage, 0, lambda: None, number)
            commit(late, series, order, patience=IMPATIENT)
        found = list_all(scene.storage, series).committed
        if found[0].version == MINE:
            break
    assert [one.version for one in found] == [MINE, OLD]
    if is_damaged:
        scene.storage.remove(f"{found[0].name}/{found[0].manifest.files[0].name}")
    else:
        put_in_order(scene.storage, series)
    apply_retention(scene.storage, series)
    left = [one.version for one in list_all(scene.storage, series).committed]
    assert left == ([MINE, OLD] if is_damaged else [MINE])


# ---- file systems: at every system call ---------------------------------------------------------

CALLS = frozenset(
    {"open", "pwrite", "fsync", "rename", "mkdir", "rmdir", "unlink", "remove", "scandir", "lstat"}
)


def interrupted_at(number: int, work: Callable[[], None], meanwhile: Callable[[], None]) -> bool:
    """Do the work, and the other thing right before its n-th system call; False if it has fewer."""
    seen = 0

    def watch(frame: FrameType, event: str, function: Any) -> None:
        nonlocal seen
        if event != "c_call" or getattr(function, "__module__", "") != "posix":
            return
        if function.__name__ in CALLS:
            seen += 1
            if seen == number:
                sys.setprofile(None)
                meanwhile()

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen >= number


@pytest.mark.parametrize("kind", [PosixStorage, WithoutExchange])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_commit_that_stands_still_at_every_system_call(
    in_memory: Path, tmp_path: Path, kind: type[PosixStorage], meanwhile: str
) -> None:
    for number in itertools.count(1):
        scene, order = begin(kind(f"{in_memory}/{number}"), tmp_path, has_old=True)

        def work() -> None:
            with suppress(HoldfastError):
                commit(scene.storage, scene.series, order, patience=IMPATIENT)  # noqa: B023
                apply_retention(scene.storage, scene.series)  # noqa: B023

        if not interrupted_at(number, work, partial(getattr(scene, meanwhile), order)):
            break
        scene.check()
    assert number > 20
    assert len(os.listdir(in_memory)) == number

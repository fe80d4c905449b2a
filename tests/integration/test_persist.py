# SPDX-License-Identifier: Apache-2.0
"""From slots to storage and back: commit, restore, retention, leftovers; on disk and on S3."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.manifest import (
    MANIFEST,
    decode_manifest,
    encode_manifest,
    find_committed,
    list_committed,
)
from holdfast.checkpoint.persist import write_part
from holdfast.checkpoint.places import abandon, clean_leftovers
from holdfast.checkpoint.retention import apply_retention, remove_steps
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import HIDDEN, Storage
from holdfast.checkpoint.verify import quick_problems, verify_checkpoint
from holdfast.model.checkpoint import SHARED, Series, Version, rank_part
from holdfast.model.errors import RejectedError, StateError
from tests.storages import (
    fill_slot,
    load,
    load_files,
    make,
    make_state,
    order_for,
    s3_server,
    save,
    write_state,
)

V1 = Version(1, 100)
V2 = Version(2, 100)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["disk", "s3"])
def series(request: pytest.FixtureRequest, tmp_path: Path) -> Series:
    if request.param == "disk":
        return Series(f"{tmp_path}/ckpt")
    return Series(f"{request.getfixturevalue('s3')}/{tmp_path.name}")


@pytest.fixture
def storage(series: Series) -> Storage:
    return open_storage(series.directory)


def name_of(storage: Storage, series: Series, step: int) -> str:
    """What the directory of a step is called here: in a store of objects the attempt is in it."""
    (one,) = (one for one in list_committed(storage, series) if one.manifest.step == step)
    return one.name


def steps(storage: Storage, series: Series) -> list[int]:
    return [one.manifest.step for one in list_committed(storage, series)]


def test_a_saved_state_comes_back_bit_for_bit(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    state = make_state(1, size=20_000_000)  # More than one chunk.
    assert save(storage, series, V1, state, "a1", tmp_path) == []
    assert load(storage, series, V1, tmp_path) == state
    (committed,) = list_committed(storage, series)
    assert committed.stored.shape.world_size == 2
    assert committed.stored.first_rank == 0
    assert storage.get("latest") == committed.name.encode()
    assert verify_checkpoint(storage, committed).is_whole


def test_what_is_stored_says_which_ranks_part_is_the_first(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """Beside a shared part, parts of ranks are left out that were lost before they were written."""
    state = make_state(1)
    del state[rank_part(0)]
    save(storage, series, V1, state, "a1", tmp_path)
    del state[rank_part(1)]
    none_left = Version(V1.lineage, V1.step + 1)
    save(storage, series, none_left, state, "a2", tmp_path)
    found = {one.version: one.stored.first_rank for one in list_committed(storage, series)}
    assert found == {V1: 1, none_left: 2}


@pytest.mark.parametrize("step", [0, 2**24 + 1, 2**53 + 1])
def test_steps_are_integers_of_any_size(
    storage: Storage, series: Series, tmp_path: Path, step: int
) -> None:
    """Prior art: steps that went through floats were rounded above 2**24."""
    save(storage, series, Version(1, step), make_state(1), "a1", tmp_path)
    assert [one.version for one in list_committed(storage, series)] == [Version(1, step)]


def test_nothing_is_a_checkpoint_before_its_commit(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """Prior art: the tracker named a step whose files were not complete."""
    write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    assert list_committed(storage, series) == []
    assert storage.get("latest") is None


def test_a_commit_may_be_repeated(storage: Storage, series: Series, tmp_path: Path) -> None:
    state = make_state(1)
    entries = write_state(storage, series, V1, state, "a1", tmp_path)
    order = order_for(series, V1, "a1", entries)
    commit(storage, series, order)
    before = storage.files("")
    commit(storage, series, order)
    assert storage.files("") == before
    assert load(storage, series, V1, tmp_path) == state


def test_a_repeated_commit_does_not_move_the_tracker_back(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    entries = write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    order = order_for(series, V1, "a1", entries)
    commit(storage, series, order)
    save(storage, series, Version(1, 200), make_state(2), "a2", tmp_path)
    commit(storage, series, order)
    assert storage.get("latest") == name_of(storage, series, 200).encode()


def test_a_missing_file_stops_the_commit(storage: Storage, series: Series, tmp_path: Path) -> None:
    """Prior art: a commit counted marker files, and never looked at what they stood for."""
    entries = write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    lost = next(path for path in storage.files("") if path.endswith("shared.safetensors"))
    storage.remove(lost)
    with pytest.raises(RejectedError, match=r"shared.safetensors is missing.*shared between nodes"):
        commit(storage, series, order_for(series, V1, "a1", entries))
    assert list_committed(storage, series) == []


def test_a_file_of_another_size_stops_the_commit(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    entries = write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    path = next(path for path in storage.files("") if path.endswith("shared.safetensors"))
    storage.put(path, b"short")
    with pytest.raises(RejectedError, match="has 5 bytes instead of 50000"):
        commit(storage, series, order_for(series, V1, "a1", entries))


def test_what_does_not_belong_to_the_checkpoint_is_not_in_it(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """A try that was larger, or a writer that was replaced, may have left files."""
    entries = write_state(storage, series, V1, make_state(1, ranks=3), "a1", tmp_path)
    kept = tuple(entry for entry in entries if entry.part != "rank-00002")
    commit(storage, series, order_for(series, V1, "a1", kept))
    (committed,) = list_committed(storage, series)
    assert quick_problems(storage, committed) == []


def test_a_step_can_be_saved_twice(storage: Storage, series: Series, tmp_path: Path) -> None:
    """Prior art: saving a step again removed the old directory before the new one was there."""
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    for number, version in ((2, V2), (3, Version(3, 100)), (4, Version(7, 100))):
        state = make_state(number, size=50_000 - number)
        save(storage, series, version, state, f"a{number}", tmp_path)
        (committed,) = list_committed(storage, series)
        assert committed.manifest.attempt == f"a{number}"
        assert load(storage, series, version, tmp_path) == state
        assert storage.get("latest") == committed.name.encode()
        assert len(storage.folders("")) == 1


def test_only_an_older_version_is_replaced(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """A version names one state: who stores it again has nothing to add."""
    state = make_state(2)
    save(storage, series, V2, state, "a1", tmp_path)
    before = storage.files(name_of(storage, series, 100))
    save(storage, series, V2, make_state(3), "a2", tmp_path)
    with pytest.raises(RejectedError, match=r"lineage 1 is not committed.* newer, of lineage 2"):
        save(storage, series, V1, make_state(4), "a3", tmp_path)
    (committed,) = list_committed(storage, series)
    assert committed.manifest.attempt == "a1"
    assert storage.files(committed.name) == before
    assert load(storage, series, V2, tmp_path) == state
    assert storage.get("latest") == committed.name.encode()


def test_the_old_one_is_whole_until_the_new_one_is_committed(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    state = make_state(1)
    save(storage, series, V1, state, "a1", tmp_path)
    write_state(storage, series, V2, make_state(2), "a2", tmp_path)
    assert load(storage, series, V1, tmp_path) == state


def test_a_straggler_of_an_older_try_spoils_nothing(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """A node that everybody gave up writes on, after another try of the step was committed."""
    stale, state = make_state(1), make_state(2)
    write_state(storage, series, V1, {SHARED: stale[SHARED]}, "a1", tmp_path)
    abandon(storage, "a1")
    save(storage, series, V2, state, "a2", tmp_path)
    write_state(storage, series, V1, {SHARED: stale[SHARED]}, "a1", tmp_path)
    assert load(storage, series, V2, tmp_path) == state
    (committed,) = list_committed(storage, series)
    assert verify_checkpoint(storage, committed).is_whole


def test_the_newest_is_by_lineage_then_step(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """After a rollback an older step of the new world is newer than a later step of the old one."""
    for number, version in enumerate([Version(1, 200), Version(1, 300), Version(2, 250)]):
        save(storage, series, version, make_state(number), f"a{number}", tmp_path)
    assert steps(storage, series) == [250, 300, 200]
    assert storage.get("latest") == name_of(storage, series, 250).encode()


def test_foreign_things_are_passed_over_and_broken_ones_reported(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    save(storage, series, Version(1, 200), make_state(2), "a2", tmp_path)
    make(storage, "notes.txt", b"mine")
    make(storage, "runs/events", b"mine")
    make(storage, "other/manifest.json", b'{"format": "of somebody else"}')
    path = f"{name_of(storage, series, 200)}/{MANIFEST}"
    manifest = storage.get(path)
    assert manifest is not None
    storage.put(path, manifest.replace(b'"step": 200', b'"step": 201'))
    said: list[str] = []
    assert [one.version for one in list_committed(storage, series, said.append)] == [V1]
    assert any(series.name(200) in line and "checksum" in line for line in said)
    # What is not called as a checkpoint of the series is not even read.
    assert not any("other/manifest.json" in line for line in said)
    list_committed(storage, report=said.append)
    assert any("other/manifest.json" in line for line in said)


def test_a_damaged_part_is_found_when_it_is_read(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """Prior art: there were no digests, so a damaged file was loaded."""
    state = make_state(1)
    save(storage, series, V1, state, "a1", tmp_path)
    committed = find_committed(storage, series, V1)
    path = f"{committed.name}/shared.safetensors"
    content = bytearray(state[SHARED]["shared.safetensors"])
    content[12345] ^= 1
    storage.put(path, bytes(content))
    with pytest.raises(StateError, match=r"shared.safetensors is damaged: its digest is"):
        load_files(storage, series, committed, SHARED, tmp_path)
    assert load_files(storage, series, committed, "rank-00001", tmp_path) == state["rank-00001"]
    storage.remove(path)
    with pytest.raises(StateError, match=r"shared.safetensors is missing"):
        load_files(storage, series, committed, SHARED, tmp_path)


def test_a_version_that_is_not_there_is_said(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    with pytest.raises(StateError, match=r"no checkpoint of step 100 \(lineage 2\)"):
        find_committed(storage, series, V2)


# ---- retention -----------------------------------------------------------------------------------


def saved_steps(storage: Storage, series: Series, numbers: range, scratch: Path) -> None:
    for step in numbers:
        save(storage, series, Version(1, step), make_state(1, size=100), f"a{step}", scratch)


def test_retention_works_across_restarts(storage: Storage, series: Series, tmp_path: Path) -> None:
    """Prior art: its history was in memory, so with a restart after every 2 saves all 6 stayed."""
    rules = Series(series.directory, keep_last=3)
    for step in range(1, 7):
        again = open_storage(series.directory)
        saved_steps(again, rules, range(step, step + 1), tmp_path)
        apply_retention(again, rules)
    assert steps(storage, rules) == [6, 5, 4]
    assert len(storage.folders("")) == 3


def test_steps_at_an_interval_are_kept_beside_the_newest(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    rules = Series(series.directory, keep_last=2, keep_every=4)
    saved_steps(storage, rules, range(1, 8), tmp_path)
    assert apply_retention(storage, rules) == [1, 2, 3, 5]
    assert steps(storage, rules) == [7, 6, 4]


def test_nothing_is_removed_while_the_newest_is_damaged(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """Prior art: older checkpoints were removed without a look at the newer one."""
    rules = Series(series.directory, keep_last=1)
    saved_steps(storage, rules, range(1, 4), tmp_path)
    storage.remove(f"{name_of(storage, series, 3)}/shared.safetensors")
    with pytest.raises(RejectedError, match=r"newest checkpoint is damaged.*missing"):
        apply_retention(storage, rules)
    assert steps(storage, rules) == [3, 2, 1]


def test_a_damaged_one_does_not_count_as_kept(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    rules = Series(series.directory, keep_last=2)
    saved_steps(storage, rules, range(1, 5), tmp_path)
    storage.remove(f"{name_of(storage, series, 3)}/shared.safetensors")
    assert apply_retention(storage, rules) == [1]
    assert steps(storage, rules) == [4, 3, 2]


def test_retention_touches_nothing_outside_its_layout(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    """Prior art: a save removed the parent directory of the given path, all of it."""
    rules = Series(series.directory, pattern="global_step{step}", keep_last=1)
    others = Series(series.directory)
    save(storage, others, Version(0, 1), make_state(1, size=10), "b1", tmp_path)
    for path in ("global_step0/weights.pt", "notes.txt", "runs/x", "global_step99x/y"):
        make(storage, path, b"mine")
    before = storage.files("")
    saved_steps(storage, rules, range(1, 4), tmp_path)
    assert apply_retention(storage, rules) == [1, 2]
    after = storage.files("")
    assert {
        path: size for path, size in before.items() if path != "latest"
    }.items() <= after.items()
    assert storage.get("latest") == name_of(storage, rules, 3).encode()


def test_steps_can_be_removed_but_not_the_newest(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    saved_steps(storage, series, range(1, 5), tmp_path)
    assert remove_steps(storage, series, {1, 3, 4, 9}) == [1, 3]
    assert steps(storage, series) == [4, 2]
    assert remove_steps(storage, series, {4}, newest_too=True) == [4]
    assert storage.get("latest") == name_of(storage, series, 2).encode()


def test_leftovers_go_when_nobody_needs_them(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    write_state(storage, series, Version(1, 200), make_state(2), "dead", tmp_path)
    write_state(storage, series, Version(1, 300), make_state(3), "alive", tmp_path)
    assert clean_leftovers(storage, {"alive"}) == []  # Too young.
    clean_leftovers(storage, {"alive"}, older_than_s=-60)
    left = storage.files("")
    assert not any("dead" in path or series.name(200) in path for path in left)
    assert any("alive" in path for path in left)
    assert any(path.endswith("rank-00001.json") and "100" not in path for path in left)
    assert steps(storage, series) == [100]
    assert load(storage, series, V1, tmp_path) == make_state(1)


def test_an_abandoned_attempt_leaves_no_bytes(
    storage: Storage, series: Series, tmp_path: Path
) -> None:
    write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    abandon(storage, "a1")
    assert sum(storage.files("").values()) < 100


# ---- names, slots, manifests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "tracker", "text", "name", "content"),
    [
        ("global_step{step}", "latest", "{name}", "global_step100", b"global_step100"),
        ("iter_{step:07d}", "latest_checkpointed_iteration.txt", "{step}", "iter_0000100", b"100"),
        ("checkpoint-{step}", "", "", "checkpoint-100", None),
    ],
)
def test_names_are_those_that_frameworks_look_for(
    tmp_path: Path, pattern: str, tracker: str, text: str, name: str, content: bytes | None
) -> None:
    series = Series(f"{tmp_path}/c", pattern=pattern, tracker=tracker, tracker_text=text)
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    assert storage.folders("") == [name]
    assert storage.get(tracker or "latest") == content


@pytest.mark.parametrize("pattern", ["../x-{step}", "a/{step}", ".hidden-{step}", "x~{step}"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, pattern: str) -> None:
    series = Series(f"{tmp_path}/c", pattern=pattern)
    with pytest.raises(RejectedError, match="cannot be called"):
        save(open_storage(series.directory), series, V1, make_state(1), "a1", tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", MANIFEST])
def test_a_file_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    series = Series(f"{tmp_path}/c")
    state = {SHARED: {name: b"x"}}
    with pytest.raises(RejectedError, match="cannot be called"):
        write_state(open_storage(series.directory), series, V1, state, "a1", tmp_path)


def test_a_foreign_directory_of_the_name_is_set_aside_not_removed(tmp_path: Path) -> None:
    series = Series(f"{tmp_path}/c", pattern="checkpoint-{step}")
    storage = open_storage(series.directory)
    make(storage, "checkpoint-100/trainer_state.json", b"mine")
    (note,) = save(storage, series, V1, make_state(1), "a1", tmp_path)
    assert "is no checkpoint of Holdfast" in note
    assert storage.get("checkpoint-100.aside-a1/trainer_state.json") == b"mine"
    assert load(storage, series, V1, tmp_path) == make_state(1)


def test_an_unsealed_slot_is_not_stored(tmp_path: Path) -> None:
    series = Series(f"{tmp_path}/c")
    with fill_slot(tmp_path / "slot", series, V1, SHARED, {"x": b"1"}) as slot:
        slot.begin(V2)
        with pytest.raises(StateError, match="not sealed"):
            write_part(open_storage(series.directory), series, "a1", slot)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    series = Series(f"{tmp_path}/c")
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    raw = storage.get(f"{series.name(100)}/{MANIFEST}")
    assert raw is not None
    assert encode_manifest(decode_manifest(raw, "x")) == raw
    for position in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            with pytest.raises(StateError):
                decode_manifest(bytes(flipped), "x")


def test_a_newer_format_is_said(tmp_path: Path) -> None:
    series = Series(f"{tmp_path}/c")
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    raw = storage.get(f"{series.name(100)}/{MANIFEST}")
    assert raw is not None
    newer = raw.replace(b'"format_version": 1', b'"format_version": 2')
    with pytest.raises(StateError, match=r"format version 2; this Holdfast reads up to 1"):
        decode_manifest(newer, "x")


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """A byte in every hundredth of every file, and every missing and extra file."""
    series = Series(f"{tmp_path}/c")
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1, size=20_000), "a1", tmp_path)
    (committed,) = list_committed(storage, series)
    folder = Path(series.directory) / committed.name
    for file in committed.manifest.files:
        path = folder / file.name
        good = path.read_bytes()
        for hundredth in range(100):
            position = hundredth * len(good) // 100
            with path.open("r+b") as opened:
                opened.seek(position)
                opened.write(bytes([good[position] ^ 0x10]))
            problems = verify_checkpoint(storage, committed).problems
            assert len(problems) == 1
            assert file.name in problems[0]
            path.write_bytes(good)
        path.unlink()
        assert f"{path} is missing" in verify_checkpoint(storage, committed).problems
        path.write_bytes(good)
    storage.put(f"{committed.name}/extra", b"x")
    (problem,) = verify_checkpoint(storage, committed).problems
    assert "extra is not in the manifest" in problem


def test_hidden_things_are_no_checkpoints(tmp_path: Path) -> None:
    series = Series(f"{tmp_path}/c")
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    Path(series.directory, series.name(100)).rename(Path(series.directory, HIDDEN, "x"))
    assert list_committed(storage, series) == []
    assert list_committed(storage) == []

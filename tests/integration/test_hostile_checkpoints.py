# SPDX-License-Identifier: Apache-2.0
"""`holdfast ckpt` on directories that somebody else has prepared, or that are damaged.

Whatever stands in them: every verb ends with an exit code and words, and changes nothing outside.
"""

import copy
import io
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from crc32c import crc32c
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.manifest import decode_manifest
from holdfast.checkpoint.storage import open_storage
from holdfast.cli import main
from holdfast.model.checkpoint import Series, filled
from holdfast.model.errors import HoldfastError, RejectedError, StateError, UsageError
from holdfast.torch import STORAGE, Checkpointer
from holdfast.torch.dcp import DcpWriter

SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED") or random.SystemRandom().randrange(10**9))
ROUNDS = int(os.environ.get("HOLDFAST_FUZZ_ROUNDS") or 60)
OWN = "# the user's own\n"

VERBS = (
    ("ls",),
    ("ls", "--json"),
    ("show",),
    ("show", "--json"),
    ("show", "7"),
    ("verify",),
    ("verify", "--json"),
    ("export", "--to", "{out}"),
    ("export", "7", "--to", "{out}", "--format", "safetensors"),
    ("export", "8", "--to", "{out}", "--format", "torch"),
    ("rm", "7", "--yes"),
    ("rm", "7", "8", "--yes", "--force"),
)

HOSTILE: tuple[Any, ...] = (
    *("", ".", "..", "/", "../home/.profile", "/etc/x", "a/../../home/.profile", "./x", "a//b"),
    *("a\0b", "a\nb", "\x1b[2J", "\u202egnp", "\ud800", "x" * 300, "~", ".holdfast", "*", "[a-z]*"),
    *("{name.__class__}", "{step.__class__.__mro__}", "{step:>999999999d}", "{0}", "{", "{name}"),
    *("step-{step:010d}", "manifest.json", "manifest.json/x", "latest", "home", "touch owned\n"),
    *("zz", "0x12ab34", "DEADBEEF", "1" * 5000, "rank-99999999", "rank-00000", "shared", "rank--1"),
    *(-1, 0, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 0.5, 1e308, None, True, [], {}, [[]]),
    *({"$": 1}, {"tensor": 10**9}, {"$tensor": -1}, [1, 2, 3], ["x"] * 3, "complex", "float128"),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good checkpoints, a plain one with values of rarer kinds and a sharded one."""
    top = tmp_path_factory.mktemp("original")
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    extra = {"a": (1, 2.5, float("nan")), 3: {"b", "c"}, "d": torch.Size((1, 2)), "e": b"bytes"}
    with Checkpointer(top / "saves") as checkpointer:
        checkpointer.save(7, model, optimizer, extra=extra, to=STORAGE)
        assert checkpointer.wait(120.0) == 7
        state = {"model": model.state_dict(), "extra": {"lr": 0.5, "list": [1, {"x": "y"}]}}
        dcp_save(state, storage_writer=DcpWriter(checkpointer, 8, STORAGE), no_dist=True)
        assert checkpointer.wait(120.0) == 8
    return top / "saves"


@pytest.fixture
def saves(tmp_path: Path, original: Path) -> Path:
    """A copy of the two beside a file of the user's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".profile").write_text(OWN)
    shutil.copytree(original, tmp_path / "saves")
    return tmp_path / "saves"


def ckpt(*words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["ckpt", *words])
    return code, out.getvalue() + err.getvalue()


def run_all(saves: Path) -> None:
    """Every verb, the removing ones last; what they may not do is found at once."""
    top = saves.parent
    for number, verb in enumerate(VERBS):
        target = top / f"out-{number}"
        words = [word.replace("{out}", str(target)) for word in verb[1:]]
        code, said = ckpt(verb[0], str(saves), *words)
        assert code in (0, 1, 2), (verb, said)
        assert said.replace("\n", "").isprintable(), (verb, said)
        assert code == 0 or said, verb
        for path in sorted(target.rglob("*")):
            assert not path.is_symlink(), (verb, path)
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        assert sorted(path.name for path in top.iterdir()) == ["home", "saves"], verb
        assert [path.name for path in (top / "home").iterdir()] == [".profile"], verb
        assert (top / "home" / ".profile").read_text() == OWN, verb


# ---- what is done to them ------------------------------------------------------------------------


def signed(fields: Any) -> bytes:
    """A manifest of these fields with the right checksum, which anybody can compute."""
    fields = {name: value for name, value in fields.items() if name != "checksum"}
    body = msgspec.json.format(msgspec.json.encode(fields), indent=1)
    head = body.removesuffix(b"\n}") + b',\n "checksum": "'
    return head + f"{crc32c(head):08x}".encode() + b'"\n}\n'


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value, as its container and its key."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def spoil(value: Any, chance: random.Random) -> None:
    """Change one place: another value, none, or what stood elsewhere."""
    found = list(places(value))
    container, key = chance.choice(found)
    match chance.randrange(4):
        case 0 if isinstance(container, dict):
            del container[key]
        case 1:
            other, elsewhere = chance.choice(found)
            container[key] = copy.deepcopy(other[elsewhere])
        case _:
            container[key] = chance.choice(HOSTILE)


def written(value: Any) -> bytes:
    """JSON with whatever is in it; msgspec would refuse half a letter."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError):
        return b"{}"


def spoil_manifest(saves: Path, chance: random.Random) -> None:
    """Mostly one that is believed all the same: only that can do harm."""
    path = manifest_of(saves, chance)
    original = path.read_bytes()
    for _ in range(chance.choice((1, 100, 100))):
        fields = msgspec.json.decode(original)
        for _ in range(chance.choice((1, 1, 2, 5))):
            spoil(fields, chance)
        if not fields or written(fields) == b"{}":
            continue
        path.write_bytes(signed(fields))
        with suppress(StateError):
            decode_manifest(path.read_bytes(), "it")
            return


def spoil_bytes(saves: Path, chance: random.Random) -> None:
    path = chance.choice([path for path in sorted(saves.rglob("*")) if path.is_file()])
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 8))):
        if content:
            content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content[: chance.choice((len(content), len(content) // 2, 0))])


def spoil_index(saves: Path, chance: random.Random) -> None:
    """An index that lies about its tensors, in a checkpoint whose digests are all right."""
    manifest = manifest_of(saves, chance)
    path = chance.choice(sorted({*manifest.parent.glob("*.json")} - {manifest}))
    index = msgspec.json.decode(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 5))):
        spoil(index, chance)
    path.write_bytes(chance.choice((written(index), b"[" * 5000, b"[]", b"\xff")))
    sign_files(manifest)


def sign_files(manifest: Path) -> None:
    """Let the manifest say what is there."""
    fields = msgspec.json.decode(manifest.read_bytes())
    for file in fields["files"]:
        content = (manifest.parent / file["name"]).read_bytes()
        file["size"], file["digest"] = len(content), f"{digest_of(content):08x}"
    manifest.write_bytes(signed(fields))


def spoil_tree(saves: Path, chance: random.Random) -> None:
    """Something else where a file or a folder was."""
    path = chance.choice(sorted(saves.rglob("*")))
    if not path.exists() or path.is_symlink():
        return
    aside = saves / f"aside-{chance.randrange(10**6)}"
    path.rename(aside)
    match chance.randrange(6):
        case 0:
            path.symlink_to(saves.parent / "home" / ".profile")
        case 1:
            path.symlink_to(saves.parent / "home")
        case 2:
            path.symlink_to(chance.choice((Path("/dev/zero"), aside, path)))
        case 3:
            os.mkfifo(path)
        case 4:
            path.mkdir()
        case _:
            listening = socket.socket(socket.AF_UNIX)
            before = Path.cwd()
            os.chdir(path.parent)
            listening.bind(path.name[:100])
            os.chdir(before)
            listening.close()


def spoil_names(saves: Path, chance: random.Random) -> None:
    """Folders with names that no save of ours makes."""
    name = chance.choice((b"\xff\xfe", b"a\nb", b"\x1b[31m", b"step-9", b"step-" + b"1" * 240))
    (step,) = chance.sample(sorted(saves.glob("step-*")), 1)
    with_links = step.is_symlink() or not step.is_dir()
    if not with_links:
        shutil.copytree(os.fsencode(step), os.fsencode(saves) + b"/" + name, symlinks=True)


def manifest_of(saves: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(saves.glob("step-*/manifest.json")))


SPOILS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(spoil_manifest, spoil_manifest, spoil_index, spoil_index, spoil_bytes, spoil_tree),
    spoil_names,
)


def test_no_directory_makes_a_command_crash_or_write_elsewhere(
    tmp_path: Path, original: Path
) -> None:
    """`HOLDFAST_FUZZ_SEED=N` repeats it; rounds are independent of each other."""
    print(f"seed {SEED}, {ROUNDS} rounds")
    for number in range(ROUNDS):
        chance = random.Random(f"{SEED} {number}")
        top = tmp_path / str(number)
        (top / "home").mkdir(parents=True)
        (top / "home" / ".profile").write_text(OWN)
        saves = top / "saves"
        shutil.copytree(original, saves)
        chosen = chance.choice(SPOILS)
        print(f"round {number}: {chosen.__name__}")
        chosen(saves, chance)
        run_all(saves)
        shutil.rmtree(top)


# ---- one by one ----------------------------------------------------------------------------------


def change_manifest(saves: Path, **fields: Any) -> None:
    for path in saves.glob("step-*/manifest.json"):
        path.write_bytes(signed({**msgspec.json.decode(path.read_bytes()), **fields}))


def test_a_tracker_outside_is_not_written(saves: Path) -> None:
    change_manifest(saves, tracker="../home/.profile", tracker_text="touch owned\n")
    code, said = ckpt("rm", str(saves), "7", "--yes")
    assert (code, "'../home/.profile'" in said) == (1, True)
    run_all(saves)


def test_only_a_tracker_is_taken_for_the_tracker(saves: Path) -> None:
    """A file right in the directory may be the user's too."""
    (saves / "notes").write_text(OWN)
    change_manifest(saves, tracker="notes")
    assert ckpt("rm", str(saves), "7", "--yes")[0] == 0
    assert ckpt("rm", str(saves), "8", "--yes", "--force")[0] == 0
    assert (saves / "notes").read_text() == OWN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 2**63),
        ("lineage", -1),
        ("world_size", 0),
        ("world_size", 2**40),
        ("chunk", 1),
        ("attempt", "../.."),
        ("attempt", "a/b"),
        ("created", "\x1b[2J"),
        ("pattern", "../step-{step}"),
        ("pattern", "{step.__class__}"),
        ("pattern", "a/{step}"),
        ("pattern", "step-{step}*"),
        ("tracker", ".."),
        ("tracker", ".bashrc"),
        ("tracker", "a/b"),
        ("tracker_text", "touch owned"),
        ("tracker_text", "{name.__class__}"),
    ],
)
def test_a_manifest_is_believed_in_nothing_that_cannot_be(
    saves: Path, field: str, value: object
) -> None:
    path = saves / "step-0000000007" / "manifest.json"
    fields = msgspec.json.decode(path.read_bytes())
    assert decode_manifest(signed(fields), "it").step == 7
    with pytest.raises(StateError, match="it is not"):
        decode_manifest(signed({**fields, field: value}), "it")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("name", name)
            for name in ("../x", "/x", "", "a//b", "a\nb", "manifest.json", "x" * 300)
        ),
        *(("digest", digest) for digest in ("zz", "", "0x123456", "1234567", "-1234567")),
        *(("size", size) for size in (-1, 2**63)),
        *(("part", part) for part in ("", "../x", "rank-00001", "rank-1")),
    ],
)
def test_a_manifest_names_no_file_that_cannot_be(saves: Path, field: str, value: object) -> None:
    path = saves / "step-0000000007" / "manifest.json"
    fields = msgspec.json.decode(path.read_bytes())
    files = [{**fields["files"][0], field: value}, *fields["files"][1:]]
    with pytest.raises(StateError, match="it is not to be believed"):
        decode_manifest(signed({**fields, "files": files}), "it")


def test_the_same_file_twice_is_refused(saves: Path) -> None:
    path = saves / "step-0000000007" / "manifest.json"
    fields = msgspec.json.decode(path.read_bytes())
    with pytest.raises(StateError, match="two files"):
        decode_manifest(signed({**fields, "files": fields["files"] * 2}), "it")


def test_names_are_filled_in_as_they_were(tmp_path: Path) -> None:
    for pattern in ("step-{step:010d}", "iter_{step:07d}", "{step}", "checkpoint-{step:d}"):
        for step in (0, 7, 10**12):
            assert Series("/x", pattern=pattern).name(step) == pattern.format(step=step)
    assert filled("{name} at {step}\n", step=3, name="{step}") == "{step} at 3\n"
    for pattern in ("{step.real}", "{name!r}", "{step:>9}", "{0}"):
        assert filled(pattern, step=3, name="x") == pattern
        with pytest.raises(UsageError):
            Checkpointer(tmp_path, pattern=pattern)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", "", "a//b", "link/x", "link/deep/x"])
def test_a_storage_stays_in_its_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "inside" / "a").mkdir(parents=True)
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "x").write_text(OWN)
    (tmp_path / "x").write_text(OWN)
    storage = open_storage(str(tmp_path / "inside"))
    calls: tuple[Callable[[], object], ...] = (
        lambda: storage.put(path, b"1"),
        lambda: storage.write(path, memoryview(b"1"), 1),
        lambda: storage.get(path),
        lambda: storage.open(path),
        lambda: storage.remove(path),
        lambda: storage.rename("a", path),
        lambda: storage.rename(path, "b"),
        lambda: storage.exchange("a", path),
    )
    for call in calls:
        with pytest.raises(RejectedError):
            call()
    assert (tmp_path / "x").read_text() == (tmp_path / "outside" / "x").read_text() == OWN
    assert sorted(path.name for path in (tmp_path / "inside").iterdir()) == ["a", "link"]


@pytest.mark.timeout(60)
def test_a_pipe_or_a_link_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "endless").symlink_to("/dev/zero")
    storage = open_storage(str(tmp_path))
    for name in ("pipe", "link", "endless"):
        with pytest.raises(HoldfastError, match="not a"):
            storage.get(name)
        with pytest.raises(HoldfastError, match="not a"):
            storage.open(name)


class Mine:
    """Says so when a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo owned > owned",)


def test_an_export_runs_nothing(
    saves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saves / "step-0000000008"
    owning = io.BytesIO()
    torch.save(Mine(), owning)
    (folder / ".metadata").write_bytes(owning.getvalue())
    sign_files(folder / "manifest.json")
    assert ckpt("export", str(saves), "8", "--to", "good.pt", "--format", "torch")[0] == 0
    found = torch.load("good.pt", weights_only=True)
    assert found["extra"] == {"lr": 0.5, "list": [1, {"x": "y"}]}
    assert found["model"].keys() == {"weight", "bias"}

    index = msgspec.json.decode((folder / "shards.json").read_bytes())
    value = next(iter(index["values"].values()))  # Rank, offset and length.
    data = folder / "__0_0.distcp"
    value[1:] = data.stat().st_size, len(owning.getvalue())
    data.write_bytes(data.read_bytes() + owning.getvalue())
    (folder / "shards.json").write_bytes(msgspec.json.encode(index))
    sign_files(folder / "manifest.json")
    code, said = ckpt("export", str(saves), "8", "--to", "bad.pt", "--format", "torch")
    assert (code, "running what stands in the checkpoint" in said) == (2, True)
    assert not (tmp_path / "owned").exists()

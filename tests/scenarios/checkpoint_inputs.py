# SPDX-License-Identifier: Apache-2.0
"""Scenario inputs about checkpoints: a line's words become a call to the ledger.

A version is LINEAGE.STEP, a holding LINEAGE.STEP:PART. `shape=4` has four rank parts, `shape=4s` a
shared part as well. "shared" and numbers name parts. There is one directory.
"""

from holdfast.model.checkpoint import (
    NONE,
    SHARED,
    FileEntry,
    Holding,
    Shape,
    Stored,
    Version,
    rank_part,
)
from holdfast.protocol import checkpoints as c

DIRECTORY = "/ckpt"
Words = dict[str, str]


def call(name: str, words: Words) -> c.CheckpointCall:
    """The call that a line is; KeyError if it is none."""
    shape = _shape(words.pop("shape", "2"))
    match name:
        case "restore":
            return _restore(words, shape)
        case "persist":
            version, parts = _version(words.pop("version")), _parts(words)
            return c.PersistAsk(DIRECTORY, int(words.pop("round", 1)), version, shape, parts)
        case "persisted":
            version, parts = _version(words.pop("version")), _parts(words)
            problem, attempt = words.pop("problem", ""), words.pop("attempt")
            files = () if problem else tuple(FileEntry(part, 1, 1) for part in parts)
            return c.PartsPersisted(DIRECTORY, version, shape, attempt, parts, files, problem)
        case "committed":
            version, attempt = _version(words.pop("version")), words.pop("attempt")
            return c.CommitDone(DIRECTORY, version, attempt, words.pop("problem", ""))
        case "inventory":
            return c.InventoryTaken(DIRECTORY, int(words.pop("number")), _held(words, shape))
        case "flush":
            return c.FlushAsk(DIRECTORY, _held(words, shape), NONE)
        case "replicated":
            version = _version(words.pop("version"))
            return c.Replicated(DIRECTORY, int(words.pop("round", 1)), version)
        case "copy_failed":
            version, problem = _version(words.pop("version")), words.pop("problem")
            peer, replicas = int(words.pop("peer", -1)), int(words.pop("replicas", 0))
            round_number = int(words.pop("round", 1))
            return c.CopyFailed(DIRECTORY, round_number, version, problem, peer, replicas)
    raise KeyError(name)


CALLS = (
    "restore",
    "persist",
    "persisted",
    "committed",
    "inventory",
    "flush",
    "replicated",
    "copy_failed",
)


def _restore(words: Words, shape: Shape) -> c.NodeRestore:
    stored = [_version(text) for text in words.pop("stored", "").split(",") if text]
    bad = [text.split(":") for text in words.pop("bad", "").split(",") if text]
    return c.NodeRestore(
        DIRECTORY,
        int(words.pop("round", 1)),
        _held(words, shape),
        tuple(Stored(version, shape) for version in stored),
        _version(words.pop("prepared", "")),
        _parts(words, "wants"),
        tuple(
            c.BadCopy(_version(version), _part(part), int(node), "its digest differs")
            for version, part, node in bad
        ),
        words.pop("fresh", "") == "1",
        breakpoint=words.pop("breakpoint", "") == "1",
        lineage=int(words.pop("lineage", -1)),
    )


def _version(text: str) -> Version:
    lineage, _, step = text.partition(".")
    return Version(int(lineage), int(step)) if text else NONE


def _shape(text: str) -> Shape:
    return Shape(int(text.removesuffix("s")), text.endswith("s"))


def _part(text: str) -> str:
    return rank_part(int(text)) if text.isdigit() else text


def _parts(words: Words, key: str = "parts") -> tuple[str, ...]:
    return tuple(_part(text) for text in words.pop(key, SHARED).split(",") if text)


def _held(words: Words, shape: Shape) -> tuple[Holding, ...]:
    texts = [text.split(":") for text in words.pop("held", "").split(",") if text]
    return tuple(Holding(_version(version), shape, _part(part), 4096, 7) for version, part in texts)

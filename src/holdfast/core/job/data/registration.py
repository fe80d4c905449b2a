# SPDX-License-Identifier: Apache-2.0
"""What a dataset must be like to be registered, and whether two descriptions are of the same one.

The worker that registers first decides; every other worker has to mean the same dataset. A mistake
is told in one sentence at that moment, never found out in the middle of an epoch.
"""

import zlib

import msgspec

from holdfast.core.job import records as rec
from holdfast.core.job.data.cutting import Cutter
from holdfast.core.kernel import Record
from holdfast.model.dataset import (
    BY_SAMPLE,
    BY_SHARD,
    EVALUATE,
    IN_ORDER,
    LINES,
    LISTED,
    PREDICT,
    RANGE,
    STREAM,
    TRAIN,
    Dataset,
    Extent,
)
from holdfast.protocol.data import ShardsAdd, ShardsGrown

NAME_MAX = 200
EXTENTS_MAX = 10_000
"""Every worker sends them when it opens the dataset; with more files, listed shards are used."""

LISTED_MAX = 1_000_000
"""The master keeps their names for the life of the job."""

NUMBER_MAX = 1 << 62
"""Sizes and offsets stay within the signed 64 bits that readers use."""

_SHUFFLES = {
    RANGE: (IN_ORDER, BY_SHARD, BY_SAMPLE),
    LINES: (IN_ORDER, BY_SHARD),
    STREAM: (IN_ORDER,),
    LISTED: (IN_ORDER,),
}


def mistake(dataset: Dataset) -> str:
    """Why the dataset cannot be registered, in one sentence; empty if it can."""
    name = dataset.name
    if not 0 < len(name) <= NAME_MAX or not name.isprintable():
        return f"the name of a dataset has 1 to {NAME_MAX} printable characters, not {name[:20]!r}"
    what = _wrong_choice(dataset) or _wrong_number(dataset) or _wrong_extents(dataset)
    return f"dataset {name!r} {what}" if what else ""


def _wrong_choice(dataset: Dataset) -> str:
    if dataset.kind not in _SHUFFLES:
        return f"is of kind {dataset.kind!r}; known are {', '.join(_SHUFFLES)}"
    allowed = _SHUFFLES[dataset.kind]
    if dataset.shuffle not in allowed:
        known = " or ".join(repr(shuffle) for shuffle in allowed)
        return f"of kind {dataset.kind} cannot be shuffled by {dataset.shuffle!r}, only {known}"
    if dataset.grows and dataset.kind != STREAM:
        return f"of kind {dataset.kind} cannot grow, only a stream can"
    if dataset.task not in (TRAIN, EVALUATE, PREDICT):
        return f"is for {dataset.task!r}; known are {TRAIN}, {EVALUATE} and {PREDICT}"
    return ""


def _wrong_number(dataset: Dataset) -> str:
    if not 1 <= dataset.shard_size < NUMBER_MAX:
        return f"has shards of {dataset.shard_size}; a shard has at least 1"
    if not 0 <= dataset.size < NUMBER_MAX:
        return f"has {dataset.size} records; that must be 0 or more"
    if not 0 <= dataset.epochs < NUMBER_MAX:
        return f"has {dataset.epochs} epochs; that must be 1 or more, or 0 for no end"
    if dataset.kind == STREAM and dataset.epochs != 1:
        return f"is a stream and has {dataset.epochs} epochs; a stream has one"
    if not 1 <= dataset.attempts < NUMBER_MAX:
        return f"allows {dataset.attempts} attempts of a piece; that must be 1 or more"
    return ""


def _wrong_extents(dataset: Dataset) -> str:
    extents, has_extents = dataset.extents, dataset.kind in (LINES, STREAM)
    word = "partitions" if dataset.kind == STREAM else "files"
    if has_extents != bool(extents):
        return f"of kind {dataset.kind} has {len(extents)} {word}"
    if len(extents) > EXTENTS_MAX:
        return f"has {len(extents)} {word}, at most {EXTENTS_MAX} are allowed; use listed shards"
    lowest = -1 if dataset.kind == STREAM else 0
    for extent in extents:
        begins = range(NUMBER_MAX) if dataset.kind == STREAM else (0,)
        if not lowest <= extent.size < NUMBER_MAX or extent.begin not in begins:
            return f"has {extent.name!r} with {extent.size} from {extent.begin} on"
    if dataset.epochs == 0 and not _has_samples(dataset):
        return "is empty and has no end of epochs: nobody would ever get a sample"
    return ""


def _has_samples(dataset: Dataset) -> bool:
    if dataset.kind == LISTED:
        return True  # They are named later.
    return dataset.size > 0 or any(extent.size for extent in dataset.extents)


def difference(known: Dataset, given: Dataset) -> str:
    """The first parameter in which two descriptions of a dataset differ; empty if in none."""
    for field in Dataset.__struct_fields__:
        one, other = getattr(known, field), getattr(given, field)
        if one == other:
            continue
        if field == "extents":
            field, one, other = _extent_difference(one, other)
        return f"dataset {known.name!r} is registered with {field} {one}, not {other}"
    return ""


def _extent_difference(
    known: tuple[Extent, ...], given: tuple[Extent, ...]
) -> tuple[str, object, object]:
    for number, (one, other) in enumerate(zip(known, given, strict=False)):
        if one != other:
            return f"file or partition {number}", _extent(one), _extent(other)
    return "this many files or partitions:", len(known), len(given)


def _extent(extent: Extent) -> str:
    return f"{extent.name} ({extent.size} from {extent.begin} on)"


def addition(
    dataset: Dataset, cutter: Cutter, body: ShardsAdd | ShardsGrown
) -> tuple[Record | None, str]:
    """What this adds to a dataset, if anything, or why it cannot, in one sentence."""
    if isinstance(body, ShardsGrown):
        problem = _wrong_ends(dataset, body)
        is_news = not problem and cutter.has_more_with(body.ends)
        return (rec.StreamGrown(body.name, body.ends) if is_news else None), problem
    problem = _wrong_names(dataset, cutter, body)
    new = body.shards[cutter.named - body.first :]
    is_news = not problem and (bool(new) or body.is_last > cutter.is_listed)
    listed = rec.ShardsListed(body.name, cutter.named, new, body.is_last)
    return (listed if is_news else None), problem


def _wrong_names(dataset: Dataset, cutter: Cutter, body: ShardsAdd) -> str:
    """Why shards cannot be named like this, in one sentence; empty if they can."""
    name, named = dataset.name, cutter.named
    if dataset.kind != LISTED:
        return f"dataset {name!r} is of kind {dataset.kind}: its shards are not named"
    if not cutter.first_listed <= body.first <= named:
        return f"{named} shards of dataset {name!r} are named, these begin with {body.first}"
    for number, (key, size) in enumerate(body.shards, start=body.first):
        if not 1 <= size < NUMBER_MAX:
            return f"shard {key!r} of dataset {name!r} has {size} samples; it needs at least 1"
        if number < named and (known := cutter.listed[number - cutter.first_listed]) != (key, size):
            return f"shard {number} of dataset {name!r} is {known}, not {(key, size)}"
    total = body.first + len(body.shards)
    if cutter.is_listed and total > named:
        return f"dataset {name!r} has all its {named} shards: no more can be named"
    if total > LISTED_MAX:
        return f"dataset {name!r} would have {total} listed shards, at most {LISTED_MAX} can be"
    if body.is_last and total == 0 and dataset.epochs == 0:
        return f"dataset {name!r} is empty and has no end of epochs"
    return ""


def _wrong_ends(dataset: Dataset, body: ShardsGrown) -> str:
    """Why a stream cannot have grown like this, in one sentence; empty if it can."""
    if not dataset.grows:
        return f"dataset {dataset.name!r} is not a stream that grows"
    if len(body.ends) != len(dataset.extents):
        partitions = len(dataset.extents)
        return f"dataset {dataset.name!r} has {partitions} partitions, not {len(body.ends)}"
    for extent, end in zip(dataset.extents, body.ends, strict=True):
        if not 0 <= end < NUMBER_MAX:
            return f"partition {extent.name!r} of dataset {dataset.name!r} cannot end at {end}"
    return ""


def recipe(dataset: Dataset) -> str:
    """What decides how the dataset is cut, for people to read: kept with every position."""
    if dataset.kind == LISTED:
        return LISTED
    parts = [dataset.kind, f"shard_size={dataset.shard_size}"]
    if dataset.kind == RANGE:
        parts.append(f"size={dataset.size}")
    else:
        digest = zlib.crc32(msgspec.msgpack.encode(dataset.extents))
        parts.append(f"extents={len(dataset.extents)}:{digest:08x}")
    if dataset.shuffle != IN_ORDER:
        parts.append(f"shuffle={dataset.shuffle} seed={dataset.seed}")
    return " ".join(parts)

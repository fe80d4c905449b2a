# SPDX-License-Identifier: Apache-2.0
"""One value of every message about checkpoints; see samples.py."""

from holdfast.model.checkpoint import FileEntry, Holding, Series, Shape, Stored, Version
from holdfast.model.dataset import Piece, Position
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.data import Consumed, Mark

VERSION = Version(lineage=7, step=16777217)
SHAPE = Shape(world_size=4, shared=True)
DIRECTORY = "/ckpt"
HOLDING = Holding(VERSION, SHAPE, "rank-00003", length=1 << 33, digest=0xDEADBEEF, parity=False)
BLOCK = Holding(VERSION, SHAPE, "parity-1-of-0+4+x", length=4096, digest=-1, parity=True)
FILE = FileEntry("shared.safetensors", size=1 << 34, digest=0xFFFFFFFF)
SOURCE = c.Source(
    asked="rank-00003",
    part="rank-00001",
    kind="peer",
    node_id=5,
    address="[fd00::1]:29503",
    digest=3,
    length=1 << 33,
)

POSITION = Position(
    "train",
    epoch=1,
    cut=(1 << 40,),
    open=(Piece(epoch=1, extent=0, begin=5, end=10),),
    aside=(Piece(epoch=0, extent=2, begin=0, end=10),),
    listed=(("ü.tar", 1000),),
    first_listed=7,
    is_listed=True,
    recipe="range shard_size=10 size=100",
)
TALLY = c.Tally(
    saves=12,
    waited_s=0.5,
    step=16777217,
    age_s=0.1,
    written_bytes=1 << 40,
    written_s=99.5,
    restored={"memory": 2, "peer": 1},
    failed=3,
    failed_step=16777218,
    failed_why="no room for part shared",
)
CHECKPOINT_MESSAGES: tuple[m.AnyMessage, ...] = (
    c.SeriesOpen(
        series=Series(
            DIRECTORY,
            pattern="global_step{step}",
            tracker="latest",
            tracker_text="{name}",
            keep_last=3,
            keep_every=1000,
            replicas=1,
            replicate_every=10,
            parity=4,
            slots=3,
            breakpoint=False,
        ),
        local_rank=1,
        rank=3,
        world_size=4,
    ),
    c.SlotReserve(directory=DIRECTORY, part="shared", size=1 << 33),
    c.SlotAsk(
        directory=DIRECTORY,
        part="shared",
        step=0,
        size=1 << 33,
        untouched=("/dev/shm/slot.1",),
        persist=True,
    ),
    c.SlotGrant(path="/dev/shm/slot.0", lineage=7),
    c.SlotsReserved(paths=("/dev/shm/slot.0", "/dev/shm/slot.1")),
    c.SlotSealed(
        directory=DIRECTORY,
        part="shared",
        version=VERSION,
        shape=SHAPE,
        path="/dev/shm/slot.0",
        persist=True,
        waited_s=0.25,
        follows=True,
        marks=(Mark("train", term=2, consumed=(Consumed(lease=9, upto=1 << 40),)),),
        digest=0xDEADBEEF,
    ),
    c.SaveFailed(directory=DIRECTORY, step=16777217, why="no room for part shared"),
    c.RestoreAsk(
        directory=DIRECTORY,
        round=3,
        local_rank=1,
        prepared=VERSION,
        problem="the digest differs",
        tried=VERSION,
        fresh=True,
        step=40,
    ),
    c.PartsOpen(directory=DIRECTORY, version=VERSION, parts=("shared", "rank-00003")),
    c.PartsOpened(
        parts=(c.OpenedPart("rank-00003", "rank-00001", "/dev/shm/slot.1", "peer", 0xDEADBEEF),)
    ),
    c.PartsClose(directory=DIRECTORY, local_rank=1, bad=("shared",)),
    c.PersistWait(directory=DIRECTORY, timeout_s=600.0),
    c.PersistState(committed=VERSION, problem="the disk is full"),
    c.StepsRemove(directory=DIRECTORY, steps=(0, 16777217)),
    c.NodeRestore(
        directory=DIRECTORY,
        round=3,
        holdings=(HOLDING, BLOCK),
        stored=(Stored(VERSION, SHAPE, positions=(POSITION,), first_rank=1),),
        prepared=VERSION,
        wants=("shared", "rank-00003"),
        bad=(c.BadCopy(VERSION, "rank-00003", 5, "the digest differs"),),
        fresh=True,
        step=40,
        breakpoint=False,
        lineage=8,
    ),
    c.RestorePlan(
        version=VERSION,
        shape=SHAPE,
        go=True,
        lineage=8,
        sources=(SOURCE,),
        failures_per_s=0.001,
        notes=("rank-00003 is lost",),
        follows=True,
    ),
    c.PartsLocate(directory=DIRECTORY, version=VERSION, parts=("rank-00003",)),
    c.PartsLocated(sources=(SOURCE,)),
    c.PersistAsk(
        directory=DIRECTORY, round=3, version=VERSION, shape=SHAPE, parts=("shared", "rank-00003")
    ),
    c.PersistPlan(attempt="a1-3-2", parts=("rank-00003",)),
    c.PartsPersisted(
        directory=DIRECTORY,
        version=VERSION,
        shape=SHAPE,
        attempt="a1-3-2",
        parts=("rank-00003",),
        files=(FILE,),
        problem="the disk is full",
    ),
    c.CommitDone(
        directory=DIRECTORY, version=VERSION, attempt="a1-3-2", problem="read-only file system"
    ),
    c.InventoryTaken(
        directory=DIRECTORY,
        number=9,
        holdings=(HOLDING, BLOCK),
        writing=(c.Writing("f00d-3-1", ("rank-00003",)),),
    ),
    c.FlushAsk(directory=DIRECTORY, holdings=(HOLDING,), committed=VERSION),
    c.PeersAsk(round=3, replicas=2, parity=4),
    c.Peers(peers=(c.Peer(5, f"10.0.0.5:29503#{'ab' * 32}", first_rank=10, nproc=2),)),
    c.Replicated(directory=DIRECTORY, round=3, version=VERSION),
    c.CopyFailed(
        directory=DIRECTORY, round=3, version=VERSION, problem="no room", peer=5, replicas=2
    ),
    c.InventoryWanted(directory=DIRECTORY, number=9),
    c.PersistOrder(
        directory=DIRECTORY,
        version=VERSION,
        shape=SHAPE,
        attempt="a1-3-2",
        parts=("rank-00003",),
        reason="the world changed",
    ),
    c.CommitOrder(
        directory=DIRECTORY,
        version=VERSION,
        shape=SHAPE,
        attempt="a1-3-2",
        files=(FILE,),
        positions=(POSITION,),
    ),
    c.PartGet(
        directory=DIRECTORY,
        version=VERSION,
        part="rank-00003",
        parity=True,
        offset=1 << 32,
        size=1 << 33,
    ),
    c.PartBytes(holding=HOLDING, size=1 << 33, total=1 << 34),
    c.PartPut(
        directory=DIRECTORY,
        round=3,
        holding=HOLDING,
        total=1 << 34,
        meta_digest=4,
        block="parity-1-of-0+4+x",
        stripe_digest=5,
        safe=VERSION,
    ),
    c.PartWanted(offset=1 << 32),
)

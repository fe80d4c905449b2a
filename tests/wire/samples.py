# SPDX-License-Identifier: Apache-2.0
"""One value of every message and every record, whose bytes are kept beside this file.

A golden line may be added, never changed: an old peer or an old journal holds those very bytes.
"""

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.checkpoint import Shape, Version
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.world import Member, World
from holdfast.protocol import messages as m
from tests.wire.checkpoint_samples import CHECKPOINT_MESSAGES, POSITION, TALLY, VERSION
from tests.wire.data_samples import DATA_MESSAGES, DATA_RECORDS
from tests.wire.role_samples import ROLE_RECORDS

RULES = m.JobRules(
    min_nodes=2,
    max_nodes=4,
    node_unit=2,
    last_call_s=30.0,
    join_timeout_s=600.0,
    max_restarts=3,
)

FAILURE = m.FailureInfo(
    rank=3,
    local_rank=1,
    pid=4711,
    exit_code=None,
    signal=11,
    reason="error",
    message="was ended by SIGSEGV",
    traceback="Traceback: x",
    ago_s=0.25,
    last_step_ago_s=1.5,
    alike=8,
)

MESSAGES: tuple[m.AnyMessage, ...] = (
    m.Challenge(version=1, nonce=b"\x01" * 32),
    m.Proof(version=1, nonce=b"\x02" * 32, mac=b"\x03" * 32),
    m.Welcome(mac=b"\x04" * 32),
    m.Done(),
    m.Refused(kind="fenced", message="round 1 is over"),
    m.Value(value=b"\x00\xff"),
    m.Values(values=(b"a", b"")),
    m.Number(number=-7),
    m.Keys(keys=("a", "ü")),
    m.Attach(
        agent_key="k1",
        rules=RULES,
        nproc=2,
        host="10.0.0.1",
        store_port=29500,
        round=3,
        node_id=5,
        node_rank=1,
        incarnation=9,
        topology="s1",
        hosted_port=29502,
        cold=True,
        peer_port=29503,
        peer_certificate="ab" * 32,
        told=m.Told(journal="j1", life="m3", position=812),
        process="b00t/4026531836/17/4711",
        ended_key="k0",
        log_dir="/logs/train",
        grace_s=10.0,
    ),
    m.Attached(
        job="train",
        node_id=5,
        node_rank=1,
        incarnation=9,
        generation=12,
        beat_s=5.0,
        lease_s=60.0,
        round=3,
        journal="j1",
        life="m4",
    ),
    m.WorkersStarted(round=3, store_port=29501, how="zygote", took_s=0.06),
    m.StoreOffered(port=29502),
    m.Warmed(),
    m.Dropped(session="a1b2", seq=7),
    m.WorkersFailed(round=3, failures=(FAILURE,)),
    m.WorkersDone(round=3),
    m.Leave(reason="SIGTERM"),
    m.Beat(
        round=3,
        steps=40,
        step=139,
        first_step_ago_s=8.5,
        last_step_ago_s=0.1,
        cpu=1.5,
        memory=1 << 33,
        checkpoints=TALLY,
        saved_step=139,
        warm=True,
        total_steps=10_000,
    ),
    m.RunWorld(
        round=4,
        generation=13,
        group_rank=1,
        group_size=2,
        rank_offset=2,
        world_size=4,
        store_host="10.0.0.1",
        store_port=29501,
        store_hosted=True,
        restarts=1,
        reason="node rank 1 was lost",
        planned=False,
    ),
    m.StopWork(round=3, reason="node rank 1 was lost"),
    m.Fenced(reason="a newer agent"),
    m.JobEnded(ok=False, reason="rank 3 failed", cause=FAILURE, cause_node_rank=1, stopped=15),
    m.KvSet(scope=3, key="k", value=b"v"),
    m.KvMultiSet(scope=3, keys=("a", "b"), values=(b"1", b"2")),
    m.KvGet(scope=3, keys=("a",), timeout_s=60.0),
    m.KvWait(scope=3, keys=("a", "b"), timeout_s=1.0),
    m.KvCheck(scope=0, keys=("a",)),
    m.KvAdd(scope=0, key="n", amount=-2),
    m.KvCompareSet(scope=0, key="c", expected=b"", desired=b"x"),
    m.KvAppend(scope=0, key="c", value=b"y"),
    m.KvDelete(scope=0, key="c"),
    m.KvCount(scope=3),
    m.KvKeys(scope=3),
    m.QueuePush(scope=0, key="q", value=b"e"),
    m.QueuePop(scope=0, key="q", timeout_s=2.0),
    m.QueueLength(scope=0, key="q"),
    m.Barrier(scope=3, name="b", member="0", size=4, timeout_s=300.0),
    m.Observe(follow=True),
    m.Observed(state=b"{}"),
    m.Story(at_s=12.5, kind="NodeLost", text="node rank 1 is lost", fields={"node": 1}),
    m.StopJob(reason="the user asked"),
    *CHECKPOINT_MESSAGES,
    *DATA_MESSAGES,
    m.Parting(doubt="it was told to end at once"),
    m.HistoryAsk(entity="node/1"),
    m.History((m.Story(12.5, "NodeLost", "node rank 1 is lost", {"node_rank": 1}),), ("round/1",)),
)


def _member(node: int, rank: int) -> Member:
    return Member(
        node_id=NodeId(node),
        incarnation=Incarnation(node + 1),
        node_rank=NodeRank(rank),
        nproc=2,
        host=f"10.0.0.{node}",
        store_port=29500,
        hosted_port=29502,
        topology="s1",
        peer_port=29503,
        peer_certificate="ab" * 32,
    )


NEXT = Version(VERSION.lineage, VERSION.step + 1)
WORLD = World(round=Round(3), generation=Generation(12), members=(_member(0, 0), _member(1, 1)))

NODE_RECORDS: list[Record] = [
    rec.NodePlanned(
        node_id=7,
        node_rank=1,
        relaunches=2,
        memory_mib=4096,
        cpu_milli=500,
        group=1001,
        replaces=1,
        down_since_s=3.5,
    ),
    rec.NodePlaced(node_id=7, machine="gpu-3"),
    rec.NodePhaseChanged(node_id=7, phase="pending", message="no room", at_s=4.5),
    rec.NodeLeaves(node_id=1),
    rec.RankWanted(node_rank=2, is_wanted=False),
    rec.JobSized(nodes=4, suspended=True, memory_mib=4096, cpu_milli=500),
    rec.PlanSettled(plan_id="spec-2", ok=True, text="the job has 4 nodes now, 2 before"),
    rec.HostBlamed(host="gpu-3", weight=1, at_s=4.5),
    rec.GroupMoved(group=0, successor=1001),
]

RECORDS: list[Record] = [
    rec.GenerationSet(generation=1),
    rec.LifeBegan(life="j1", after=0),
    rec.LifeBegan(life="m2", after=95),
    rec.LifeBegan(life="m3", after=120, clock="b1/7", zero_s=1.5),
    rec.RulesSet(rules=RULES),
    rec.NodePlanned(node_id=0, node_rank=0),
    rec.NodeAdmitted(
        node_id=0,
        node_rank=0,
        incarnation=1,
        agent_key="k0",
        nproc=2,
        host="10.0.0.0",
        topology="s1",
        process="b00t/4026531836/17/4711",
        log_dir="/logs/train",
    ),
    rec.NodeAdmitted(node_id=1, node_rank=1, incarnation=2, agent_key="k1", nproc=2, host="h1"),
    rec.NodePlanned(node_id=2, node_rank=2),
    rec.NodePhaseChanged(node_id=2, phase="failed", reason="oom", message="137", proven=False),
    rec.RelaunchCounted(node_rank=2, reason="oom"),
    rec.CountersSet(next_node_id=7, next_incarnation=9),
    rec.ScopesDropped(before=3, nodes=2),
    rec.WorldAgreed(world=WORLD, reason="the job starts", planned=True, restarts=1),
    rec.KvChanged(
        scope=3,
        keys=("a", "b"),
        values=(b"1", b"\xff"),
        session="s",
        seq=4,
        answer=m.Number(1),
    ),
    rec.KvAppended(scope=3, key="b", value=b"\xfe", session="s", seq=5, answer=m.Done()),
    rec.KvDropped(scope=3, key="a", session="s", seq=5, answer=m.Number(1)),
    rec.QueueChanged(scope=0, key="q", value=b"e", session="p", seq=1, answer=m.Number(1)),
    rec.QueueChanged(scope=0, key="q", value=b"f", session="p", seq=2, answer=m.Number(2)),
    rec.QueueChanged(scope=0, key="q", value=None, session="w", seq=1, answer=m.Value(b"e")),
    rec.SessionRemembered(scope=0, session="old", seq=8, answer=m.Done()),
    rec.BarrierReleased(scope=3, name="go", generation=2, sessions=(("s", 6), ("t", 1))),
    rec.NodeDone(node_id=0, round=3),
    rec.RestartCounted(reason="error", count=2),
    rec.TimeSpent(use="productive", seconds=12.5, until_s=20.0),
    rec.StepsSeen(step=99, steps_total=120, step_price_s=0.125),
    rec.StageEntered(use="rendezvous", round=3),
    rec.IncidentNoted(
        number=1,
        round=3,
        at_s=20.0,
        reason="rank 3 failed",
        node_rank=1,
        detect_s=0.5,
        rendezvous_s=0.01,
    ),
    rec.RoundBroken(round=3, reason="rank 3 failed", by_plan=True),
    rec.RestartCounted(reason="lost", count=3, back=0.5, trained_s=600.0),
    rec.RestartCounted(reason="error", trained_s=650.0, failed_starts=2),
    rec.TrainingBegan(at_s=700.0),
    rec.PatienceSet(
        first_step_at=12.5, longest_pause_s=20.0, allowed_s=150.0, hung_step=99, hung_after=40
    ),
    rec.CheckpointCommitted(
        directory="/ckpt", version=VERSION, attempt="a1-3-2", shape=Shape(4, True)
    ),
    rec.LineageSet(directory="/ckpt", lineage=8, round=3, version=VERSION, shape=Shape(4, True)),
    rec.VersionPositioned(directory="/ckpt", version=VERSION, positions=(POSITION,)),
    rec.VersionPositioned(
        directory="/ckpt", version=NEXT, positions=(POSITION,), dropped=(VERSION,)
    ),
    *DATA_RECORDS,
    *ROLE_RECORDS,
    *NODE_RECORDS,
    rec.JobClosed(ok=False, reason="it was stopped by SIGTERM", stopped=15),
    rec.JobContinued(),
    rec.JobClosed(ok=False, reason="rank 3 failed", cause=FAILURE, cause_node_rank=1),
]

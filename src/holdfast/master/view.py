# SPDX-License-Identifier: Apache-2.0
"""The shape of the job's state for its readers: metrics and `holdfast status`.

Fields that a reader does not know are ignored and missing ones have defaults, so that a command and
a master of different versions understand each other.
"""

from msgspec import Struct, field


class WorldView(Struct, frozen=True):
    """The present round."""

    round: int = 0
    generation: int = 0
    state: str = ""
    reason: str = ""
    nodes: tuple[int, ...] = ()
    """Node ranks of the members."""
    world_size: int = 0
    spares: tuple[int, ...] = ()
    """Node ranks of the nodes that wait."""
    starts_in_s: float = 0.0
    """How long the next round waits, because the workers failed at once again and again."""


class NodeView(Struct, frozen=True):
    """One node id."""

    node_id: int
    node_rank: int
    phase: str
    incarnation: int = 0
    host: str = ""
    nproc: int = 0
    warm: bool | None = None
    """Whether its workers would start warm, by its last beat; None if that is not known."""
    cpu: float | None = None
    """Cores that its workers use, by its last beat; so are the next two. None if not known."""
    memory_bytes: int | None = None
    steps_per_s: float | None = None
    beat_age_s: float | None = None
    """Since its last beat."""
    log_dir: str = ""
    """On its host: the output of its workers, and the log of its agent."""


class IncidentView(Struct, frozen=True):
    """One interruption, and how long each stage of the recovery took."""

    number: int
    reason: str
    round: int = 0
    at_s: float = 0.0
    node_rank: int = -1
    stages: dict[str, float] = {}
    restore_parts: dict[str, float] = {}
    """What the stage `restore` went into: import, load, first step; empty if that is not known."""
    recovery_s: float = 0.0
    """Until the next step; of an incident that is not over: until now."""
    closed: bool = False
    stage: str = ""
    """What it is at now, if it is not over."""
    part: str = ""
    stage_s: float = 0.0
    open_s: float = 0.0
    """How long nothing has been trained."""


class ProgressView(Struct, frozen=True):
    """Steps, and where the time went."""

    step: int = -1
    """The newest step that a beat reported or a save has."""
    step_age_s: float = -1.0
    """Since the last step that a beat reported; -1 if none did."""
    steps_total: int = 0
    steps_per_s: float | None = None
    """Over the last 15 to 30 seconds; None while no steps are made."""
    steps_wanted: int = 0
    """How many the script wants to make in all, in the counting of `step`; 0 if it does not say."""
    left_s: float | None = None
    """The time until those steps are made; None if that is not known."""
    stage: str = ""
    stage_s: float = 0.0
    seconds: dict[str, float] = {}
    goodput: float | None = None
    """None before the first step."""
    incidents: tuple[IncidentView, ...] = ()


class StoreView(Struct, frozen=True):
    """The key-value store."""

    keys: int = 0


class CheckpointsView(Struct, frozen=True):
    """The checkpoints of one directory; a step is -1 where there is none."""

    directory: str
    committed: int = -1
    """The newest step on storage."""
    safe: int = -1
    """The newest step that every node has copied to other nodes."""
    safe_confirmed: bool = True
    """False: that was before an incident, and the nodes have not said yet what is left of it; with
    -1: the master was restarted, and it has not heard of a copy since."""
    writing: int = -1
    """The newest step that is on its way to storage."""
    reason: str = ""
    """Why it goes there."""
    problem: str = ""
    """Why the last try did not get there; empty if it did."""


class SavingView(Struct, frozen=True):
    """The checkpoints of all directories in numbers; an age is -1 where nothing is known."""

    saves: int = 0
    """Steps saved to memory."""
    waited_s: float = 0.0
    """How long the training waited for that."""
    memory_step: int = -1
    """The newest step that every node of the world has in memory."""
    memory_age_s: float = -1.0
    memory_confirmed: bool = True
    """False: the value is from before an incident or, with -1, not known: since then, or since the
    master began, not every node of the world has said what it has."""
    written_bytes: int = 0
    """Brought to storage, with what was not committed in the end."""
    written_s: float = 0.0
    restored: dict[str, int] = {}
    """Parts made readable for workers, by where they came from."""
    commits: int = 0
    failures: int = 0
    """Steps that did not reach storage."""
    storage_age_s: float = -1.0
    """Since the last commit that this master saw."""
    failed_saves: int = 0
    """Steps that workers could not save, by all nodes."""
    failed_step: int = -1
    """The last of them."""
    failed_why: str = ""


class LeaseView(Struct, frozen=True):
    """A piece of a dataset in the hands of one worker."""

    number: int
    node_id: int = -1
    round: int = 0
    piece: dict[str, int] = {}
    consumed: int = 0


class DatasetView(Struct, frozen=True):
    """How far a dataset is; -1 where that cannot be known."""

    name: str
    kind: str = ""
    task: str = ""
    follows: str = ""
    """The directory of checkpoints that its position goes with."""
    epoch: int = 0
    epochs: int = 0
    is_over: bool = False
    consumed: int = 0
    """Of this epoch, in records, bytes of lines, or offsets; about."""
    size: int = -1
    per_s: float = 0.0
    epoch_left_s: float = -1.0
    leases: tuple[LeaseView, ...] = ()
    leases_total: int = 0
    open_total: int = 0
    """Pieces that came back and wait for a worker."""
    set_aside: tuple[dict[str, int | str], ...] = ()
    set_aside_total: int = 0
    problem: str = ""


class JobView(Struct, frozen=True):
    """The whole job, as /api/v1/job shows it."""

    job: str
    state: str
    time_s: float = 0.0
    wall_s: float = 0.0
    """The time of day, in seconds since 1970; 0: an older master, which does not say it."""
    started_wall_s: float = 0.0
    from_journal: bool = False
    """True: no master runs, and this is what the last one wrote down, as of `wall_s`."""
    reason: str = ""
    attached: int = 0
    restarts: dict[str, int] = {}
    world: WorldView = field(default_factory=WorldView)
    nodes: tuple[NodeView, ...] = ()
    progress: ProgressView = field(default_factory=ProgressView)
    store: StoreView = field(default_factory=StoreView)
    checkpoints: tuple[CheckpointsView, ...] = ()
    saving: SavingView = field(default_factory=SavingView)
    datasets: tuple[DatasetView, ...] = ()

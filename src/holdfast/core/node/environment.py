# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker: torchrun's contract, kept to the letter, and ours beside it."""

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.protocol import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is the same for every worker of a node and every round."""

    nproc: int
    role: str
    run_id: str
    max_restarts: int
    socket: str
    token_file: str
    signals_to_handle: str
    virtual_local_rank: bool = False


def worker_environment(
    base: Mapping[str, str],
    launch: Launch,
    run: m.RunWorld,
    local_rank: int,
    *,
    error_file: str,
    progress: str,
) -> dict[str, str]:
    """The whole environment of one worker of one round."""
    rank = run.rank_offset + local_rank
    env = dict(base)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(run.group_rank),
        ROLE_RANK=str(rank),
        ROLE_NAME=launch.role,
        LOCAL_WORLD_SIZE=str(launch.nproc),
        WORLD_SIZE=str(run.world_size),
        GROUP_WORLD_SIZE=str(run.group_size),
        ROLE_WORLD_SIZE=str(run.world_size),
        MASTER_ADDR=run.store_host,
        MASTER_PORT=str(run.store_port),
        TORCHELASTIC_RESTART_COUNT=str(run.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(launch.max_restarts),
        TORCHELASTIC_RUN_ID=launch.run_id,
        TORCHELASTIC_USE_AGENT_STORE=str(run.store_hosted),
        TORCHELASTIC_ERROR_FILE=error_file,
        TORCHELASTIC_SIGNALS_TO_HANDLE=launch.signals_to_handle,
        TORCH_NCCL_ASYNC_ERROR_HANDLING=base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        HOLDFAST_SOCKET=launch.socket,
        HOLDFAST_TOKEN_FILE=launch.token_file,
        HOLDFAST_ROUND=str(run.round),
        HOLDFAST_LOCAL_RANK=str(local_rank),
        HOLDFAST_GENERATION=str(run.generation),
        HOLDFAST_PROGRESS=progress,
    )
    if launch.nproc > 1:
        # Many processes with a thread per core each would only get in each other's way.
        env.setdefault("OMP_NUM_THREADS", "1")
    if launch.virtual_local_rank:
        visible = base.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(n) for n in range(launch.nproc)]
        env["CUDA_VISIBLE_DEVICES"] = devices[local_rank]
        env["LOCAL_RANK"] = "0"
    return env

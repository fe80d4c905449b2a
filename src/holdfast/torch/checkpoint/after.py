# SPDX-License-Identifier: Apache-2.0
"""What rank 0 does when a checkpoint has reached storage: note how long it took, clean up.

Most jobs need neither; then no thread is started.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.client.vault import VaultClient
from holdfast.model.checkpoint import Series
from holdfast.model.errors import HoldfastError
from holdfast.torch.checkpoint.policies import Keep, KeepEvery, KeepLast, Schedule

log = logging.getLogger(__name__)


class AfterCommit:
    """Waits for commits in a thread, if a rule depends on them."""

    def __init__(
        self,
        client: VaultClient,
        series: Series,
        keep: Keep | None,
        schedule: Schedule,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._series = series
        self._schedule = schedule
        self._timeout_s = timeout_s
        self._removable: Callable[[Sequence[int]], Sequence[int]] | None = None
        if keep is not None and not isinstance(keep, KeepLast | KeepEvery):
            self._removable = keep
        self._thread: threading.Thread | None = None

    def asked(self) -> None:
        """A save to storage has begun."""
        is_needed = self._removable is not None or self._schedule.needs_cost
        is_running = self._thread is not None and self._thread.is_alive()
        if self._client.place.rank == 0 and is_needed and not is_running:
            # Not a daemon: a program that ends after a save still has its rule applied.
            self._thread = threading.Thread(target=self._follow, name="holdfast-after-commit")
            self._thread.start()

    def close(self) -> None:
        """Wait until all of this work is done."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    def _follow(self) -> None:
        began = time.monotonic()
        try:
            found = self._client.wait(self._timeout_s)
            if found.problem:
                return
            self._schedule.cost_s = time.monotonic() - began
            if self._removable is not None:
                storage = open_storage(self._series.directory)
                committed = list_committed(storage, self._series)
                steps = sorted(one.version.step for one in committed)
                # The newest is never offered for removal: a restart would need it.
                may_go = set(self._removable(steps)) & set(steps[:-1])
                if may_go:
                    self._client.remove(sorted(may_go))
        except (HoldfastError, OSError) as exc:
            log.warning("old checkpoints were not looked through: %s", exc)

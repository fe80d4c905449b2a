# SPDX-License-Identifier: Apache-2.0
"""How fast the real ledgers of checkpoints and shards go under the load of a simulated cluster.

    python bench/sim_ledgers.py --nodes 10000 --hours 24

The faults are those of `holdfast sim --failures rsc1`; every commit and restore is checked.
"""

import argparse
import sys
import time

from holdfast.sim import failures
from holdfast.sim.failures import HOUR_S
from holdfast.sim.ledgers import LedgerRun, Load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--save-every", type=float, default=600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    span_s = options.hours * HOUR_S
    drawn = failures.draw(failures.preset("rsc1"), options.nodes, span_s, options.seed)
    faults = [fault for fault in drawn if fault.at_s > 0 and fault.manner != failures.SLOW]
    load = Load(
        nodes=options.nodes,
        spares=max(1, options.nodes * 6 // 1000),
        saves=int(span_s / options.save_every),
        save_every_s=options.save_every,
        persist_every=2,
    )
    began_s = time.process_time()
    result = LedgerRun(load, faults, options.seed).run()
    took_s = time.process_time() - began_s
    sys.stdout.write(
        f"{options.nodes:,} nodes, {options.hours:g} h, {len(faults)} faults: {result.events:,} "
        f"events in {took_s:.0f} s of CPU ({result.events / took_s:,.0f}/s); {result.rounds} "
        f"rounds, {result.restores} restores, {result.commits} commits, {result.samples:,} samples "
        f"consumed\n"
    )


if __name__ == "__main__":
    main()

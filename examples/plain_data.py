# SPDX-License-Identifier: Apache-2.0
"""Data without a launcher and without a framework: kill it, start it again, it goes on.

python examples/plain_data.py /tmp/plain-data-example

The "model" is the sum of all samples. It is saved in one file with the position of the data, so
neither is ever ahead of the other.
"""

import json
import os
import sys
from pathlib import Path

from holdfast.client.data import DataShards

SIZE = 20_000
EPOCHS = 2


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / "saved.json"
    shards = DataShards("numbers", size=SIZE, shard_size=500, epochs=EPOCHS, shuffle="samples")
    total = 0
    if saved.exists():
        state = json.loads(saved.read_text())
        total = state["total"]
        shards.load_state_dict(state["data"])
        print(f"going on in epoch {state['data']['epoch']}")

    for epoch in shards.epochs():
        for batch in shards.batches(50):
            total += int(batch.sum())
            temporary = folder / "saved.tmp"
            temporary.write_text(json.dumps({"total": total, "data": shards.state_dict()}))
            os.replace(temporary, saved)
        print(f"epoch {epoch} is over")

    expected = EPOCHS * SIZE * (SIZE - 1) // 2
    print(f"the sum of all samples is {total}, it should be {expected}")


if __name__ == "__main__":
    main()

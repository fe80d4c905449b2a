# SPDX-License-Identifier: Apache-2.0
"""A process outside of a world that reads data through an agent, and is killed by the test.

ARGUMENTS: the agent's address, the file with the token. It says what it has read, then that it
waits, and reads on.
"""

import sys
from pathlib import Path

from holdfast.client import AgentClient
from holdfast.client.data import DataShards
from holdfast.client.data.ledgers import AgentLedger
from holdfast.runtime.token import read_token

address, token_file, size = sys.argv[1:]
client = AgentClient(address, read_token(Path(token_file)), scope=0)
shards = DataShards("train", size=int(size), shard_size=10, ledger=AgentLedger(client))
shards.holdings.open()
print("open", flush=True)
for batch in shards.batches(5):
    print("read", *batch.tolist(), flush=True)
    sys.stdin.readline()

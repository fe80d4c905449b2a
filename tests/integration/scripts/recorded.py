# SPDX-License-Identifier: Apache-2.0
"""Fails in rank 1 under torch's own `record`, which writes the error file of torch elastic."""

from steplog import RANK, meet
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    meet("start")
    if RANK == 1:
        raise ValueError("no learning rate was given")
    meet("never complete")


main()

# SPDX-License-Identifier: Apache-2.0
"""A worker that tells where its agent listens and then lives until the test lets it finish."""

import os

from steplog import FOLDER, RANK, is_to_finish, note, pause

(FOLDER / f"socket-{RANK}").write_text(os.environ["HOLDFAST_SOCKET"])
note("main")
while not is_to_finish():
    pause()

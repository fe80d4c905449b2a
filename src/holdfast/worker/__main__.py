# SPDX-License-Identifier: Apache-2.0
"""The program the agent starts, by its path: a worker, a command or a warm spare.

By path, not by `-m`: `-m` would put the working directory in front of the standard library while
our own modules load, and would need Holdfast on the worker's PYTHONPATH.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if not sys.flags.safe_path and not sys.flags.isolated:
    del sys.path[0]
sys.path.insert(0, _ROOT)

from holdfast.worker import bootstrap  # noqa: E402 (needs the path above)

sys.path.remove(_ROOT)

bootstrap.main(sys.argv[1:])

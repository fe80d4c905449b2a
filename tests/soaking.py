# SPDX-License-Identifier: Apache-2.0
"""What `make test` shows by a sample, and `make soak` in full.

A test with `@pytest.mark.soak`, or a row of one, runs in `make soak` only; its docstring, or that
of its neighbour, says where every run shows the same thing. A test that is only longer in
`make soak` asks for WHOLE.
"""

import os

WHOLE = "HOLDFAST_SOAK_WHOLE" in os.environ

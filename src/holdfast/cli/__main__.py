# SPDX-License-Identifier: Apache-2.0
"""`python -m holdfast.cli`."""

import sys

from holdfast.cli import main

sys.exit(main())

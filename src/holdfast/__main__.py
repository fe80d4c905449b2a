# SPDX-License-Identifier: Apache-2.0
"""`python -m holdfast`: the `holdfast` command of this interpreter, wherever PATH points."""

import sys

from holdfast.cli import main

sys.exit(main())

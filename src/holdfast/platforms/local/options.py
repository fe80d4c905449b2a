# SPDX-License-Identifier: Apache-2.0
"""Options of `holdfast master --platform local`."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    # For `holdfast run`, which has written the file; people have no use for it.
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)

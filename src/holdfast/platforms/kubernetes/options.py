# SPDX-License-Identifier: Apache-2.0
"""Options of `holdfast master --platform kubernetes`."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace", default="", metavar="NS", help="of the ElasticJob (default: this pod's own)"
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="how to reach the API server (default: as a pod does, or as kubectl does)",
    )
    parser.add_argument(
        "--context", default="", metavar="NAME", help="of the kubeconfig (default: its current one)"
    )

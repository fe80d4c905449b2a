# SPDX-License-Identifier: Apache-2.0
"""Writes its environment to $DUMP_FOLDER/RANK.json, under whichever launcher it runs."""

import json
import os
from pathlib import Path

text = json.dumps(dict(os.environ))
(Path(os.environ["DUMP_FOLDER"]) / f"{os.environ['RANK']}.json").write_text(text)

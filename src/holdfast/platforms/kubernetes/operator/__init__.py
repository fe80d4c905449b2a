# SPDX-License-Identifier: Apache-2.0
"""The operator: makes the master of each ElasticJob, and makes it again when it is lost.

Everything else about a job is its master's affair. The operator keeps no state of its own: it
looks at what is in the cluster and at what should be (`reconcile.py`, pure), and does the
difference (`process.py`). It may be killed at any moment, and several may stand by (`leader.py`).
"""

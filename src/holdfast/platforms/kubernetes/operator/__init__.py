# SPDX-License-Identifier: Apache-2.0
"""The operator: makes the master of each ElasticJob, and makes it again when it is lost.

Everything else about a job is up to its master. The operator keeps no state: it compares what is in
the cluster with what should be there (`reconcile.py`, pure), and makes the difference
(`process.py`). It may be killed at any moment, and several may stand by (`leader.py`).
"""

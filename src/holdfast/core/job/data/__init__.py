# SPDX-License-Identifier: Apache-2.0
"""The data ledger: which worker reads which samples, so that each counts once.

Owns the datasets of the job, their leases, and how far each is; a dataset that follows a checkpoint
directory goes back with its model.
"""

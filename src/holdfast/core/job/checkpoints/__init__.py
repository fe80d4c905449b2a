# SPDX-License-Identifier: Apache-2.0
"""The checkpoint ledger: what is restored, what is on storage, and what is safe on other nodes.

Owns, for each directory, the agreement on what is restored, the attempts to bring versions to
storage, and the copies on other nodes. Durable are only the newest committed version, the newest
lineage and the positions of data; agents repeat everything else to a new master.
"""

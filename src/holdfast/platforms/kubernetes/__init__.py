# SPDX-License-Identifier: Apache-2.0
"""Jobs as ElasticJob resources of a Kubernetes cluster, their nodes as pods."""

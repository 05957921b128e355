"""Errors of a cluster: its connection, its resources, its replicas."""

from dsbd_errors import DsbdError


class ClusterError(DsbdError):
    """The cluster cannot be reached or is too small, or a replica cannot run."""

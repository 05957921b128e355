"""What can go wrong around a cluster: reaching it, its room, its replicas."""

from dsbd_errors import DsbdError


class ClusterError(DsbdError):
    """The cluster cannot be reached or has no room, or a replica cannot work."""

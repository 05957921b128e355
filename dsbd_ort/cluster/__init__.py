"""Many machines, by Ray: a batch over replicas, and the HTTP service behind Ray Serve."""

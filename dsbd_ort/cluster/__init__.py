"""Many machines with Ray: batches over replicas, and the HTTP server on Ray Serve."""

"""What measurements share: pages, rounds, a quiet machine, engines, servers, twins."""

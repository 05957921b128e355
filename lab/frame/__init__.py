"""Shared parts of measurements: pages, rounds, a quiet machine, engines, servers, twins."""

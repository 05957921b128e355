"""Modules of scripts/measure_serving and scripts/soak_server."""

"""Modules of scripts/measure_speed."""

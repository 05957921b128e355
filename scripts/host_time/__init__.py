"""Models of measure_host_time whose calls cost next to nothing."""

"""What measure_host_time measures by: models that cost next to nothing."""

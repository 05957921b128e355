"""TensorRT engines built of the graphs of a bundle."""

"""Open a bundle and run its engines: numpy and ONNX Runtime, no training framework."""

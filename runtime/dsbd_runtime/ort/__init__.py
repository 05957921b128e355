"""ONNX Runtime with caches in host memory."""

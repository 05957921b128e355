"""Sessions with caches in device memory, and ONNX Runtime on CUDA."""

"""WebGPU with real numbers: ONNX Runtime's plug-in on a GPU in software, in the test's process.

``scripts/software_adapter.py`` has the adapter. Its shaders are compiled at the first calls of an
engine, which takes seconds even for a tiny one, so engines are opened once for as many tests as
possible.
"""

"""ONNX Runtime's real CUDA provider on a machine without a GPU.

The library of the provider runs over a stand-in for the CUDA runtime and cuBLAS: device memory is
host memory, copies are made, kernels are recorded by name and not computed, and what CUDA refuses
while a stream is captured is refused. So everything of the provider that runs on the host is real:
which nodes it takes and which kernels they become, IO binding, its arena, captures, errors. There
are no numbers and no times.

    stand_in.py       builds the stand-in with g++ and unpacks onnxruntime-gpu next to it
    cudart.cpp        the CUDA runtime: memory, copies, streams, captures, graphs, the log
    cublas.c  cublaslt.c
    cuda_runtime.py   cuda.bindings.runtime over the stand-in, and what it has recorded
    worker.py         the process that has all that: one for a module of tests
    scenarios.py      what is done there; each returns what a test compares

Nothing is installed: the wheels go to build/cuda_binary, or to the folder that DSBD_CUDA_BINARY
names. Without g++, or without wheels, the tests are skipped with the reason.
"""

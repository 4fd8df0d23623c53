"""The Open Inference Protocol, version 2, as KServe and Triton speak it."""

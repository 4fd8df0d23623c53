"""The Open Inference Protocol, version 2, as in KServe and Triton."""

"""Kernels on the devices of this machine through the runtime, measured without a compiler: for the
tuner's packed folders, and for OpenCL, of which TVM has no runtime."""

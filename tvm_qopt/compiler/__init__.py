"""From a KernelSpec to an artifact.  May import tvm and layer 0; never the runtime."""

"""Load artifacts and call them.  May import tvm_ffi, numpy and layer 0; never tvm."""

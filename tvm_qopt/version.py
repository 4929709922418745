"""Versions: ours, and those of TVM, whose code generation and ABI a kernel depends on."""

__version__ = "0.1.0"
TVM_VERSION = "0.27.0.post1"
FFI_VERSION = "0.1.14"
FFI_RANGE = "apache-tvm-ffi>=0.1.14.post0,<0.1.15"
"""With apache-tvm-ffi 0.1.15, which pip would pick, TVM's JSON output crashes the process."""

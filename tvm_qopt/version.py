"""Versions: ours, and those of TVM, whose code generation and ABI a kernel depends on."""

__version__ = "0.1.0"
TVM_VERSION = "0.27.0.post1"
FFI_VERSION = "0.1.14"
"""apache-tvm-ffi: with 0.1.15 TVM's JSON output crashes the process."""

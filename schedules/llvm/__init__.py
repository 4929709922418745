"""Schedules for CPUs through LLVM."""

from tvm_qopt.schedules.llvm import blockwise as blockwise

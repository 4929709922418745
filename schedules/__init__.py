"""Schedules by target kind; importing this package registers them all."""

from tvm_qopt.schedules import gpu as gpu
from tvm_qopt.schedules import llvm as llvm

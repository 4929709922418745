"""Schedules for GPUs."""

from tvm_qopt.schedules.gpu import blockwise as blockwise

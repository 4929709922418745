"""The training jobs of `tvm-qopt demo`: digits, a small network in NumPy, two optimizers; with
--compare four states, and a small transformer where torch is installed.

Needs scikit-learn and matplotlib (the extra `demo`).  May import anything.
"""

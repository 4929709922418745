"""The training jobs of `tvm-qopt demo`: digits, a small network in NumPy, two optimizers; with
--compare four states, and a small transformer where torch is installed; with --peers that
transformer, by the optimizers of others too.

Needs scikit-learn and matplotlib (the extra `demo`).  May import anything.
"""

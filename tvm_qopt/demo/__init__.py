"""The training job of `tvm-qopt demo`: digits, a small network in NumPy, two optimizers.

Needs scikit-learn and matplotlib (the extra `demo`).  May import anything.
"""

"""The command line: one module a command, thin edges over build, load and the registries.

Modules import typer, rich and layer 0's small parts; NumPy and TVM only inside functions, so that
`--help` is instant and `doctor` runs where they are broken.
"""

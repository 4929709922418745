"""`python -m tvm_qopt` and the `tvm-qopt` command."""

from __future__ import annotations


def main() -> None:
    from tvm_qopt.cli.app import app

    app(prog_name="tvm-qopt")


if __name__ == "__main__":
    main()

"""`python -m tvm_qopt` and the `tvm-qopt` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from tvm_qopt.cli.app import app

        app(prog_name="tvm-qopt")
    except KeyboardInterrupt:  # while the command line itself was being imported
        sys.exit(130)


if __name__ == "__main__":
    main()

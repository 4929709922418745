"""`python -m tvm_qopt` and the `tvm-qopt` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from tvm_qopt.cli.app import app

        app(prog_name="tvm-qopt")
    except KeyboardInterrupt:  # while the command line itself was being imported
        sys.exit(130)
    except ModuleNotFoundError as error:  # where only what steps need is installed
        package = (error.name or "tvm_qopt").partition(".")[0]
        if package == "tvm_qopt":
            raise
        print(
            f"error: {package} is not installed: pip install tvm_qopt, without --no-deps, "
            "installs what the command line needs",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()

"""The child process of the store: builds the jobs that a JSON object on stdin lists.

stdin: {"target": name, "jobs": [{"spec": name, "out": folder}, ...], "modules": [name, ...],
"path": [folder, ...]}; the modules, found on that path, define rules and formats of a user.  On an
error the last line of stdout is {"error": kind, "message": text} and the exit code is 1; else it
is {"stale": [text, ...]}, warnings of tuning records that were not used.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from tvm_qopt.errors import QoptError, StaleRecord, ToolMissing
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target


def main() -> int:
    request = json.load(sys.stdin)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default", StaleRecord)
            _run(request)
    except QoptError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return 1
    stale = [str(each.message) for each in caught if issubclass(each.category, StaleRecord)]
    print(json.dumps({"stale": stale}))
    return 0


def _run(request: dict[str, object]) -> None:
    try:
        from tvm_qopt.compiler.build import build
    except ModuleNotFoundError as error:
        raise ToolMissing(
            f"the compiler is not installed ({error}); pip install apache-tvm, or load an artifact "
            "that was built elsewhere"
        ) from error
    sys.path.extend(path for path in request["path"] if path not in sys.path)  # type: ignore[attr-defined]
    for name in request["modules"]:  # type: ignore[attr-defined]
        importlib.import_module(name)
    preset = get_target(str(request["target"]))
    for job in request["jobs"]:  # type: ignore[attr-defined]
        build(KernelSpec.parse(job["spec"]), preset, Path(job["out"]))


if __name__ == "__main__":
    sys.exit(main())

"""What a peer's process says and does, without a peer: run in the place of its interpreter.

Names of rows say how they behave: one that `breaks` ends the process when it is built, one that
`stops` when it makes its first step.  Each step is logged to the file FAKE_PEER_LOG.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    peer = asked["peer"]
    rows = [f"{peer} good", *(f"{peer} {how}" for how in os.environ.get("FAKE_ROWS", "").split())]
    answer({"rows": rows, "versions": {peer: "7.5"}})
    for line in sys.stdin:
        asked = json.loads(line)
        row = asked.get("build") or asked["step"]
        if ("breaks" in row) or ("stops" in row and "step" in asked):
            sys.exit(f"OSError: {row} is broken")
        if "build" in asked:
            answer({"bytes": 20_000})
        else:
            with open(os.environ["FAKE_PEER_LOG"], "a", encoding="utf-8") as log:
                log.write(f"{row}\n")
            answer({"seconds": 0.001})


main()

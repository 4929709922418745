"""The device of tests/cuda_on_cpu."""

from __future__ import annotations

from pathlib import Path

import cuda_runner
import pytest


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := cuda_runner.why_missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("cuda") / "device"
    cuda_runner.install(folder)
    return folder

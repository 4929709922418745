"""What all tests share: the --slow and --update-golden switches, and folders of their own for the
store and for tuning records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow (tens of GiB or minutes)")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of this run, for all its processes: pytest-xdist's have folders side by side, and
    children find it in the environment."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "store"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["TVM_QOPT_STORE"] = str(folder)
    os.environ["TVM_QOPT_RECORDS"] = str(tmp_path_factory.mktemp("records"))
    return folder

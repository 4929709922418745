"""What README and messages say is there: settings by name, and extras."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import tvm_qopt
from tvm_qopt.demo.compare import TASKS
from tvm_qopt.formats import FORMATS
from tvm_qopt.rules import RULES
from tvm_qopt.spec import rule_choices

PACKAGE = Path(tvm_qopt.__file__).parent
TOP = Path(__file__).parents[2]
README = (TOP / "README.md").read_text(encoding="utf-8")


def settings() -> list[tuple[str, str, tuple[Any, ...]]]:
    """Rule or format, setting, choices; tests and the bench register more, outside the package."""
    rules = [r for r in RULES.values() if r.update.__module__.startswith("tvm_qopt.rules.")]
    shipped = [f for f in FORMATS.values() if type(f).__module__.startswith("tvm_qopt.formats.")]
    choices = {rule.name: rule_choices(rule) for rule in rules}
    choices |= {format_.name: format_.settings for format_ in shipped}
    return [(owner, name, each) for owner in choices for name, each in choices[owner].items()]


def readme_rows() -> list[tuple[str, str]]:
    """The first two cells of the table of settings: names, and choices."""
    table = README.split("| setting | choices")[1].split("\n\n")[0]
    cells = [line.split("|") for line in table.splitlines()[2:]]
    return [(row[1], row[2]) for row in cells]


def test_readme_has_every_setting_and_choice() -> None:
    words: dict[Any, str] = {True: "on", False: "off"}
    for owner, name, choices in settings():
        rows = [each for each in readme_rows() if f"`{name}`" in each[0]]
        own = [each for each in rows if f" of `{owner}`" in each[0]] or rows
        assert len(own) == 1, (owner, name)
        named = [words.get(choice, f"`{choice}`") for choice in choices]
        said = own[0][1].strip().split(", ")
        assert [word for word in said if word in named] == named, (owner, name)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_messages_name_extras_that_exist() -> None:
    import tomllib

    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    texts = [README, *(path.read_text(encoding="utf-8") for path in sources())]
    found = [text for each in texts for text in re.findall(r"(?:tvm_qopt|'\.)\\*\[(.*?)\]", each)]
    assert {"cuda", "demo", "opencl", "torch", "tune,demo"} <= set(found)
    computed = {"{task.needs}": {task.needs for task in TASKS.values() if task.needs}}
    for text in found:
        assert computed.get(text, set(text.split(","))) <= extras, text


def sources() -> list[Path]:
    """tvm_qopt.schedules is a link in a clone."""
    return [
        Path(folder, name)
        for folder, _, names in os.walk(PACKAGE, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]

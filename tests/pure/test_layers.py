"""The dependency rule: what each layer of the package may import, and what `import tvm_qopt` loads.

Read from the source with `ast`, so that it holds where neither TVM nor torch is installed.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tvm_qopt

PACKAGE = Path(tvm_qopt.__file__).parent
OWN = "tvm_qopt"
DESCRIPTION = (  # layer 0
    "errors",
    "formats",
    "gpus",
    "manifest",
    "measure",
    "packed",
    "params",
    "records",
    "reference",
    "rules",
    "sample",
    "spec",
    "targets",
    "update",
    "verify",
    "version",
    "xp",
)
HEAVY = {"cupy", "matplotlib", "numpy", "pyopencl", "sklearn", "torch", "tvm", "tvm_ffi"}


@dataclass(frozen=True)
class Import:
    """One import: who imports what, and whether it happens when the module is imported."""

    importer: str
    imported: str
    at_import: bool

    @property
    def top(self) -> str:
        return self.imported.partition(".")[0]


def source_files() -> dict[str, Path]:
    """Module name -> file; tvm_qopt.schedules is a link in a clone and a folder in a wheel."""
    files = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(PACKAGE).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                files[".".join((OWN, *parts))] = path
    return files


FILES = source_files()


def imports_of(module: str) -> Iterator[Import]:
    is_package = FILES[module].name == "__init__.py"

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for otherwise in node.orelse:
                yield from visit(otherwise, at_import)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node)
            for alias in node.names:
                assert alias.name != "*", f"{module} imports * from {base}"
                name = f"{base}.{alias.name}"
                yield Import(module, name if name in FILES else base, at_import)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside)

    def absolute(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    return visit(ast.parse(FILES[module].read_text(encoding="utf-8")), True)


def layer_of(module: str) -> str:
    """The layer of a module of ours: description, compiler, schedules, runtime or edges."""
    part = [*module.split("."), ""][1]
    if part in DESCRIPTION:
        return "description"
    return part if part in ("compiler", "schedules", "runtime") else "edges"


IMPORTS = [each for module in sorted(FILES) for each in imports_of(module)]


def imports_by(layer: str) -> list[Import]:
    found = [each for each in IMPORTS if layer_of(each.importer) == layer]
    assert found, f"no module of {layer}: the walk does not see the package"
    return found


def is_own(each: Import, *layers: str) -> bool:
    return each.top == OWN and layer_of(each.imported) in layers


def is_standard(each: Import) -> bool:
    return each.top in sys.stdlib_module_names


def is_bare(each: Import) -> bool:
    """`import tvm_qopt`: the package itself, which loads nothing."""
    return each.imported == OWN


def violations(layer: str, allowed: set[str], *own: str) -> list[Import]:
    return [
        each
        for each in imports_by(layer)
        if not (is_standard(each) or is_own(each, *own) or is_bare(each) or each.top in allowed)
    ]


def test_the_walk_sees_every_layer() -> None:
    assert {layer_of(module) for module in FILES} >= {
        "description",
        "compiler",
        "schedules",
        "runtime",
        "edges",
    }
    assert {f"{OWN}.{name}" for name in DESCRIPTION} <= set(FILES)
    assert Import(f"{OWN}.runtime.kernel", "numpy", True) in IMPORTS
    assert Import(f"{OWN}.compiler.build", f"{OWN}.compiler.define", True) in IMPORTS


def test_description_imports_the_standard_library_numpy_and_itself() -> None:
    assert violations("description", {"numpy", "scipy"}, "description") == []


def test_compiler_never_imports_the_runtime() -> None:
    allowed = {"numpy", "tvm", "tvm_ffi"}
    assert violations("compiler", allowed, "description", "compiler", "schedules") == []


def test_runtime_never_imports_tvm_or_the_compiler() -> None:
    """In functions it may import what hands it arrays, or what the store needs."""
    allowed = {"cupy", "filelock", "numpy", "platformdirs", "pyopencl", "torch", "tvm_ffi"}
    assert violations("runtime", allowed, "description", "runtime") == []
    at_import = {
        each.top for each in imports_by("runtime") if each.at_import and not is_standard(each)
    }
    assert at_import <= {OWN, "numpy", "tvm_ffi"}


def test_schedules_import_the_schedule_language_and_each_other() -> None:
    own = [each for each in violations("schedules", {"tvm"}, "schedules")]
    assert {each.imported for each in own} <= {f"{OWN}.compiler.schedule"}


def test_edges_import_what_is_heavy_inside_functions() -> None:
    """Apart from what is torch's: the classes of optim, and the demo's transformer."""
    heavy = {"matplotlib", "sklearn", "torch", "tvm"}
    found = [each for each in imports_by("edges") if each.at_import and each.top in heavy]
    of_torch = (f"{OWN}.optim", f"{OWN}.demo.text")
    assert [each for each in found if not each.importer.startswith(of_torch)] == []


def test_the_package_imports_its_schedules_by_their_full_name() -> None:
    """`schedules` at the top of a clone is another module than tvm_qopt.schedules."""
    assert [each for each in IMPORTS if each.top in ("schedules", "tuning_logs")] == []


def modules_after(code: str) -> set[str]:
    """The modules of a fresh interpreter after some code."""
    code += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_the_standard_library_alone() -> None:
    loaded = modules_after("import tvm_qopt; tvm_qopt.__version__; dir(tvm_qopt)")
    assert not loaded & HEAVY
    own = {name for name in loaded if name.partition(".")[0] == OWN}
    assert own == {OWN, f"{OWN}.version"}


def test_the_description_layer_loads_no_compiler_and_no_runtime() -> None:
    names = ", ".join(f"{OWN}.{name}" for name in DESCRIPTION)
    loaded = modules_after(f"import {names}")
    assert not loaded & (HEAVY - {"numpy"})
    assert not {name for name in loaded if name.startswith((f"{OWN}.compiler", f"{OWN}.runtime"))}


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tvm_qopt' has no attribute 'lode'"):
        tvm_qopt.lode  # noqa: B018
    assert "load" in dir(tvm_qopt)

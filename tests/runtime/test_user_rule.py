"""A rule and a state format of a user's own module, which this package does not know: by name, as a
reference, as a kernel that the compiler's process builds; and what is said where that cannot be."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt import reference
from tvm_qopt.errors import BuildError, UnknownName, UnsupportedSpec
from tvm_qopt.formats import FAMILIES, FORMATS
from tvm_qopt.rules import RULES

F32 = npt.NDArray[np.float32]

SIZE, BLOCK = 3 * 64 + 17, 64
LR, BETA = 0.125, 0.5  # of which every product is exact, so that no contraction shows

MODULE = '''
"""A sign update with a moment, and evenly spaced levels k/4 of that moment."""

from dataclasses import dataclass

import numpy as np

from tvm_qopt.formats import StateFormat, register, register_family
from tvm_qopt.rules import LR, Hyper, rule


@rule(
    slots=("velocity",),
    hyper=(LR, Hyper("beta", high=1.0)),
    scalars=("lr", "beta", "part"),
    derive=lambda h, step, settings: {"lr": h["lr"], "beta": h["beta"], "part": 1 - h["beta"]},
    settings={"sign": (True, False)},
)
def my_signum(xp, h, p, g, s, settings):
    """Signum (Bernstein et al. 2018): the sign of a moment."""
    velocity = xp.bind(h.beta * s["velocity"] + h.part * g, "velocity_new")
    if not settings["sign"]:
        return p - h.lr * velocity, {"velocity": velocity}
    step = xp.where(velocity < 0.0, -1.0, xp.where(velocity > 0.0, 1.0, 0.0))
    return p - h.lr * step, {"velocity": velocity}


@dataclass(frozen=True)
class Quarters(StateFormat):
    """k/4, k = -4..4, by rounding."""

    @property
    def qmap(self):
        return ((np.arange(9) - 4) / 4).astype(np.float32)

    def decode(self, xp, codes, qmap, name):
        return xp.cast(codes - 4, "float32") * 0.25

    def encode(self, xp, x, qmap, settings, name):
        return xp.cast(x * 4.0 + 4.5, "int32")


register(Quarters(name="my_quarters", bits=8, signed=True))
register_family("my_family", signed="my_quarters", nonnegative="my_quarters")
'''


@contextmanager
def registered(folder: Path, module: str) -> Iterator[None]:
    """While it lasts a module is imported from a folder, and what it registers is there."""
    tables: tuple[dict[str, Any], ...] = (RULES, FORMATS, FAMILIES)
    before = [dict(table) for table in tables]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        importlib.import_module(module)
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module, None)
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


NAMES = [
    "my_signum-my_quarters-b64-p_f32-g_f32",
    "my_signum-my_quarters-b64-p_f32-g_f32-sign_off",
    "my_signum-dynamic8s-b64-p_f32-g_f32-sign_off",
    "sgd-my_quarters-b64-p_f32-g_f32",
]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's module, imported from a folder of its own; every kernel of it in one child."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_optimizer.py").write_text(MODULE)
    with registered(folder, "my_optimizer"):
        tvm_qopt.load_many(NAMES)
        yield folder


def gradients() -> list[F32]:
    """Quarters of powers of two, so that the moment is exact; and a block of zeros."""
    rng = np.random.default_rng(60)
    made = []
    for _ in range(3):
        grad = (rng.integers(-8, 9, SIZE) / 8).astype(np.float32)
        grad[BLOCK : 2 * BLOCK] = 0
        made.append(grad)
    return made


def quantized(value: F32) -> tuple[npt.NDArray[np.uint8], F32]:
    """Codes and scales of k/4 levels by the plain definition, ties up."""
    scale = np.maximum.reduceat(np.abs(value), np.arange(0, SIZE, BLOCK)).astype(np.float32)
    each = np.repeat(scale, BLOCK)[:SIZE]
    unit = np.divide(value, each, out=np.zeros(SIZE, np.float32), where=each != 0)
    return np.floor(unit * 4 + 4.5).astype(np.uint8), scale


def test_a_name_of_a_users_rule_and_format_parses(mine: Path) -> None:
    for name in NAMES:
        family = name.replace("my_quarters", "my_family").replace("dynamic8s", "dynamic8")
        assert tvm_qopt.KernelSpec.parse(name).name == family
    spec = tvm_qopt.KernelSpec.of("my_signum", "my_family", block_size=BLOCK)
    assert spec == tvm_qopt.KernelSpec.parse(NAMES[0])
    assert spec.rule_.summary.startswith("Signum") and spec.rule_.hyper({})[1].name == "beta"


def test_kernel_and_reference_do_what_the_module_says(mine: Path) -> None:
    """Built by the compiler's process, which imports the module; each step from the kernel's own
    state, against a third writing of both."""
    spec = tvm_qopt.KernelSpec.parse(NAMES[0])
    kernel = tvm_qopt.load(NAMES[0])
    param, grad = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    state = kernel.init_state(param)
    assert (state["velocity_codes"] == 4).all(), "the code of 0"
    plan = kernel.plan(param=param, grad=grad, state=state)
    for step, values in enumerate(gradients(), start=1):
        grad[...] = values
        codes, scale = state["velocity_codes"].astype(np.float32), state["velocity_scale"]
        old = (codes - 4) / 4 * np.repeat(scale, BLOCK)[:SIZE]
        velocity = (BETA * old + (1 - BETA) * values).astype(np.float32)
        moved = (param - LR * np.sign(velocity)).astype(np.float32)
        hyper = {"lr": LR, "beta": BETA}
        arrays = {"hyper": reference.hyper(spec, step, **hyper), "param": param, "grad": grad}
        said = reference.step(spec, {**arrays, **state})
        assert plan.step(step=step, lr=LR, beta=BETA)
        codes_now, scale_now = quantized(velocity)
        assert scale_now[1] == 0 and (np.delete(scale_now, 1) > 0).all()
        for name, expected in {
            "param": moved,
            "velocity_codes": codes_now,
            "velocity_scale": scale_now,
        }.items():
            got = {"param": param, **state}[name]
            np.testing.assert_array_equal(got, said[name], err_msg=f"{name}, step {step}")
            np.testing.assert_array_equal(got, expected, err_msg=f"{name}, step {step}")
    values = kernel.decode_state(state)["velocity"]
    assert np.unique(values[:BLOCK]).size > 4
    assert (param[:BLOCK] != 1).any()


def test_every_mixture_of_theirs_and_ours_works(mine: Path) -> None:
    """Their rule with our format, our rule with theirs, built in one child; a setting of theirs."""
    hyper: dict[str, dict[str, Any]] = {
        "my_signum": {"lr": LR, "beta": BETA},
        "sgd": {"lr": LR, "weight_decay": 0.0, "momentum": BETA, "dampening": 0.0},
    }
    for kernel in tvm_qopt.load_many(NAMES):
        spec = kernel.spec
        param, grad = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
        state = kernel.init_state(param)
        plan = kernel.plan(param=param, grad=grad, state=state)
        for step, values in enumerate(gradients(), start=1):
            grad[...] = values
            scalars = reference.hyper(spec, step, **hyper[spec.rule])
            said = reference.step(spec, {"hyper": scalars, "param": param, "grad": grad, **state})
            assert plan.step(step=step, **hyper[spec.rule])
            np.testing.assert_allclose(param, said["param"], rtol=3e-7)
            for name in state:
                np.testing.assert_allclose(state[name], said[name], rtol=3e-7)
        assert (param != 1).any()


def test_hyper_parameters_of_a_users_rule_are_checked(mine: Path) -> None:
    kernel, param = tvm_qopt.load(NAMES[0]), np.ones(SIZE, np.float32)
    plan = kernel.plan(param=param, grad=param.copy(), state=kernel.init_state(param))
    with pytest.raises(ValueError, match=r"beta: expected a number in \[0, 1\), got 1"):
        plan.step(step=1, lr=LR, beta=1.0)
    with pytest.raises(UnknownName, match="hyper-parameter of my_signum 'gamma'; known: beta, lr"):
        plan.step(step=1, lr=LR, beta=BETA, gamma=1.0)
    assert (param == 1).all()


def test_a_module_that_changed_is_built_anew(tmp_path: Path) -> None:
    """The store knows a kernel by the text that made it: an edited rule is another kernel."""
    text = textwrap.dedent('''
        from tvm_qopt.rules import LR, rule

        @rule(slots=(), hyper=(LR,), scalars=("lr",), derive=lambda h, step, settings: dict(h))
        def my_edited(xp, h, p, g, s, settings):
            """A step along the gradient."""
            return p - h.lr * g * 1.0, {}
    ''')
    for number, factor in enumerate((1.0, 4.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "my_edits.py").write_text(text.replace("1.0", str(factor)))
        with registered(folder, "my_edits"):
            kernel = tvm_qopt.load("my_edited-float32-b64")
            param = np.zeros(SIZE, np.float32)
            plan = kernel.plan(
                param=param, grad=np.ones(SIZE, np.float32), state=kernel.init_state(param)
            )
            assert plan.step(step=1, lr=0.5)
            assert (param == -0.5 * factor).all()


# What cannot be


def run_script(
    folder: Path, *arguments: str, store: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that only Python's own rules put on its path."""
    package = str(Path(tvm_qopt.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    if store is not None:
        env["TVM_QOPT_STORE"] = str(store)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )


USE = """
import numpy as np
import tvm_qopt

kernel = tvm_qopt.load("my_signum-my_quarters-b64-p_f32-g_f32")
param = np.zeros(9, np.float32)
plan = kernel.plan(param=param, grad=np.ones(9, np.float32), state=kernel.init_state(param))
plan.step(step=1, lr=0.25, beta=0.5)
print("moved to", param[0])
"""


@pytest.mark.parametrize("what", ["rule", "format"])
def test_a_definition_in_the_script_that_runs_is_refused_with_the_way_out(
    tmp_path: Path, what: str
) -> None:
    """Both there, or the format alone (the rule is this package's)."""
    use = USE if what == "rule" else USE.replace("my_signum-my", "lion-my")
    (tmp_path / "train.py").write_text(MODULE + use)
    done = run_script(tmp_path, "train.py")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "BuildError" in said and "put it into a module of its own" in said
    assert ("my_signum" if what == "rule" else "lion-my") in said


def test_a_module_in_the_current_folder_is_found(tmp_path: Path) -> None:
    """Which is "" on the path of Python under -c, in an interactive session and in a notebook."""
    (tmp_path / "my_optimizer.py").write_text(MODULE)
    done = run_script(tmp_path, "-c", "import my_optimizer\n" + USE, store=tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "moved to -0.25"


WRONG = textwrap.dedent('''
    from tvm_qopt.rules import LR, rule

    @rule(
        slots=("velocity",),
        hyper=(LR,),
        scalars=("lr",),
        derive=lambda h, step, settings: dict(h),
    )
    def my_careless(xp, h, p, g, s, settings):
        """Returns another slot than it has."""
        return p - h.lr * g, {"speed": xp.bind(g, "velocity_new")}
''')


def test_a_rule_that_returns_other_slots_is_named(tmp_path: Path) -> None:
    """By the reference, and by the build through the compiler's process."""
    (tmp_path / "my_mistake.py").write_text(WRONG)
    with registered(tmp_path, "my_mistake"):
        spec = tvm_qopt.KernelSpec.of("my_careless", "float32", block_size=BLOCK)
        zeros, counts = np.zeros(SIZE, np.float32), np.zeros(4, np.int32)
        arrays: dict[str, Any] = {"param": zeros, "grad": zeros, "velocity": zeros}
        arrays |= {"hyper": reference.hyper(spec, 1, lr=1.0), "nonfinite_count": counts}
        said = r"my_careless: returned \['speed'\], has slots \['velocity'\]"
        with pytest.raises(UnsupportedSpec, match=said):
            reference.step(spec, arrays)
        with pytest.raises(UnsupportedSpec, match=said):
            tvm_qopt.load(spec)


def test_a_module_that_the_compilers_process_cannot_import_is_named(tmp_path: Path) -> None:
    """One that fails there, or is no longer where it was."""
    (tmp_path / "my_lost.py").write_text(WRONG.replace("my_careless", "my_lost_rule"))
    with registered(tmp_path, "my_lost"):
        spec = tvm_qopt.KernelSpec.of("my_lost_rule", "float32", block_size=BLOCK)
        (tmp_path / "my_lost.py").write_text(WRONG + "\nraise RuntimeError('no such luck')\n")
        with pytest.raises(BuildError, match="no such luck") as caught:
            tvm_qopt.load(spec)
        assert "my_lost" in str(caught.value)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my_double.py").write_text(WRONG.replace("my_careless", "adamw"))
    twice = pytest.raises(ValueError, match="'adamw' is registered twice")
    with twice, registered(tmp_path, "my_double"):
        pass
    assert RULES["adamw"].update.__module__ == "tvm_qopt.rules.adamw"

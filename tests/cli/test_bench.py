"""`tvm-qopt bench`: its rows, bytes and peers, on tensors small enough; no time is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from tvm_qopt.bench import machine
from tvm_qopt.bench.arrays import empty, filled, placed, split
from tvm_qopt.bench.layouts import GPT, sizes_of
from tvm_qopt.bench.measure import OURS, PEER, Contender, measure
from tvm_qopt.bench.peers import PEERS, Peer, SetupFailed, find_python, parse, set_up
from tvm_qopt.bench.process import LeftOut, Peers
from tvm_qopt.errors import UnknownName

SIZE = 10_000
DYNAMIC8 = "adamw-dynamic8-b256-p_f32-g_f32"
LAMB = "lamb-float32-b256-p_bf16_split-g_bf16"
FAKE = Path(__file__).with_name("fake_peer.py")


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tvm_qopt", "bench", "--rounds", "3", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def small(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return bench("--size", str(SIZE), *arguments, **environment)


def said(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    found = said(small(DYNAMIC8, LAMB, "--threads", "1", "--peers", "", "--json", "-"))
    facts = found["machine"]
    assert facts["threads"] == "1" and facts["with"] == "no peers" and "load" in facts
    return {row["name"]: row for row in found["rows"]}


class TestOurs:
    def test_each_contender_has_a_row_with_a_time(self, rows: dict[str, dict[str, Any]]) -> None:
        assert all(0 < row["low"] <= row["ns"] <= row["high"] for row in rows.values())
        assert list(rows) == [
            "in-place p, m, v += g",
            "in-place p += g (NumPy)",
            DYNAMIC8,
            LAMB,
            f"{DYNAMIC8}, NumPy's arrays",
            f"{DYNAMIC8}, 100 elements",
        ]

    def test_bytes_are_those_that_a_step_must_move(self, rows: dict[str, dict[str, Any]]) -> None:
        """p, g: 4 + 4 + 4; two codes read and written: 4; 2 scales and a counter a block of 256."""
        assert rows[DYNAMIC8]["bytes"] == pytest.approx(16.09, abs=0.01)
        assert rows[f"{DYNAMIC8}, NumPy's arrays"]["bytes"] == rows[DYNAMIC8]["bytes"]
        assert rows["in-place p, m, v += g"]["bytes"] == pytest.approx(28.03, abs=0.01)
        # p and its low bits 2 + 2, g 2, m and v 4 + 4, all read twice; p, low, m, v written
        assert rows[LAMB]["bytes"] == pytest.approx(40.05, abs=0.01)

    def test_a_tiny_step_is_given_by_the_step(self, rows: dict[str, dict[str, Any]]) -> None:
        units = {name: row["unit"] for name, row in rows.items()}
        assert units.pop(f"{DYNAMIC8}, 100 elements") == "step"
        assert set(units.values()) == {"parameter"}


def test_operators_are_timed_as_users_call_them() -> None:
    names = ["quantize-linear8s-b256-p_f32-g_f32", "dequantize-linear8s-b256-p_f32-g_f32"]
    found = said(small(*names, "--peers", "", "--json", "-"))
    rows = {row["name"]: row["bytes"] for row in found["rows"] if row["kind"] == OURS}
    # values, codes, a scale for each of 40 blocks
    kept = [f"{name}, into kept arrays" for name in names]
    assert rows == dict.fromkeys(names + kept, pytest.approx(5 + 160 / SIZE))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adamv-dynamic8"], ["adamv", "adamw"]),
        (["--peers", "torch,apex"], ["apex", "bitsandbytes-cpu-fork"]),
        (["--layout", "bert"], ["bert", "gpt2", "single"]),
        (["--layout", "gpt2"], ["--size", "gpt2"]),
        (["--peer-python", "torch"], ["NAME=PATH"]),
        (["--peer-python", "apex=/bin/sh"], ["apex", "deepspeed"]),
    ],
)
def test_what_does_not_exist_is_wrong_usage(arguments: list[str], words: list[str]) -> None:
    ran = small(*arguments)
    assert ran.returncode == 2
    assert all(word in ran.stderr for word in words), ran.stderr


def test_a_file_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    ran = small("--plot", str(tmp_path / "missing" / "a.png"), "--peers", "")
    assert ran.returncode == 1 and "--plot" in ran.stderr and "GiB" not in ran.stderr


def test_a_table_a_figure_and_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, data = tmp_path / "bench.png", tmp_path / "bench.json"
    ran = small(DYNAMIC8, "--peers", "", "--plot", str(figure), "--json", str(data))
    assert ran.returncode == 0, ran.stderr
    assert DYNAMIC8 in ran.stdout and "of the roofline" in ran.stdout
    assert "us a planned step" in ran.stderr
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(json.loads(data.read_text())["rows"]) == 5


class TestPeers:
    """A script in the place of a peer's interpreter."""

    @pytest.fixture
    def fake(self, tmp_path: Path) -> Path:
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}"\n')
        script.chmod(0o755)
        return script

    @pytest.fixture
    def log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("FAKE_PEER_LOG", str(tmp_path / "log"))
        return tmp_path / "log"

    def run(self, fake: Path, *names: str, **environment: str) -> dict[str, Any]:
        named = [part for name in names for part in ("--peer-python", f"{name}={fake}")]
        chosen = ("--peers", ",".join(names), "--json", "-")
        return said(small(DYNAMIC8, *chosen, *named, **environment))

    def test_they_take_turns(self, fake: Path, log: Path) -> None:
        found = self.run(fake, "optax", "torchao")
        rows = {row["name"]: row for row in found["rows"] if row["kind"] == PEER}
        assert list(rows) == ["optax good", "torchao good"]
        assert rows["optax good"]["ns"] == pytest.approx(0.001 / SIZE * 1e9)
        assert rows["optax good"]["bytes"] == 2
        assert log.read_text().split("\n")[:-1] == ["optax good", "torchao good"] * 5
        assert "optax 7.5, torchao 7.5" in found["machine"]["with"]

    def test_a_row_that_fails_is_left_out_with_its_reason(self, fake: Path, log: Path) -> None:
        found = self.run(fake, "torchao", FAKE_ROWS="breaks late stops")
        names = [row["name"] for row in found["rows"] if row["kind"] == PEER]
        reasons = {each["name"]: each["reason"] for each in found["skipped"]}
        assert reasons["torchao breaks"] == "OSError: torchao breaks is broken"
        assert reasons["torchao stops"] == "OSError: torchao stops is broken"
        # the process is gone with the row that stopped it
        assert not names and reasons.keys() > {"torchao good", "torchao late"}

    def test_one_that_breaks_leaves_the_others(self, fake: Path, log: Path) -> None:
        found = self.run(fake, "torchao", FAKE_ROWS="breaks late")
        names = [row["name"] for row in found["rows"] if row["kind"] == PEER]
        assert names == ["torchao good", "torchao late"]
        assert [each["name"] for each in found["skipped"]] == ["torchao breaks"]

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("echo 'ImportError: no such thing' >&2; exit 1", "ImportError: no such thing"),
            ("exit 3", "exit code 3"),
            ("kill -SEGV $$", "SIGSEGV"),
            ("echo Hello; sleep 9", "answered b'Hello'"),
        ],
    )
    def test_one_that_says_nothing_of_use(self, fake: Path, script: str, reason: str) -> None:
        fake.write_text(f"#!/bin/sh\n{script}\n")
        found = self.run(fake, "optax")
        (skipped,) = found["skipped"]
        assert skipped["name"] == "optax" and reason in skipped["reason"]
        assert [row["kind"] for row in found["rows"]].count(OURS) == 3

    def test_an_interpreter_that_is_none(self, tmp_path: Path) -> None:
        (skipped,) = self.run(tmp_path / "python", "optax")["skipped"]
        assert "No such file" in skipped["reason"]

    def test_no_answer_in_time(self, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tvm_qopt.bench.process.START", 0.1)
        fake.write_text("#!/bin/sh\nexec sleep 9\n")
        with Peers(fake.parent, {"optax": fake}, threads=1) as running:
            contenders, (skipped,) = running.contenders(PEERS["optax"], [SIZE])
        assert not contenders and "no answer in" in skipped.reason

    def test_too_large_for_the_memory(
        self, fake: Path, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For the weights and gradients, or only for the state of a row."""
        with Peers(fake.parent, {"optax": fake}, threads=1) as running:
            _, (skipped,) = running.contenders(PEERS["optax"], [1 << 44])
            assert skipped.name == "optax" and "262144.00 GiB needed" in skipped.reason
            free = SimpleNamespace(available=machine.RESERVE + (20 << 20))
            monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
            found, (skipped,) = running.contenders(PEERS["optax"], [1 << 20])
        assert (
            found == []
            and skipped.name == "optax good"
            and "0.03 GiB needed, 0.02 free" in skipped.reason
        )

    def test_those_that_are_not_installed(self, tmp_path: Path) -> None:
        with pytest.raises(LeftOut, match="--setup-peers"):
            find_python(Peer("none", ("no-such-distribution==1",)), tmp_path, {})

    def test_the_order_in_which_one_is_looked_for(self, tmp_path: Path) -> None:
        here = Peer("here", ("numpy==1",))
        assert find_python(here, tmp_path, {}) == Path(sys.executable)
        assert find_python(here, tmp_path, {"here": tmp_path}) == tmp_path
        elsewhere = Peer("elsewhere", ("no-such-distribution==1",), environment="other")
        python = tmp_path / "other" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert find_python(elsewhere, tmp_path, {}) == python

    def test_names(self) -> None:
        assert [peer.name for peer in parse(" torch, optax,torch")] == ["torch", "optax"]
        assert parse("") == []
        with pytest.raises(UnknownName, match="torchai"):
            parse("torchai")


def wheel(folder: Path, name: str) -> Path:
    """A distribution of one empty module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: x-y-z\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_peers_are_installed_into_an_environment_of_their_own(tmp_path: Path) -> None:
    set_up(Peer("some", (str(wheel(tmp_path, "some_peer")),), environment="x"), tmp_path)
    python = tmp_path / "x" / "bin" / "python"
    assert subprocess.run([python, "-c", "import some_peer"], check=False).returncode == 0
    with pytest.raises(SetupFailed, match=r"pip.*no_such\.whl"):
        set_up(Peer("some", ("/no_such.whl",), environment="x"), tmp_path)


class TestWorker:
    """The process itself, with torch, and with a small stand-in for a peer that needs torch."""

    STAND_IN = """
print("hello from the import")
class optim:
    class AdamW8bit:
        def __init__(self, params, lr, weight_decay):
            import collections, torch
            codes = {"state1": torch.zeros(10000, dtype=torch.uint8), "qmap1": torch.zeros(256)}
            self.state = collections.defaultdict(dict, {params[0]: {**codes, "step": 1}})
        def step(self):
            print("hello from a step")
    class Lion8bit(AdamW8bit):
        def step(self):
            raise ValueError("no lions here\\nbut elsewhere")
class functional:
    def quantize_blockwise(values, blocksize):
        import torch, types
        assert blocksize == 256
        codes = torch.zeros(values.numel(), dtype=torch.uint8)
        return codes, types.SimpleNamespace(absmax=torch.zeros(40))
    def dequantize_blockwise(codes, state):
        raise NotImplementedError
"""

    def test_torch(self) -> None:
        pytest.importorskip("torch")
        found = said(small(DYNAMIC8, "--peers", "torch", "--json", "-"))
        (row,) = [row for row in found["rows"] if row["kind"] == PEER]
        assert row["name"].startswith("torch AdamW") and row["ns"] > 0
        assert row["bytes"] == 28  # p, g; p; two moments read and written
        assert "torch 2" in found["machine"]["with"] and found["skipped"] == []

    def test_a_peer_of_this_environment(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        (tmp_path / "bitsandbytes.py").write_text(self.STAND_IN)
        info = tmp_path / "bitsandbytes-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 9.9\n")
        path = os.pathsep.join(filter(None, (str(tmp_path), *sys.path)))
        chosen = ("--peers", "bitsandbytes", "--json", "-")
        found = said(small(DYNAMIC8, *chosen, PYTHONPATH=path))
        rows = {row["name"]: row["bytes"] for row in found["rows"] if row["kind"] == PEER}
        assert rows == {
            "bitsandbytes AdamW8bit": 14,  # the codes, neither the map nor the count of steps
            "bitsandbytes quantize_blockwise": pytest.approx(5 + 160 / SIZE),
        }
        assert found["skipped"] == [
            {"name": "bitsandbytes Lion8bit", "reason": "ValueError: no lions here"},
            {"name": "bitsandbytes dequantize_blockwise", "reason": "NotImplementedError:"},
        ]


def test_rounds_are_interleaved() -> None:
    order: list[str] = []

    def contender(name: str, *seconds: float) -> Contender:
        times = iter(seconds)

        def run() -> float:
            order.append(name)
            return next(times)

        return Contender(name, OURS, 12.0, 100, run)

    first, second = contender("a", 9, 9, 1e-7, 2e-7, 9e-7), contender("b", *[1e-7] * 5)
    (a, b), failed = measure([first, second], rounds=3)
    assert order == ["a", "b"] * 5 and failed == []
    assert a.ns == pytest.approx(2) and b.ns == pytest.approx(1), "the first two are warm-up"
    assert b.gigabytes_per_second == pytest.approx(12)


def test_others_are_all_but_this_process_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(0.0, 100.0, 10.0, 1.0), (10.0, 120.0, 25.0, 3.0)])
    monkeypatch.setattr(machine.Watch, "_counts", staticmethod(lambda: next(counts)))
    assert machine.Watch().others() == pytest.approx((0.5, 0.2))


def test_the_tensors_of_gpt2_small() -> None:
    sizes = sizes_of("gpt2", 1)
    assert len(sizes) == 148 and sum(sizes) == 124_439_808
    assert sizes_of("single", 7) == [7]
    tiny = GPT(vocabulary=10, context=5, layers=1, width=2).sizes()
    assert sum(tiny) == 20 + 10 + (4 + 24 + 4 + 42) + 4


def test_what_memory_is_too_short_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_qopt.bench.contenders import ours
    from tvm_qopt.spec import KernelSpec

    free = SimpleNamespace(available=machine.RESERVE + 9 * SIZE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    (tiny,), skipped = ours([KernelSpec.parse(DYNAMIC8)], [SIZE])
    assert "100 elements" in tiny.name
    assert [each.name for each in skipped] == [DYNAMIC8, f"{DYNAMIC8}, NumPy's arrays"]


def test_a_list_has_a_flat_tensor_beside_it() -> None:
    from tvm_qopt.bench.contenders import ours
    from tvm_qopt.spec import KernelSpec

    sizes = GPT(vocabulary=9, context=5, layers=1, width=48).sizes()
    (flat, listed, numpy, _), skipped = ours([KernelSpec.parse(DYNAMIC8)], sizes)
    assert skipped == []
    assert (flat.name, listed.name) == (f"{DYNAMIC8}, one flat tensor", DYNAMIC8)
    assert flat.size == listed.size == numpy.size == sum(sizes)
    assert listed.bytes > flat.bytes  # a scale and a counter more for each last block
    assert all(each.run() > 0 for each in (flat, listed))


class TestArrays:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_they_are_filled_and_placed_as_torch_places_them(self, dtype: str) -> None:
        array = filled(3_000_001, dtype, 0.5)
        assert array.ctypes.data % 4096 == 64 and array.size == 3_000_001
        assert array.dtype == ("float32" if dtype == "float32" else "uint16")
        assert np.count_nonzero(array[-1_000_000:]) > 999_000
        if dtype == "float32":
            assert array.std() == pytest.approx(0.5, rel=0.01)

    def test_copies_share_memory_and_no_cache_line(self) -> None:
        given = [np.arange(n, dtype=t) for n, t in ((7, np.uint8), (300, np.float32), (1, "i4"))]
        copies = placed(given)
        assert [copy.ctypes.data % 64 for copy in copies] == [0, 0, 0]
        for array, copy in zip(given, copies, strict=True):
            np.testing.assert_array_equal(array, copy)
        copies[0][:] = 9
        assert given[0][0] == 0 and copies[1][0] == 0

    def test_parts_of_a_flat_one(self) -> None:
        flat = empty(10, np.float32)
        parts = split(flat, [3, 5, 2])
        parts[1][:] = 1
        assert [part.size for part in parts] == [3, 5, 2] and flat.sum() == 5

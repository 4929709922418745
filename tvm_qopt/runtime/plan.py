"""A call of a kernel that was checked once and can be made at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import HyperOutOfRange, ShapeMismatch
from tvm_qopt.runtime.arguments import check_argument, check_arguments, check_stays, own_arrays
from tvm_qopt.runtime.arrays import copy_from_host, is_torch, on_stream, version_counter, view_of
from tvm_qopt.runtime.calls import Call, bind, run
from tvm_qopt.runtime.capturable import CapturableStep, clock_values, gate_call
from tvm_qopt.runtime.opencl import is_opencl
from tvm_qopt.runtime.scalars import Scalars, check_flag, random_words
from tvm_qopt.runtime.state import read_number, sums_of
from tvm_qopt.spec import GATE, WORKSPACE, norm_tensor

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel


class Plan:
    """A validated call: arguments bound to a kernel.  Make one a parameter, step it every time.

    It keeps the arrays alive.  When an array moves (a new storage), make a new plan.
    workspace: bytes of scratch memory that it holds beside its arguments, for partial norms.
    """

    def __init__(self, kernel: Kernel, given: Mapping[str, Any]) -> None:
        self.kernel = kernel
        spec = kernel.spec
        self._rule = spec.rule_
        self._scalars = Scalars(spec)
        views = check_arguments(spec, kernel.manifest.kind, given)
        self.size = views["param"].size
        self.device = views["param"].device
        kernel.check_runs_on(self.device)
        (own,) = own_arrays(spec, [given["param"]], [views["param"]])
        self.own, self._hyper, self._rng = own, own["hyper"], own.get("rng")
        host = isinstance(self._hyper, np.ndarray)
        self._host_hyper = self._hyper if host else np.zeros(len(spec.scalars), np.float32)
        self.workspace = sum(4 * own[t.name].shape[0] for t in spec.tensors if t.role == WORKSPACE)
        views |= {name: view_of(name, array) for name, array in own.items()}
        self._views = views  # keeps the arrays alive
        self._watched = [
            (n, array, views[n].address) for n, array in given.items() if is_torch(array)
        ]
        self.calls = bind(kernel, views)
        self.mark_written = version_counter(given["param"])

    def step(
        self,
        *,
        step: int,
        grad: Any = None,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        maximize: bool = False,
        seed: int | None = None,
        found_inf: Any = None,
        stream: Any = None,
        **hyper: float,
    ) -> bool:
        """Run the update once; the arrays of the plan change in place.

        step: the number of this update (the first is 1).  hyper: every hyper-parameter of the
        rule (`tvm_qopt.rules`), for adamw lr, beta1, beta2, eps, weight_decay.  grad: a gradient in
        place of the planned one from now on, where its memory has moved (torch's zero_grad frees
        it).  grad_scale: the
        gradient is divided by it (a loss scale); gnorm_scale: and multiplied by it; maximize: and
        its sign is changed.  seed: of stochastic weights (0 by default), with `step` and the place
        of an element all that its rounding depends on.  found_inf: a number or one-element array;
        non-zero leaves everything as it is.  stream: the handle of a CUDA stream or a pyopencl
        queue (of the context of param), the caller's current one (that of param) by default; the
        step is queued there and not waited for.  A CPU has none: there it is None.

        Returns whether the update ran.  It does not, and nothing changes, where found_inf says so
        and where a norm that the rule needs is beyond float32.  A rule with norms waits for them
        on the host.  A float32 found_inf on a GPU is read there, by a kernel, where the rule has no
        norms: then the step returns True whatever it says.  Raises HyperOutOfRange or UnknownName
        before anything is written.
        """
        scalars = self._scalars.of(step, grad_scale, gnorm_scale, hyper)
        check_flag("maximize", maximize)
        if maximize:
            scalars[0] = -scalars[0]
        random = self._random(seed, step)
        if grad is not None:
            self._take_grad(grad)
        calls = self.calls.update
        if found_inf is not None and self._reads_on_device(found_inf):
            calls = [gate_call(self.kernel, self._hyper, found_inf), *calls]
        elif found_inf is not None and read_number("found_inf", found_inf) != 0.0:
            return False
        self.check_that_memory_stays()
        with on_stream(self._hyper, stream):
            self._write(scalars)
            if random is not None:
                copy_from_host(self._rng, random)
            for number in range(len(self._rule.norms)):
                if not self._scalars.finish(number, self.norms(number, stream=stream), scalars):
                    return False
                self._write(scalars)
        run(self.kernel, calls, self.device, like=self._hyper, stream=stream)
        self.mark_written()
        return True

    def capturable(
        self,
        *,
        step: int = 0,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        maximize: bool = False,
        seed: int | None = None,
        found_inf: Any = None,
        **hyper: float,
    ) -> CapturableStep:
        """The steps of this plan with step, hyper-parameters and found_inf on the device.

        step: the number of updates made so far, which the device counts from here.  found_inf: one
        float32 on the device, read at each step; none by default.  The others as for `step`.
        Raises UnsupportedSpec on a CPU, for a rule with norms and for one whose scalars cannot be
        formed on the device.
        """
        scales = {"grad_scale": grad_scale, "gnorm_scale": gnorm_scale}
        values = clock_values(self._scalars, hyper, step=step, maximize=maximize, **scales)
        return CapturableStep(self, values, self._random(seed, step), found_inf)

    def update_calls(self) -> Sequence[Call]:
        """What a step runs when its scalars are there."""
        return self.calls.update

    def _reads_on_device(self, found_inf: Any) -> bool:
        """Whether the device can read found_inf itself."""
        exported = hasattr(found_inf, "__dlpack__") or is_opencl(found_inf)
        if GATE not in self.kernel.entries or self._rule.norms or not exported:
            return False
        view = view_of("found_inf", found_inf)
        return (view.device, view.dtype, view.size) == (self.device, "float32", 1)

    def check_that_memory_stays(self) -> None:
        """Raise where torch has moved or freed the storage of a tensor that was planned."""
        for name, tensor, address in self._watched:
            if self._views[name].size:
                check_stays(name, tensor, address)

    def _take_grad(self, grad: Any) -> None:
        """Read the gradient here from now on."""
        spec, kind = self.kernel.spec, self.kernel.manifest.kind
        if "grad" not in self._views:
            what = f"none: {self._rule.name} reads no gradient"
            raise ShapeMismatch("grad", expected=what, got="one")
        before = self._views["grad"]
        after = check_argument(spec, kind, "grad", grad, self._views)
        self._views["grad"] = after
        self._watched = [w for w in self._watched if w[0] != "grad"]
        if is_torch(grad):
            self._watched.append(("grad", grad, after.address))
        if after.address == before.address:
            return
        if "main_any" in self.kernel.parts:  # its alignment decides the entry point
            self.calls = bind(self.kernel, self._views)
        else:
            self.calls.rebind(spec, "grad", after)

    def check(
        self, *, step: int, grad_scale: float = 1.0, gnorm_scale: float = 1.0, **hyper: float
    ) -> None:
        """Raise what `step` would raise for these scalars; run nothing."""
        self._scalars.of(step, grad_scale, gnorm_scale, hyper)

    def norms(self, number: int = 0, *, stream: Any = None) -> Mapping[str, float]:
        """Run norm pass `number` alone, with the scalars of the last step: name -> Euclidean norm.

        Sums of a block in float32, of the blocks in float64, in one order whatever the threads.
        """
        calls = self.calls.norms[number]
        run(self.kernel, calls, self.device, like=self._hyper, stream=stream)
        with on_stream(self._hyper, stream):
            return {
                name: math.sqrt(sums_of([self.own[norm_tensor(number, name)]])[0])
                for name in self._rule.norms[number].names
            }

    def _random(self, seed: int | None, step: int) -> npt.NDArray[np.int32] | None:
        """What the generator starts from; a seed is for specs that have one."""
        if self._rng is None:
            if seed is not None:
                what = f"no seed: {self.kernel.spec.param_format} weights are not random"
                raise HyperOutOfRange("seed", expected=what, got=repr(seed))
            return None
        return random_words(0 if seed is None else seed, step)

    def _write(self, scalars: list[float]) -> None:
        self._host_hyper[:] = scalars
        if self._host_hyper is not self._hyper:
            copy_from_host(self._hyper, self._host_hyper)

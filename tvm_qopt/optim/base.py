"""The torch optimizer that all classes are: options, state and steps of parameter groups."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tvm_qopt.errors import DeviceMismatch, ShapeMismatch
from tvm_qopt.optim.checkpoint import read, tagged
from tvm_qopt.optim.describe import Description, describe
from tvm_qopt.optim.engine import Engine
from tvm_qopt.optim.foreign import kind_of
from tvm_qopt.optim.foreign.read import read_foreign
from tvm_qopt.optim.forms import Form
from tvm_qopt.optim.options import COMMON, check_names, check_options
from tvm_qopt.optim.shards import largest
from tvm_qopt.optim.state import COUNT
from tvm_qopt.runtime.state import read_number


class QoptOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose step is one compiled kernel for each parameter.

    Made by `tvm_qopt.optim.optimizer_class`, from a rule and the form of its constructor.

    last_step_skipped: whether in the last step a parameter that had a gradient stayed as it was:
    all of them where found_inf was set or the norm for max_grad_norm was not finite, one where a
    norm of LAMB, LARS or LANS was beyond float32.  last_grad_norm: the norm before it was clipped,
    None without max_grad_norm.
    """

    rule: ClassVar[str] = ""
    form: ClassVar[Form] = Form({})
    __signature__: ClassVar[inspect.Signature]

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf for a step
    last_step_skipped: bool = False
    last_grad_norm: float | None = None

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        """The arguments are those of the class's signature."""
        try:
            bound = type(self).__signature__.bind(params, *args, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        bound.apply_defaults()
        defaults = dict(bound.arguments)
        params, overrides = defaults.pop("params"), defaults.pop("overrides")
        super().__init__(params, defaults)
        self._bind_anew()
        for param, own in (overrides or {}).items():
            self.override(param, **own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own beside the optimizer's."""
        if isinstance(param_group, dict):
            check_options(self.rule, self.form, {**self.defaults, **param_group})
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("overrides", {})

    def override(self, param: torch.Tensor, **options: Any) -> None:
        """Give one parameter options that differ from its group's, before its first step.

        For example `optimizer.override(model.embedding.weight, state="float32")`.
        """
        check_names(options, {**self.form.arguments, **COMMON})
        for group in self.param_groups:
            for position, each in enumerate(group["params"]):
                if each is param:
                    own = {**group["overrides"].get(position, {}), **options}
                    check_options(self.rule, self.form, {**group, **own})
                    group["overrides"][position] = own
                    return
        raise ShapeMismatch("param", expected="a parameter of this optimizer", got="another tensor")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what the closure does.

        closure: evaluates the model again and returns the loss.
        """
        loss = None
        _check_not_captured()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None and self._anywhere(read_number("found_inf", found_inf)):
            self.last_step_skipped = True
            return loss
        scale = 1.0 if grad_scale is None else read_number("grad_scale", grad_scale)
        with torch.no_grad():
            outcome = self._update(self.param_groups, self.state, scale)
        self.last_step_skipped, self.last_grad_norm = outcome.skipped, outcome.grad_norm
        return loss

    def _anywhere(self, found_inf: float) -> bool:
        """Whether any process that has a part of a parameter here says to skip."""
        params = (param for group in self.param_groups for param in group["params"])
        return largest(abs(found_inf), params) != 0.0

    def describe(self) -> Description:
        """How each parameter's state is kept and the bytes it takes; print it to see a table."""
        return describe(self.rule, self.form, self.param_groups)

    def nonfinite_count(self) -> int:
        """How many elements were met so far whose gradient or new state was not finite."""
        return sum(int(state[COUNT].sum()) for state in self.state.values() if COUNT in state)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers give it: every tensor as it is, and how it is stored."""
        return tagged(self.rule, self.form, self.param_groups, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, to the bit.

        The numbers (lr, betas ...) become those that were saved, as in torch; how state is stored
        is this optimizer's own, and a state that is stored otherwise raises StateMismatch, which
        names the parameter.  Where this raises nothing has changed.

        A state_dict of torch, bitsandbytes or torchao is recognised and taken over: codes of the
        same levels and blocks as they are, others re-encoded with a warning (StateReencoded).
        """
        saved = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, saved)
            saved = saved if changed is None else changed
        kind, own = kind_of(saved), (self.rule, self.form, self.param_groups)
        groups, states = read(*own, saved) if kind is None else read_foreign(kind, *own, saved)
        self.__setstate__({"state": defaultdict(dict, states), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_anew()

    def _bind_anew(self) -> None:
        """Forget what is bound: parameters or their states are others now."""
        engine = Engine(self.rule, self.form)
        self._update = torch.compiler.disable(engine.step)  # nothing that torch.compile can trace


def _check_not_captured() -> None:
    """Raise where a CUDA graph records this stream: it would repeat the numbers of one step."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        wanted = "a stream that no CUDA graph captures (the step is counted on the host)"
        raise DeviceMismatch("step", expected=wanted, got="one that is captured")

"""The error kinds of tvm_qopt; each is also the built-in that torch raises for the same fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class QoptError(Exception):
    """Base of every error that tvm_qopt raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes, whatever their constructors take."""
        return rebuilt, (type(self), str(self), self.__dict__)


def rebuilt(
    kind: type[QoptError], message: str, attributes: dict[str, Any] | None = None
) -> QoptError:
    """An error of a kind with the message it had elsewhere."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(attributes or {})
    return error


class UnknownName(QoptError, ValueError):
    """A rule, format, target, setting or hyper-parameter that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")


class NameTaken(QoptError, ValueError):
    """A rule or state is registered under a name that another already has."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} is registered twice: give yours another name")


class UnsupportedSpec(QoptError, ValueError):
    """A combination that cannot be built; the message says which part and why."""


class DecisionMismatch(QoptError, ValueError):
    """A decision of a tuning record that the schedule does not know, or no longer allows."""


class RecordInvalid(QoptError, ValueError):
    """A line of a tuning log that is no record; the message has the file and the line."""


class BuildError(QoptError, RuntimeError):
    """The compiler failed, or its child process did."""


class ToolMissing(QoptError, RuntimeError):
    """A program or package that a build needs is not installed; the message names it."""


class ArtifactMissing(QoptError, RuntimeError):
    """No artifact in the store and building is not allowed; the message says the command."""


class ArtifactInvalid(QoptError, RuntimeError):
    """An artifact that must not be loaded: altered, of another schema, or for another machine."""


class StoreError(QoptError, RuntimeError):
    """The store folder cannot be used: not writable, full, or open to other users."""


class ArgumentMismatch(QoptError):
    """An argument that does not fit; the message has its name, what was expected, what came."""

    def __init__(self, name: str, *, expected: str, got: str) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.name, self.expected, self.got = name, expected, got


class ShapeMismatch(ArgumentMismatch, ValueError):
    """Wrong shape, size, layout, overlap or a missing or unknown argument."""


class DtypeMismatch(ArgumentMismatch, TypeError):
    """Wrong element type."""


class DeviceMismatch(ArgumentMismatch, RuntimeError):
    """A tensor that lives on another device than the kernel runs on."""


class HyperOutOfRange(ArgumentMismatch, ValueError):
    """A hyper-parameter outside the range its rule declares, or not a number."""


class StateMismatch(ArgumentMismatch, ValueError):
    """A saved or existing state that is not the one that the optimizer's options ask for."""


class StaleRecord(UserWarning):
    """A tuning record that was not made for this definition or schedule; it is not used."""


class StateReencoded(UserWarning):
    """A state went from one storage to another with other levels, and was rounded on the way."""

"""The one dictionary of methods: names, kinds, parameters, cost. Knows neither models nor pages.

A method module decorates its ``run``; the package's ``__init__`` imports the module by name. Menus, generated
controls, cache keys, exports and the contract tests all read this dictionary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from backend.errors import BadRequest, UnknownMethod
from backend.types import Passes, Scalar

Kind = Literal["token", "upsampler"]
Family = Literal["baseline", "gradient", "ablation", "attention", "prediction", "interpolation", "filter", "learned"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes that a cost formula may use: rows, sequence length, units to ablate, strands (2 with a foil span)."""

    targets: int
    length: int
    units: int
    strands: int = 1


@dataclass(frozen=True, slots=True)
class Method:
    """One registered method.

    Attributes:
        name: Stable lower-case name; appears in links and exports.
        label: Name for menus.
        kind: "token" explains tokens; "upsampler" enlarges feature maps.
        family: For grouping and for the default normalization of displays.
        signed: Whether negative scores mean "against the target"; at default parameters, where a parameter decides.
        additive: Whether scores of tokens may be summed to scores of words.
        params: Frozen dataclass of settings; defaults live there and nowhere else.
        run: The method; see ``backend/saliency/__init__.py`` and ``backend/features/__init__.py`` for signatures.
        cost: Passes as a function of parameters and workload, before the run.
        summary: One sentence for the menu: what question it answers.
        reading: Legend in words: what a high and a low score mean, with the unit.
        default: Whether it is preselected.
        needs_gradient: Whether a backward pass is needed.
    """

    name: str
    label: str
    kind: Kind
    family: Family
    signed: bool
    additive: bool
    params: type[Any]
    run: Callable[..., Any]
    cost: Callable[[Any, Workload], Passes]
    summary: str
    reading: str
    default: bool
    needs_gradient: bool


METHODS_VERSION = 2
"""Part of every key of stored scores and explanations. Raise it whenever a method's numbers change."""

_METHODS: dict[str, Method] = {}
_OLD_NAMES: dict[str, str] = {}  # renamed methods: old name -> name today

F = TypeVar("F", bound=Callable[..., Any])


def register(
    name: str,
    *,
    label: str,
    kind: Kind = "token",
    family: Family,
    signed: bool,
    additive: bool,
    params: type[Any],
    cost: Callable[[Any, Workload], Passes],
    summary: str,
    reading: str,
    default: bool = False,
    needs_gradient: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as a method.

    Raises:
        ValueError: If the name is taken or not lower-case words joined by underscores.
    """

    def wrap(run: F) -> F:
        if name in _METHODS or name in _OLD_NAMES:
            raise ValueError(f"a method named {name!r} is registered already")
        if not name.replace("_", "").isalnum() or name != name.lower():
            raise ValueError(f"method names are lower-case words joined by underscores, not {name!r}")
        _METHODS[name] = Method(
            name, label, kind, family, signed, additive, params, run, cost, summary, reading, default, needs_gradient
        )
        return run

    return wrap


def list_methods(kind: Kind = "token") -> tuple[Method, ...]:
    """Return all methods of a kind, in registration order."""
    _load(kind)
    return tuple(method for method in _METHODS.values() if method.kind == kind)


def get_method(name: str, kind: Kind = "token") -> Method:
    """Return a method by name; renamed methods are found under their old names.

    Raises:
        UnknownMethod: If there is none; the hint lists the known names.
    """
    _load(kind)
    method = _METHODS.get(_OLD_NAMES.get(name, name))
    if method is None or method.kind != kind:
        known = ", ".join(m.name for m in list_methods(kind))
        raise UnknownMethod(f"There is no method named {name!r}.", f"Known methods: {known}.")
    return method


def find_label(name: str, kind: Kind = "token") -> str:
    """Return a method's label; its name if there is no such method here."""
    try:
        return get_method(name, kind).label
    except UnknownMethod:
        return name


def make_params(method: Method, given: Mapping[str, Scalar]) -> Any:
    """Build a method's ``Params`` from plain values, converting strings from the command line.

    Raises:
        BadRequest: If a name is unknown, a value has the wrong type, is out of range or not among the choices.
    """
    fields = {f.name: f for f in dataclasses.fields(method.params)}
    values: dict[str, Scalar] = {}
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise BadRequest(f"{method.label} has no parameter {name!r}.", f"Its parameters: {known}.")
        values[name] = _convert(method, fields[name], value)
    return method.params(**values)


def _convert(method: Method, spec: dataclasses.Field[Any], value: Scalar) -> Scalar:
    wanted: type[Any] = type(spec.default)
    where = f"Parameter {spec.name!r} of {method.label}"
    out: Scalar
    try:
        if wanted is bool:
            known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            out = known[str(value).lower()]
        elif wanted is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        else:
            out = wanted(value)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"{where} must be {wanted.__name__}, not {value!r}.") from error
    low, high = spec.metadata.get("min"), spec.metadata.get("max")
    if (low is not None and not out >= low) or (high is not None and not out <= high):
        raise BadRequest(f"{where} must lie between {low} and {high}, not {out}.")
    choices = spec.metadata.get("choices")
    if choices and out not in choices:
        raise BadRequest(f"{where} must be one of {', '.join(map(str, choices))}, not {out!r}.")
    return out


def params_dict(params: Any) -> dict[str, Scalar]:
    """Return all parameters as plain values, defaults included."""
    return dict(dataclasses.asdict(params))


def _load(kind: Kind) -> None:
    """Import the method modules of a kind. They import torch only inside ``run``, so this is cheap."""
    if kind == "token":
        import backend.saliency
    elif kind == "upsampler":
        import backend.features  # noqa: F401 - as above


def default_params(method: Method) -> dict[str, Scalar]:
    """Return a method's parameters at their defaults."""
    return params_dict(method.params())

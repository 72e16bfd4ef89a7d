"""How much work a request is, counted in passes, before anything runs. Knows sizes and the registry; needs no torch."""

from __future__ import annotations

from backend.registry import Workload, get_method, make_params
from backend.saliency.units import make_units
from backend.types import Passage, Passes, SaliencyRequest


def workload(passage: Passage, request: SaliencyRequest) -> Workload:
    """Return the sizes that cost formulas use."""
    start, stop = request.target
    length = max(1, passage.prompt_length + stop - 1)
    return Workload(
        targets=max(1, stop - start),
        length=length,
        units=len(make_units(passage.tokens[:length], request.level)),
        strands=2 if request.foil else 1,
    )


def planned_passes(passage: Passage, request: SaliencyRequest) -> Passes:
    """Return the passes that all methods of a request will take together.

    Raises:
        BadRequest: If a method or parameter does not exist.
    """
    work = workload(passage, request)
    forward = backward = 0.0
    for spec in request.methods:
        method = get_method(spec.name)
        passes = method.cost(make_params(method, dict(spec.params)), work)
        forward, backward = forward + passes.forward, backward + passes.backward
    return Passes(forward, backward)

"""The method registry: names, parameters from plain values, refusals that say what to do."""

import dataclasses
from dataclasses import dataclass, field

import pytest

from backend import registry
from backend.errors import BadRequest, UnknownMethod
from backend.registry import default_params, get_method, list_methods, make_params
from backend.types import Passes

NAMES = {"uniform", "gradient_norm", "input_x_gradient", "integrated_gradients", "occlusion"}


@dataclass(frozen=True)
class Params:
    steps: int = field(default=8, metadata={"min": 1, "max": 64})
    scale: float = field(default=0.5, metadata={"min": 0.0, "max": 1.0})
    kind: str = field(default="hide", metadata={"choices": ("hide", "delete")})
    loud: bool = False


@pytest.fixture
def method():
    return registry.Method(
        "m", "M", "token", "gradient", True, True, Params, lambda: None, lambda p, w: Passes(), "", "", False, False
    )


def test_the_promised_names_are_registered():
    assert {method.name for method in list_methods()} >= NAMES


def test_every_method_says_what_its_colors_mean_and_what_it_costs():
    for method in list_methods():
        cost = method.cost(method.params(), registry.Workload(targets=1, length=64, units=64))
        assert cost.forward >= 0
        assert (cost.backward > 0) == method.needs_gradient
        assert method.summary.endswith((".", "?"))
        assert method.reading.endswith(".")
        assert dataclasses.is_dataclass(method.params)
        for spec in dataclasses.fields(method.params):
            assert spec.metadata.get("help"), f"{method.name}.{spec.name} has no help"
        assert make_params(method, default_params(method)) == method.params()


def test_an_unknown_method_names_the_known_ones():
    with pytest.raises(UnknownMethod, match="gradient_norm"):
        get_method("gradnorm")


def test_values_from_the_command_line_are_converted(method):
    made = make_params(method, {"steps": "16", "scale": "0.25", "kind": "delete", "loud": "yes"})
    assert made == Params(16, 0.25, "delete", True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"step": 3}, "no parameter 'step'.*steps"),
        ({"steps": "many"}, "must be int"),
        ({"steps": 1.5}, "must be int"),
        ({"steps": 0}, "between 1 and 64"),
        ({"scale": "nan"}, "between"),
        ({"scale": float("inf")}, "between"),
        ({"kind": "burn"}, "one of hide, delete"),
        ({"loud": "perhaps"}, "must be bool"),
    ],
)
def test_bad_values_are_refused(method, given, says):
    with pytest.raises(BadRequest, match=says):
        make_params(method, given)


def test_a_name_cannot_be_taken_twice():
    with pytest.raises(ValueError, match="registered already"):
        registry.register(
            "uniform", label="", family="baseline", signed=False, additive=False, params=Params,
            cost=lambda p, w: Passes(), summary="", reading="",
        )(lambda: None)  # fmt: skip


def test_cache_keys_differ_in_every_field():
    from backend.types import AnswerRequest, Decoding, MethodSpec, ModelRef, Prompt, SaliencyRequest, Turn, cache_key

    base = SaliencyRequest(ModelRef(), Prompt("a"), (1, 2), (0, 1), (MethodSpec("uniform"),))
    variants = [
        base,
        dataclasses.replace(base, model=ModelRef(revision="x")),
        dataclasses.replace(base, prompt=Prompt("b")),
        dataclasses.replace(base, prompt=Prompt(turns=(Turn("user", "a"),))),
        dataclasses.replace(base, answer_ids=(12,)),
        dataclasses.replace(base, target=(0, 2)),
        dataclasses.replace(base, methods=(MethodSpec.of("uniform", {"p": 1}),)),
        dataclasses.replace(base, methods=(MethodSpec.of("uniform", {"p": "1"}),)),
        dataclasses.replace(base, foil="x"),
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, decoding=Decoding()),
        AnswerRequest(ModelRef(), Prompt("a")),
    ]
    assert len({cache_key(variant) for variant in variants}) == len(variants)
    long = Prompt("x" * 600_000)
    changed = Prompt("x" * 300_000 + "y" + "x" * 299_999)
    assert cache_key(long) != cache_key(changed), "keys must see every character"
    with pytest.raises(TypeError):
        cache_key(object())

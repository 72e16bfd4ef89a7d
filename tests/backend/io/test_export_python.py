import ast

import pytest

from backend.io.export import to_python_call
from backend.types import Decoding, MethodSpec, ModelRef, Prompt, SaliencyRequest, Turn

NASTY = "a\"b'c\\d\n\t{x}\u202e\ud800\x00 \"\"\" ''' 你好 👩\u200d👧 __import__('os')"


def requests():
    yield SaliencyRequest(ModelRef(), Prompt("The capital of France is"), (7042,), (0, 1), (MethodSpec.of("uniform"),))
    yield SaliencyRequest(
        ModelRef(NASTY, "main", "cuda:1", "bfloat16"),
        Prompt(turns=(Turn("system", NASTY), Turn("user", ""))),
        (1, 2, 3),
        (1, 3),
        (MethodSpec.of("occlusion", {"operator": "hide", "batch": 8}), MethodSpec.of("gradient_norm", {"p": 1.5})),
        foil=NASTY,
        objective="logit",
        level="word",
        decoding=Decoding(5, 0.7, 0.9, 3),
        seed=11,
    )
    yield SaliencyRequest(ModelRef(), Prompt(NASTY), (), (0, 1), (MethodSpec.of("m", {"x": float("inf")}),))


class FakeEngine:
    asked = None

    def run(self, request):
        FakeEngine.asked = request
        return type("Explanation", (), {"results": ()})


@pytest.mark.parametrize("request_", list(requests()), ids=["plain", "all fields", "odd values"])
def test_the_program_asks_the_same_question(request_):
    code = to_python_call(request_)
    code.encode("utf-8")
    tree = ast.parse(code)
    assert [node.module for node in tree.body if isinstance(node, ast.ImportFrom)] == [
        "backend.engine",
        "backend.types",
    ]
    del tree.body[0]
    exec(compile(tree, "call", "exec"), {"Engine": FakeEngine})
    assert FakeEngine.asked == request_


def test_defaults_are_left_out():
    code = to_python_call(next(requests()))
    assert "foil" not in code
    assert "seed" not in code

"""Explanations to look at: made-up scores on texts that are hard to draw."""

import re

import numpy as np

from backend.types import Check, Passes, Token
from tests.support.explanations import explanation, result

HOSTILE = [
    "<img src=x onerror=window.__xss=1>",
    "</script>",
    "<script>window.__xss=2</script>",
    " $x$",
    " _y_",
    " **b**",
    " ![a](http://example.test/a.png)",
    " &lt;i&gt;",
    " javascript:window.__xss=3",
    " \u202eevil",
    " \u200b",
    " \x00",
    " \ud800",
    " =1+1",
    ' "quoted"',
    " a\u2028b",
    " שלום",
    " עולם",
    "<!--",
    "]]>",
]


def split(text):
    """Cut a text as a tokenizer would, roughly."""
    return re.findall(r" ?[^\W\d_]+| ?\d| ?[^\w\s]|\s", text)


def tokens_of(parts):
    """Tokens from (role, special, texts); a tuple of texts is one character in pieces."""
    out = []
    group = 0
    for role, special, texts in parts:
        for piece in texts:
            for text in piece if isinstance(piece, tuple) else (piece,):
                out.append(Token(1000 + 7 * len(out), text, role, group, special))
            group += 1
    return tuple(out)


def scores_for(tokens, count, seed):
    """Signed scores, largest on one word, with a sink on the first token."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(count, len(tokens) + count - 1)) * rng.gamma(0.6, size=len(tokens) + count - 1)
    scores[:, 0] = 9
    for row in range(count):
        scores[row, len(tokens) + row :] = 0
    return scores.astype(np.float32)


def case(prompt, answer, target=(0, 1), **more):
    """An explanation by four methods; the last one has no signal."""
    count = target[1] - target[0]
    before = (*prompt, *answer[: target[0]])
    scores = scores_for(before, count, 3)
    leave_out = scores_for(before, count, 5)
    measured = np.ones(scores.shape[1], bool)
    measured[[i for i, token in enumerate(before) if token.role == "template"]] = False
    results = (
        result("gradient_norm", np.abs(scores), signed=False, passes=Passes(1, 1)),
        result(
            "input_x_gradient",
            scores * 0.1,
            signed=True,
            passes=Passes(1, 1),
            checks=(Check("sum", 0.4, "warn", "The scores add up to 2.79, the log-probability is 7.18."),),
        ),
        result("occlusion", leave_out, signed=True, passes=Passes(23.5), measured=measured),
        result("uniform", np.zeros_like(scores), signed=False, passes=Passes()),
    )
    return explanation(prompt, answer, results, target=target, **more)


def demo(target=(3, 4), **more):
    prompt = tokens_of(
        [
            ("bos", True, ["<|im_start|>"]),
            ("template", False, ["system", "\n"]),
            ("system", False, split("You are a helpful assistant. Answer in one short sentence.")),
            ("template", True, ["<|im_end|>"]),
            ("template", False, ["\n"]),
            ("template", True, ["<|im_start|>"]),
            ("template", False, ["user", "\n"]),
            (
                "user",
                False,
                split("Marie lives in Lyon and works at a bakery near the river.\nHer brother Paul moved to "),
            ),
            (
                "user",
                False,
                split("Lisbon last year. In which city does Marie buy her bread, and why?\n\tThink first."),
            ),
            ("template", True, ["<|im_end|>"]),
            ("template", False, ["\n"]),
            ("template", True, ["<|im_start|>"]),
            ("template", False, ["assistant", "\n"]),
        ]
    )
    answer = tokens_of(
        [("answer", False, split("She buys it in Lyon, because she works there.")), ("answer", True, ["<|im_end|>"])]
    )
    return case(prompt, answer, target, **more)


def scripts(target=(2, 4)):
    prompt = tokens_of(
        [
            ("bos", True, ["<s>"]),
            ("user", False, ["مر", "حبا", " بال", "عالم", "،", " كيف", " حالك", "؟", "\n"]),
            ("user", False, split("Hebrew inside a line: ")),
            ("user", False, ["של", "ום", " עו", "לם", " and", " back", ".", "\n"]),
            ("user", False, ["नम", "स्ते", " दुनिया", "।", "\n", "今天", "天气", "很", "好", "。", "\n"]),
            (
                "user",
                False,
                [("👩", "\u200d", "👩", "", "", "\u200d", "👧"), (" 👍", "🏽"), " 🏴", "é", " e\u0301", "สวัสดี", "\n"],
            ),
        ]
    )
    answer = tokens_of([("answer", False, ["نعم", "،", " أنا", " بخير", ".", " 好"])])
    return case(prompt, answer, target)


def hostile(target=(1, 2)):
    prompt = tokens_of([("bos", True, ["<s>"]), ("user", False, HOSTILE)])
    answer = tokens_of([("answer", False, ["<b>yes</b>", " \u202e$y$", "</script><img src=y onerror=window.__xss=4>"])])
    return case(prompt, answer, target)


def large(count=4096):
    words = split("The quick brown fox jumps over the lazy dog near the old river bank. ")[:-1]
    texts = [words[i % len(words)] for i in range(count - 1)]
    texts = [text if i % 400 else "\n" for i, text in enumerate(texts, 1)]
    return case(
        tokens_of([("bos", True, ["<s>"]), ("user", False, texts)]), tokens_of([("answer", False, [" yes", "."])])
    )


CASES = {
    "demo": demo,
    "span": lambda: demo((3, 6)),
    "scripts": scripts,
    "hostile": hostile,
    "hostile_span": lambda: hostile((0, 3)),
    "large": large,
}

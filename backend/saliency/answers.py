"""What a model answers when parts of the prompt are taken out, and how similar that is to its answer to the whole.

Answers are compared by the cosine of their TF-IDF vectors, over the model's own tokens, so that every script is
treated alike and no second model is needed. It sees shared words, not meaning: "yes" and "no" differ as much as any
two words, a paraphrase looks different.
Knows ids and masks; knows nothing of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from sklearn.feature_extraction.text import TfidfVectorizer

from backend.errors import NotApplicable
from backend.models.generation import end_ids, generate_ids
from backend.models.language import LanguageModel
from backend.types import Decoding


def similarities(
    model: LanguageModel,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    keep: npt.NDArray[np.bool_],
    max_new_tokens: int,
    progress: Callable[[float], None],
) -> tuple[npt.NDArray[np.float64], float]:
    """Let the model answer the whole prompt and every part of it, greedily.

    Args:
        model: The model.
        ids: The prompt.
        spans: Half-open spans of the prompt that masks speak of; everything else stays.
        keep: bool ``(mask, span)``; spans that are not kept are deleted, and the rest moves up.
        max_new_tokens: Longest answer.
        progress: Called with the part that is done, 0 to 1, once per generated token; may raise to stop.

    Returns:
        float64 ``(mask,)`` in [0, 1], NaN where no token of the prompt is left; and the tokens that were run, prompts
        included.

    Raises:
        NotApplicable: If the model cannot generate, or has nothing to say to the whole prompt.
    """
    if not model.module.can_generate():
        raise NotApplicable("This model cannot generate answers.", "Choose the value log_prob.")
    decoding = Decoding(max_new_tokens=max_new_tokens)
    ends = end_ids(model)
    source = np.array(ids, np.int64)
    texts: list[str | None] = []
    tokens = 0
    for number, mask in enumerate([np.ones(len(spans), bool), *keep]):
        stays = np.ones(len(source), bool)
        for (begin, end), kept in zip(spans, mask, strict=True):
            stays[begin:end] = kept
        left = source[stays].tolist()
        if not left:
            texts.append(None)
            continue

        def tick(done: int, total: int, number: int = number) -> None:
            progress((number + done / total) / (len(keep) + 1))

        tick(0, 1)
        said = generate_ids(model, left, decoding, tick)
        tokens += len(left) + len(said)
        texts.append(" ".join(str(token) for token in said if token not in ends))
    if not texts[0]:
        raise NotApplicable(
            "The model has nothing to say to the whole prompt, so no answer can be compared with it.",
            "Choose the value log_prob.",
        )
    there = [index for index, text in enumerate(texts) if text is not None]
    vectors = TfidfVectorizer(analyzer=str.split).fit_transform([texts[index] for index in there])
    found = np.full(len(texts), np.nan)
    found[there] = np.clip((vectors @ vectors[0].T).toarray()[:, 0], 0.0, 1.0)
    return found[1:], float(tokens)

"""Change what the model attends to, and see what it says then: cause, not only color.

Three interventions on prompt tokens, together or alone: add a number to the attention scores of a key in every layer
and head (the parameter that attention bias optimization learns), hide a key, take a token out of the text. The first
two keep all positions; the last one makes a shorter text. Looks at the distribution at one place of the answer, and
answers anew if asked to, greedily.

Every run first shows that the mask alone changes nothing: with no bias the logits are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from backend.errors import BadRequest, NotApplicable
from backend.models.characters import token_text
from backend.models.generation import end_ids
from backend.models.language import LanguageModel
from backend.models.passage import append_answer
from backend.saliency.masks import additive, visible_keys
from backend.saliency.passes import Mask, logits_at
from backend.saliency.question import tolerance_of
from backend.types import Candidate, Intervention, InterventionRequest, Passage, Tick, no_tick

STRONGEST = 20.0
"""Largest bias, either way; e to the power of it is beyond what float32 attention can show."""

_SHOWN = 6  # candidates on each side


@torch.no_grad()
def intervene(
    model: LanguageModel, passage: Passage, request: InterventionRequest, tick: Tick = no_tick
) -> Intervention:
    """Run the model with and without the intervention.

    Args:
        model: The model; unchanged afterwards.
        passage: Prompt and answer of the request.
        request: What to change.
        tick: Progress and cancellation, once per pass.

    Raises:
        BadRequest: If an index, a bias or the place is out of range, or nothing would be left.
        NotApplicable: If the model takes no attention mask of ours.
    """
    _check(passage, request)
    total = 3 + request.new_tokens
    place = passage.prompt_length + request.at
    tick(0, total)
    plain = logits_at(model, torch.tensor([passage.ids[:place]], device=model.device), [place - 1])[0, 0]
    if not torch.isfinite(plain).all():
        raise NotApplicable("The model's logits are not finite numbers.", "Load the model in float32.")
    before = plain.softmax(-1)
    tick(1, total)
    text = _Text.of(model, passage, request, place + request.new_tokens)
    if text.visible is not None:
        _require_neutral(model, passage.ids[:place], plain)
    tick(2, total)
    after = _next(model, text, text.ids + passage.ids[passage.prompt_length : place]).softmax(-1)
    new_ids: list[int] = []
    if request.new_tokens:
        ends = end_ids(model)
        for token in _greedy(model, text, request.new_tokens):
            new_ids.append(token)
            tick(2 + len(new_ids), total)
            if token in ends:
                break
    own = request.answer_ids[request.at]
    candidates = _candidates(model, before, after, own)
    return Intervention(
        candidates,
        target=[candidate.id for candidate in candidates].index(own),
        distance=float((before - after).abs().sum() / 2),
        answer=append_answer(model, _prompt(passage), new_ids).answer_tokens if new_ids else (),
        first_change=_first_change(request.answer_ids, new_ids),
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """The changed prompt: ids, a number per key, keys that are hidden, and who may look at whom."""

    ids: tuple[int, ...]
    bias: Tensor
    hidden: Tensor
    visible: Mask | None

    @classmethod
    def of(cls, model: LanguageModel, passage: Passage, request: InterventionRequest, length: int) -> _Text:
        removed = set(request.removed)
        kept = [i for i in range(passage.prompt_length) if i not in removed]
        biases, hidden = dict(request.biases), set(request.hidden)
        bias = torch.zeros(length, device=model.device)
        gone = torch.zeros(length, dtype=torch.bool, device=model.device)
        for at, index in enumerate(kept):
            bias[at] = biases.get(index, 0.0)
            gone[at] = index in hidden
        visible = None
        if biases or hidden:
            visible = visible_keys(model, length)
            if visible is None:
                raise NotApplicable(
                    "This model takes no attention mask of ours.", "Take tokens out of the text instead."
                )
        return cls(tuple(passage.ids[i] for i in kept), bias, gone, visible)

    def mask(self, start: int, stop: int, dtype: torch.dtype) -> Mask | None:
        """Mask of queries ``start`` to ``stop`` over keys 0 to ``stop``; None where nothing is changed."""
        if self.visible is None:
            return None
        return additive(self.visible, start, stop, self.hidden[None], dtype, self.bias)


def _check(passage: Passage, request: InterventionRequest) -> None:
    if not 0 <= request.at < len(request.answer_ids):
        raise BadRequest(f"The answer has {len(request.answer_ids)} tokens; there is none at {request.at}.")
    named = [*(index for index, _ in request.biases), *request.hidden, *request.removed]
    if any(not 0 <= index < passage.prompt_length for index in named):
        raise BadRequest(
            f"The prompt has {passage.prompt_length} tokens, numbered from 0.", "Choose tokens of the prompt."
        )
    if any(not abs(bias) <= STRONGEST for _, bias in request.biases):
        raise BadRequest(f"A bias must lie between -{STRONGEST:g} and {STRONGEST:g}.")
    if len(set(request.removed)) == passage.prompt_length:
        raise BadRequest("Nothing of the prompt would be left.", "Keep at least one token.")


def _require_neutral(model: LanguageModel, ids: Sequence[int], plain: Tensor) -> None:
    """Assert that our mask without any change gives the model's own logits."""
    visible = visible_keys(model, len(ids))
    gap = float("inf")
    if visible is not None:
        mask = additive(visible, 0, len(ids), None, model.module.dtype)
        logits = logits_at(model, torch.tensor([list(ids)], device=model.device), [len(ids) - 1], mask=mask)
        gap = float((logits[0, 0] - plain).abs().max())
    if not gap <= tolerance_of(model, max(1.0, float(plain.abs().max()))):
        raise NotApplicable(
            f"With our attention mask and no bias, this model's logits move by {gap:.1e}; they should not move at all.",
            "Take tokens out of the text instead.",
        )


def _next(model: LanguageModel, text: _Text, ids: tuple[int, ...]) -> Tensor:
    """Logits of what follows, shape ``(vocabulary,)``."""
    mask = text.mask(0, len(ids), model.module.dtype)
    return logits_at(model, torch.tensor([ids], device=model.device), [len(ids) - 1], mask=mask)[0, 0]


def _greedy(model: LanguageModel, text: _Text, most: int) -> Iterator[int]:
    """Answer greedily; the prompt's keys and values are computed once."""
    cache = DynamicCache()  # without the config it keeps all keys; windows are in the mask
    done, ids = 0, list(text.ids)
    for _ in range(most):
        logits = logits_at(
            model,
            torch.tensor([ids[done:]], device=model.device),
            [len(ids) - done - 1],
            position_ids=torch.arange(done, len(ids), device=model.device)[None],
            mask=text.mask(done, len(ids), model.module.dtype),
            cache=cache,
        )
        done = len(ids)
        ids.append(int(logits[0, 0].argmax()))
        yield ids[-1]


def _candidates(model: LanguageModel, before: Tensor, after: Tensor, own: int) -> tuple[Candidate, ...]:
    count = min(_SHOWN, len(before))
    ids = {own, *before.topk(count).indices.tolist(), *after.topk(count).indices.tolist()}
    made = [Candidate(i, token_text(model.tokenizer, i), float(before[i]), float(after[i])) for i in ids]
    return tuple(sorted(made, key=lambda c: (-c.before, c.id)))


def _prompt(passage: Passage) -> Passage:
    return Passage(passage.prompt_tokens, passage.prompt_length, passage.rendered)


def _first_change(answer: Sequence[int], new: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(answer, new, strict=False)) if a != b), None)

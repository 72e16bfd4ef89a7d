"""The scores of our gradient and occlusion methods, computed by other libraries on the same model and text."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from captum.attr import FeatureAblation, InputXGradient, IntegratedGradients, Saliency
from torch import Tensor

from backend.models.placement import free_bytes
from backend.saliency.embeddings import baseline_vector
from backend.saliency.gradients import activation_bytes, inputs_at_once
from backend.saliency.question import Question

Rival = tuple[str, str, Callable[[], Any]]
"""Name for the table, the method of ours that computes the same, the call."""


def rivals(question: Question, text: str, steps: int) -> list[Rival]:
    """The same scores by Captum, and by Inseq where it is installed.

    Batches are those of our methods. Left alone, Captum puts all path points into one pass; that is measured too
    where it fits into half of the free memory.
    """
    model, target = question.model, question.strands[0].tokens[0]
    batch = inputs_at_once(question, steps)
    e = model.embedding(torch.tensor([question.ids], device=model.device)).detach().requires_grad_()
    start = baseline_vector(model, "mean").to(e.dtype).expand_as(e)
    columns = torch.arange(e.shape[1], device=e.device)[None, :, None].expand_as(e)

    def score(embedded: Tensor) -> Tensor:
        logits = model.module(inputs_embeds=embedded, use_cache=False, logits_to_keep=1).logits[:, -1]
        return logits.float().log_softmax(-1)[:, target]

    def integrate(size: int | None) -> Callable[[], Any]:
        return lambda: IntegratedGradients(score).attribute(
            e, baselines=start, n_steps=steps, method="riemann_middle", internal_batch_size=size
        )

    @torch.no_grad()
    def ablate() -> Any:
        return FeatureAblation(score).attribute(e, baselines=start, feature_mask=columns, perturbations_per_eval=batch)

    calls: list[Rival] = [
        ("Captum gradient_norm", "gradient_norm", lambda: Saliency(score).attribute(e, abs=False).norm(dim=-1)),
        ("Captum input_x_gradient", "input_x_gradient", lambda: InputXGradient(score).attribute(e).sum(-1)),
        ("Captum integrated_gradients", "integrated_gradients", integrate(batch)),
        ("Captum occlusion (replace)", "occlusion (replace)", ablate),
    ]
    whole = steps * len(question.ids) * activation_bytes(model)
    if whole < 0.5 * (free_bytes(model.device) or 0):
        calls.append(("Captum integrated_gradients, default batch", "integrated_gradients", integrate(None)))
    if importlib.util.find_spec("inseq") is None:
        print("Inseq is not installed here and was not measured.")
        return calls
    import inseq

    wrapped = inseq.load_model(model.module, "saliency", tokenizer=model.tokenizer)
    full = text + str(model.tokenizer.decode([target]))

    def by_inseq(method: str, **more: Any) -> Callable[[], Any]:
        return lambda: wrapped.attribute(text, full, method=method, show_progress=False, **more)

    return [
        *calls,
        ("Inseq gradient_norm", "gradient_norm", by_inseq("saliency")),
        ("Inseq input_x_gradient", "input_x_gradient", by_inseq("input_x_gradient")),
        (
            "Inseq integrated_gradients",
            "integrated_gradients",
            by_inseq("integrated_gradients", n_steps=steps, internal_batch_size=batch),
        ),
        ("Inseq occlusion (replace)", "occlusion (replace)", by_inseq("occlusion")),
    ]

"""What each kind of request computes, on a model that is ready. Knows nothing of queues, leases or where results go.

Imported by the worker at its first job, since everything behind it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.errors import BadRequest
from backend.evaluation.faithfulness import faithfulness
from backend.evaluation.sanity import sanity
from backend.io.kept import KeptResults
from backend.models.cutting import cut_prompt
from backend.models.generation import answer
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.saliency.asked import request_of
from backend.saliency.explain import explain
from backend.saliency.intervention import intervene
from backend.settings import Settings
from backend.types import (
    AnswerRequest,
    CutRequest,
    Explanation,
    FaithfulnessRequest,
    InterventionRequest,
    Passage,
    Prompt,
    SaliencyRequest,
    Tick,
    WorkRequest,
)


def compute(
    model: LanguageModel,
    request: WorkRequest,
    settings: Settings,
    kept: KeptResults,
    tick: Tick,
    stage: Callable[[str], None],
) -> Any:
    """Compute what a request asks for.

    Args:
        model: The request's model, which nobody else uses meanwhile.
        request: The request.
        settings: Limits on prompts.
        kept: Where scores of single methods and saved explanations are found.
        tick: Progress and cancellation.
        stage: Called with a few words on what is being done.

    Returns:
        An ``Answer``, ``Explanation``, ``Cut``, ``Intervention``, ``Faithfulness`` or tuple of ``MethodSanity``.
    """

    def passage_of(prompt: Prompt, answer_ids: tuple[int, ...], room: int = 1) -> Passage:
        encoded = encode_prompt(model, prompt, settings, room=max(len(answer_ids), room))
        return append_answer(model, encoded, answer_ids)

    match request:
        case AnswerRequest():
            stage("Answering" if request.continuation is None else "Reading")
            return answer(model, request, tick, settings)
        case SaliencyRequest():
            stage("Explaining")
            passage = passage_of(request.prompt, request.answer_ids)
            return explain(
                model, passage, request, tick,
                recall=kept.get_attribution, remember=kept.put_attribution, shelf=kept.store,
            )  # fmt: skip
        case CutRequest():
            given = request.continuation
            room = request.room if given is None else max(1, len(encode_text(model, given)))
            return cut_prompt(model, request.prompt, request.keep, limits=settings, room=room)
        case InterventionRequest():
            stage("Trying it out")
            return intervene(
                model, passage_of(request.prompt, request.answer_ids, request.new_tokens or 1), request, tick
            )
        case FaithfulnessRequest():
            stage("Hiding what ranks highest")
            return faithfulness(model, _saved(kept, request.result), tick, seed=request.seed)
    stage("Testing the methods")
    explanation = _saved(kept, request.result)
    asked = request_of(explanation)
    if asked is None:
        raise BadRequest("This version cannot run all methods of this result again.", "Ask anew, then test.")
    return sanity(model, explanation.passage, asked, tick)


def _saved(kept: KeptResults, key: str) -> Explanation:
    found = kept.get(key)
    if not isinstance(found, Explanation):
        raise BadRequest("The server no longer keeps this result.", "Run the methods again.")
    return found

"""Token saliency: type a prompt, let a model answer, click a word of the answer, see what drove it."""

import streamlit as st

from backend.saliency.asked import answer_request_of
from backend.types import Answer, Explanation
from components.answer_panel import answer_panel
from components.cut_offer import cut_offer
from components.explain_form import explain_form
from components.job_panel import job_panel
from components.open_result import close_opened, open_controls, opened_result, still_as_opened
from components.page import bootstrap, errors_shown
from components.prompt_form import fill_prompt_later, prompt_form
from components.result_view import opened_view, result_view
from components.run_gate import run_gate

bootstrap("Token saliency")
st.title("Which tokens drove the answer?")
open_controls()
asked, anew = prompt_form()
if anew:
    close_opened()

opened = opened_result()
scene: Answer | Explanation | None = opened
if opened is not None:
    asked = answer_request_of(opened)
elif asked is not None:
    scene = job_panel("answer", asked)
    shorter = cut_offer(asked) if scene is None else None
    if shorter is not None:
        fill_prompt_later(shorter)
        st.rerun()

if scene is None and asked is None:
    st.caption("Press Answer, or open an example. Then click a word of the answer.")
if scene is not None and asked is not None:
    answer_ids, span, target = answer_panel(scene)
    with errors_shown():
        request = explain_form(asked, answer_ids, span, target)
        if opened is not None and still_as_opened(request):
            opened_view(opened, request)
        else:
            explanation = run_gate(request, scene.passage)
            if explanation is not None:
                result_view(explanation, request)

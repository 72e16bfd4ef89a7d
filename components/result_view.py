"""An explanation as a person reads it: heat rows, numbers, matrix, trust, export."""

from __future__ import annotations

import streamlit as st

from backend.io import bundle
from backend.io.board import build_board
from backend.io.export import CSV_ENCODING, to_csv, to_html, to_python_call
from backend.saliency.agreement import agreement
from backend.saliency.asked import model_ref_of, request_of
from backend.saliency.reading import read, segment_shares, traits_of
from backend.saliency.units import level_rule
from backend.types import Explanation, ModelRef, SaliencyRequest, TokenAttribution, visible
from components.explain_form import MOST_METHODS
from components.heatmap import target_source_heatmap
from components.open_result import remember_shown
from components.token_strip import token_board
from components.trust_view import check_line, faithfulness_view, needle_remarks, sanity_view
from components.what_if import what_if


def result_view(explanation: Explanation, request: SaliencyRequest | None) -> None:
    """Draw an explanation.

    Args:
        explanation: What to draw; needs no model.
        request: The request that it answers, for the Python call; None if it cannot be asked here.
    """
    for note in explanation.notes:
        _plain("info", note)
    for result in explanation.results:
        if result.refusal:
            _plain("block", f"{traits_of(result).label}: {result.refusal}")
    scored = [result for result in explanation.results if result.scores is not None]
    if not scored:
        remember_shown(explanation)
        return
    shown = scored[:MOST_METHODS]
    if len(scored) > len(shown):
        st.caption(f"{len(scored)} methods have scores; the first {MOST_METHODS} are shown. An export holds them all.")
    rows = tuple(range(len(explanation.targets)))
    ref = request.model if request else model_ref_of(explanation.model)
    st.session_state.setdefault("s_outside", True)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        shared = st.toggle(
            "One scale for all methods",
            key="s_shared",
            persist_state="session",
            help="Off: each method's largest score has full color. On: the same color means the same share.",
        )
        outside = st.toggle("Count BOS and template in shares", key="s_outside", persist_state="session")
        _export(explanation, request)
    board = build_board(
        explanation, shown, level=explanation.level, shared_scale=shared, rows=rows, count_outside=outside,
        remarks=needle_remarks(explanation),
    )  # fmt: skip
    token_board(board, key="s_board")
    st.caption(level_rule(explanation.level))
    tabs = ["Numbers", "Checks", "Faithfulness", "What if?", "Origin"]
    if len(explanation.targets) > 1:
        tabs.insert(0, "Target × source")
    for name, tab in zip(tabs, st.tabs(tabs, key="s_tab", on_change="rerun"), strict=True):
        if not tab.open:  # only the chosen tab is drawn
            continue
        with tab:
            if name == "Numbers":
                _numbers(explanation, shown, rows, outside)
            elif name == "Checks":
                _checks(explanation, shown, ref)
            elif name == "Faithfulness":
                faithfulness_view(explanation, ref, remember_shown(explanation))
            elif name == "What if?":
                what_if(explanation, shown, ref)
            elif name == "Origin":
                _origin(explanation)
            else:
                _matrix(explanation, shown)
    remember_shown(explanation)  # last: writing to disk must not delay the drawing


def opened_view(explanation: Explanation, controls: SaliencyRequest | None) -> None:
    """Draw a result that was opened, and say so where the controls cannot show what it was made with."""
    request = request_of(explanation)
    if request != controls:
        _plain(
            "info",
            "The controls above cannot show all settings that this result was made with; the tab Origin lists them. "
            "A change of a control asks anew, with the controls as they stand.",
        )
    result_view(explanation, request)


def _numbers(
    explanation: Explanation, shown: list[TokenAttribution], rows: tuple[int, ...], count_outside: bool
) -> None:
    table = []
    for result in shown:
        segments = segment_shares(read(explanation, result, rows, explanation.level), count_outside=count_outside)
        table.append(
            {
                "method": traits_of(result).label,
                "time": f"{result.seconds:.2f} s",
                "forward passes": f"{result.passes.forward:.4g}",
                "backward passes": f"{result.passes.backward:.4g}",
                "from store": "yes" if result.from_cache else "no",
                **{f"{role} share": f"{share:.1%}" for role, share in segments.shares.items()},
                "shares are": segments.share_name,
            }
        )
    st.table(table, border="horizontal", hide_index=True)
    pairs = agreement(explanation, shown, rows, explanation.level)
    if not pairs:
        st.caption("Choose a second method to see how far they agree.")
        return
    labels = {result.method: traits_of(result).label for result in shown}
    st.table(
        [
            {
                "methods": f"{labels[pair.first]} and {labels[pair.second]}",
                "rank correlation": "–" if pair.spearman is None else f"{pair.spearman:.2f}",
                f"top {pair.k} in common": "–" if pair.overlap is None else f"{pair.overlap:.0%}",
                "by chance": f"{pair.chance:.0%}",
                "note": pair.reason or pair.basis,
            }
            for pair in pairs
        ],
        border="horizontal",
        hide_index=True,
    )


def _checks(explanation: Explanation, shown: list[TokenAttribution], ref: ModelRef) -> None:
    for result in shown:
        st.markdown(f"**{traits_of(result).label}**")
        if result.checks:
            st.text("\n".join(check_line(check) for check in result.checks))
        else:
            st.caption("This method makes no claim that could be checked.")
    st.divider()
    sanity_view(ref, remember_shown(explanation))


def _origin(explanation: Explanation) -> None:
    model = explanation.model
    st.text(
        f"{model.id}, revision {model.revision or 'unknown'}\n"
        f"{model.architecture}, {model.parameters:,} parameters, {model.attention} attention\n"
        f"{model.device}, {model.dtype}: {model.device_reason}\n"
        f"explained: {explanation.objective}, computed {explanation.created}, seed {explanation.seed}\n"
        + ", ".join(f"{name} {version}" for name, version in explanation.versions.items())
    )
    st.text(
        "\n".join(
            f"{result.method}: " + (", ".join(f"{k}={v}" for k, v in result.params.items()) or "no parameters")
            for result in explanation.results
        )
    )
    with st.expander("The rendered prompt, exactly as tokenized"):
        st.code(explanation.passage.rendered, language=None, wrap_lines=True)
    with st.expander("Tokens and ids"):
        tokens = [
            {"position": i, "id": token.id, "text": visible(token.text), "role": token.role}
            for i, token in enumerate(explanation.passage.tokens)
        ]
        st.dataframe(tokens, hide_index=True)


def _matrix(explanation: Explanation, shown: list[TokenAttribution]) -> None:
    for place, result in enumerate(shown):
        st.markdown(f"**{traits_of(result).label}**")
        figure = target_source_heatmap(explanation, result, explanation.level)
        st.plotly_chart(figure, key=f"s_matrix_{place}", theme=None)


def _export(explanation: Explanation, request: SaliencyRequest | None) -> None:
    popover = st.popover("Export and share", icon=":material/ios_share:", key="s_export", on_change="rerun")
    if not popover.open:
        return
    key = remember_shown(explanation)
    name = f"attriscope-{key[:8]}"
    with popover:
        downloads = (
            ("JSON", "json", "application/json", lambda: bundle.encode(explanation)),
            ("CSV", "csv", "text/csv", lambda: to_csv(explanation).encode(CSV_ENCODING)),
            ("Web page (HTML)", "html", "text/html", lambda: to_html(explanation).encode()),
        )
        for label, ending, mime, make in downloads:  # made when clicked, not at every run of the page
            st.download_button(label, make, f"{name}.{ending}", mime, key=f"s_{ending}", on_click="ignore")
        st.caption("A picture (PNG) is made by the button in the board below.")
        st.caption("Link to this result, valid while this server keeps it. It does not contain the prompt:")
        st.code(f"{_address()}/saliency?run={key}", language=None, wrap_lines=True)
        if request is not None:
            st.caption("The same from Python:")
            st.code(to_python_call(request), language="python")


def _address() -> str:
    return str(st.context.url or "").split("?")[0].removesuffix("/saliency").rstrip("/")


def _plain(kind: str, text: str) -> None:
    """Draw a sentence that may quote model output: as text, never as Markdown."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(f":material/{kind}:", width="content")
        st.text(text)

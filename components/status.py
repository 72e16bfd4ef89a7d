"""What runs where: device, limits, models in memory."""

from __future__ import annotations

import streamlit as st

from components.page import engine


def device_line() -> None:
    """Say on which device models run, and why; before the first model that is not known yet."""
    settings = engine().settings
    info = engine().last_model()
    if info is None:
        device = "chosen when the first model loads" if settings.device == "auto" else settings.device
        st.text(f"Device: {device}. The embedded model, SmolLM2-135M-Instruct, works without a network.")
    else:
        st.text(f"Device: {info.device}, {info.dtype}: {info.device_reason}.")
    hub = "switched off" if settings.offline else settings.hub_endpoint
    st.text(f"Model hub: {hub}. Up to {settings.memory_budget_gb:g} GB of models in memory at once.")
    if engine().store_trouble:
        st.warning("Results cannot be kept on disk at present; a restart will forget them.")


def loaded_table() -> None:
    """List the models in memory."""
    loaded = engine().loaded_models()
    if not loaded:
        st.caption("No model is in memory yet; the first question loads one.")
        return
    st.dataframe(  # not st.table, which would read a model's id as Markdown
        [{"model": m.id, "memory": f"{m.nbytes / 1e9:.2f} GB", "in use": "yes" if m.leases else "no"} for m in loaded],
        hide_index=True,
    )

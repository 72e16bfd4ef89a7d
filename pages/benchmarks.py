"""Benchmarks: how well each method finds a planted needle, measured, with date, model and versions."""

import streamlit as st

from backend.evaluation.badge import shipped_table
from components.benchmark_view import benchmark_view
from components.page import bootstrap

bootstrap("Benchmarks")
st.title("Which methods find the needle?")
st.write(
    "A made-up secret is planted in a text that says nothing else of it, and the model is asked for it. Whoever "
    "explains the answer should point at the sentence that holds the secret. Only prompts count on which the model "
    "really answers with the secret."
)
table = shipped_table()
if table is None:
    st.info("No benchmark table is shipped with this copy. `attriscope bench saliency` measures one.")
else:
    benchmark_view(table)

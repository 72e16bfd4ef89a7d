"""Home: what the application does, on which device, with which models, and examples that open at once."""

import streamlit as st

from backend.io.examples import list_examples
from components.nav import go_to_saliency
from components.page import bootstrap
from components.status import device_line, loaded_table

bootstrap("Home")
st.title("Attriscope")
st.markdown("##### Look at what drove a model's answer, and at how far each explanation can be trusted.")

with st.container(border=True):
    st.subheader("Token saliency")
    st.write(
        "Type a prompt, let a language model answer, click a word of the answer: the prompt tokens that drove it "
        "light up, by up to four methods side by side, with the checks that each of them passed or failed."
    )
    if st.button("Ask a model", type="primary", icon=":material/play_arrow:", key="home_ask"):
        go_to_saliency()

st.subheader("Examples")
st.caption("Computed before, with the embedded model. They open at once.")
examples = list_examples()
for column, example in zip(st.columns(len(examples)), examples, strict=True):
    with column, st.container(border=True, height="stretch"):
        st.markdown(f"**{example.title}**")
        st.caption(example.about)
        if st.button("Open", key=f"home_example_{example.name}"):
            go_to_saliency(example=example.name)

st.subheader("This machine")
device_line()
loaded_table()

"""Home: what the application does, on which device, with which models, and examples that open at once."""

import streamlit as st

from components.page import bootstrap

bootstrap("Home")
st.title("Attriscope")

"""The script behind every address: draws the menu, runs the page."""

import streamlit as st

from components.nav import pages

st.navigation(pages(), position="top").run()

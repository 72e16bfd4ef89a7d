"""Token saliency: which prompt tokens drove an answer?"""

import streamlit as st

from components.page import bootstrap

bootstrap("Token saliency")
st.title("Token saliency")

"""Parts that pages are made of. Knows Streamlit, Plotly and result types; never torch or a model."""

"""Everything that computes: models, methods, jobs, results. Knows nothing of Streamlit.

Heavy libraries (torch, transformers) are imported where the work happens, never by the modules that pages read
for names, settings and types: ``types``, ``errors``, ``settings``, ``registry``, ``jobs``, ``engine``, ``store``.
"""

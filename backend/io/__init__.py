"""Results in and out: JSON bundles, examples, drawings as data, exports. Knows neither models nor Streamlit."""

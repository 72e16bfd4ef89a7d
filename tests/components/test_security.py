"""The content-security policy fits the installed Streamlit, and is as strict as promised."""

import base64
import hashlib
import re
from pathlib import Path

import streamlit

from components.security import CONTENT_SECURITY_POLICY, STREAMLIT_INLINE_SCRIPT


def test_the_script_hash_is_that_of_the_installed_streamlit():
    index = (Path(streamlit.__file__).parent / "static" / "index.html").read_text()
    scripts = [body for body in re.findall(r"<script>(.*?)</script>", index, re.DOTALL) if body.strip()]
    hashes = {"sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in scripts}
    assert hashes == {STREAMLIT_INLINE_SCRIPT}


def test_nothing_from_outside_may_be_loaded():
    policy = dict(part.split(" ", 1) for part in CONTENT_SECURITY_POLICY.split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe-eval" not in CONTENT_SECURITY_POLICY
    assert "unsafe-inline" not in policy["script-src"]
    assert "http" not in CONTENT_SECURITY_POLICY

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from backend.io.export import to_html
from tests.support.board_cases import demo, hostile, scripts


class Reader(HTMLParser):
    """What a browser would make of a page: its elements, attributes and texts."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.scripts, self.policy = [], [], {}, ""
        self.inside = None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag == "script":
            self.inside = attributes.get("id") or attributes.get("type")
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        if tag == "script":
            self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        else:
            self.texts.append(data)


@pytest.mark.parametrize("make", [demo, scripts, hostile])
def test_the_policy_allows_exactly_the_script_of_the_page(make):
    page = Reader(to_html(make()))
    digest = base64.b64encode(hashlib.sha256(page.scripts["module"].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    assert "unsafe-inline" not in page.policy.split("script-src")[1].split(";")[0]


def test_hostile_text_stays_text():
    page = to_html(hostile())
    page.encode("utf-8")
    read = Reader(page)
    assert {tag for tag, _ in read.elements}.isdisjoint({"img", "b", "i", "a", "iframe", "link"})
    assert [tag for tag, _ in read.elements].count("script") == 2
    assert not any(name.startswith("on") for _, attributes in read.elements for name in attributes)
    data = json.loads(read.scripts["boards"])
    assert "<img src=x onerror=window.__xss=1>" in data["boards"][0]["layouts"][0]["text"]
    assert not set("<>&\u2028\u2029") & set(read.scripts["boards"])
    assert "\u202e" not in page


def test_the_page_says_where_it_comes_from():
    e = demo(foil=demo().passage.answer_tokens[:1], notes=("The target is nearly certain.",))
    text = "\n".join(Reader(to_html(e)).texts)
    for part in (
        "tiny-test-model",
        "0123456789abcdef",
        "float32",
        "log-probability",
        "transformers 5.24.0",
        "2026-01-02T03:04:05Z",
        "Gradient norm",
        "The scores add up to 2.79",
        "The target is nearly certain.",
        "max new tokens 32",
        "1 forward, 1 backward",
    ):
        assert part in text


def test_a_span_comes_with_a_board_per_target():
    data = json.loads(Reader(to_html(demo((3, 6)))).scripts["boards"])
    assert data["spans"] == [[3, 6], [3, 4], [4, 5], [5, 6]]
    assert len(data["boards"]) == 4
    assert [board["answer"]["selected"] for board in data["boards"]] == data["spans"]


def test_one_target_needs_nothing_to_pick():
    data = json.loads(Reader(to_html(demo())).scripts["boards"])
    assert len(data["boards"]) == 1
    assert data["boards"][0]["answer"] is None


def test_exports_do_not_depend_on_the_cache():
    e = demo()
    again = replace(e, results=tuple(replace(result, from_cache=True) for result in e.results))
    assert to_html(e) == to_html(again)


def test_nothing_is_loaded_from_anywhere():
    page = to_html(demo())
    assert not any({"src", "href", "action"} & set(attributes) for _, attributes in Reader(page).elements)
    assert not re.search(r"url\(|@import|https?:", page)

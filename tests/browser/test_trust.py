"""What a person sees beyond the colors: what if, faithfulness, tests of the methods, the benchmarks page."""

import re

import pytest
from playwright.sync_api import expect

from scripts.drive import wait_ready
from tests.support.saliency_steps import LONG, ask, heat_rows

pytestmark = [pytest.mark.browser, pytest.mark.smollm]


def test_hiding_a_word_changes_the_next_token_and_pruning_answers_anew(tab):
    page = tab("/saliency")
    ask(page, "The key is in the kitchen. The phone is in the garden. The phone is in the", tokens=3)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    page.get_by_role("tab", name="What if?").click()
    page.get_by_role("radio", name="Hide").click()
    expect(page.get_by_text("total variation distance")).to_be_visible(timeout=LONG)
    expect(page.get_by_text(re.compile(r"differ by \d"))).to_be_visible()
    page.get_by_role("button", name="Answer from what is kept").click()
    expect(page.get_by_text(re.compile("^Before:"))).to_be_visible(timeout=LONG)
    expect(page.get_by_text(re.compile("^Now"))).to_be_visible()


def test_faithfulness_is_measured_on_the_prompt_at_hand_and_methods_are_tested(tab):
    page = tab("/saliency")
    ask(page, "The capital of France is", tokens=1)
    expect(heat_rows(page)).to_have_count(2, timeout=LONG)
    page.get_by_role("tab", name="Faithfulness").click()
    page.get_by_role("button", name="Measure on this prompt").click()
    expect(page.get_by_text(re.compile(r"\d+ units, \d+ forward passes"))).to_be_visible(timeout=LONG)
    page.get_by_role("tab", name="Checks").click()
    page.get_by_role("button", name="Test the methods").click()
    expect(page.get_by_text("randomized weights").first).to_be_visible(timeout=LONG)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_benchmarks_page_opens_and_fits(tab, width):
    page = tab("/benchmarks", width=width)
    expect(page.get_by_role("heading", name="Which methods find the needle?")).to_be_visible()
    wait_ready(page)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0

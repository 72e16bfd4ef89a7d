"""The pages without a browser: they draw, they fill their controls from results, they say what went wrong."""

import json
import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from backend.errors import Busy
from backend.io.examples import list_examples, load_example
from backend.saliency.asked import request_of
from components.job_panel import SLOTS

ROOT = Path(__file__).resolve().parents[2]
SHELL = str(ROOT / "components" / "shell.py")
SALIENCY = "../pages/saliency.py"


@pytest.fixture
def app(monkeypatch, tmp_path):
    import streamlit as st

    from backend.settings import get_settings

    monkeypatch.setenv("ATTRISCOPE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ATTRISCOPE_WARM_UP", "false")
    get_settings.cache_clear()
    st.cache_resource.clear()
    yield AppTest.from_file(SHELL, default_timeout=30)
    st.cache_resource.clear()
    get_settings.cache_clear()


def saliency(app, **query):
    for name, value in query.items():
        app.query_params[name] = value
    return app.run().switch_page(SALIENCY).run()


def texts(app):
    return "\n".join(element.value for element in app.get("text"))


def test_home_lists_every_example(app):
    app.run()
    assert not app.exception
    shown = "\n".join(element.value for element in app.markdown)
    for example in list_examples():
        assert example.title in shown


def test_the_saliency_page_begins_with_a_prompt_and_no_result(app):
    page = saliency(app)
    assert not page.exception
    assert page.text_area(key="s_text").value
    assert page.button(key="s_ask").label == "Answer"
    assert not page.tabs


def test_every_example_fills_the_controls_it_was_made_with(app):
    page = saliency(app)
    for example in list_examples():
        page.button(key=f"s_example_{example.name}").click().run()
        assert not page.exception
        explanation = load_example(example.name)
        assert page.session_state["s_opened"] is explanation
        assert page.session_state["s_methods"] == [result.method for result in explanation.results]
        assert page.session_state["s_level"] == explanation.level
        assert page.text_input(key="s_foil").value == "".join(token.text for token in explanation.foil)
        if not explanation.prompt.is_chat:
            assert page.text_area(key="s_text").value == explanation.prompt.text
        assert re.fullmatch(r"[0-9a-f]{64}", str(page.query_params["run"]))
        assert {tab.label for tab in page.tabs} >= {"Numbers", "Checks", "Origin"}


def test_changing_a_control_leaves_the_opened_result_and_asks_before_loading_a_model(app):
    page = saliency(app)
    page.button(key=f"s_example_{list_examples()[0].name}").click().run()
    page.text_input(key="s_foil").set_value(" kitchen").run()
    assert not page.tabs, "a result is shown only with the settings that made it"
    assert "loads it first" in texts(page)
    page.text_input(key="s_foil").set_value("").run()
    assert page.tabs


def test_settings_survive_a_walk_through_the_pages(app):
    page = saliency(app)
    page.text_area(key="s_text").set_value("Another prompt is").run()
    page.slider(key="s_max_new_tokens").set_value(7).run()
    page.switch_page("../pages/home.py").run()
    page.switch_page(SALIENCY).run()
    assert page.text_area(key="s_text").value == "Another prompt is"
    assert page.slider(key="s_max_new_tokens").value == 7


def test_chat_turns_can_be_added_and_removed(app):
    page = saliency(app)
    page.session_state["s_mode"] = "Chat"
    page.run()
    page.button(key="s_turn_add").click().run()
    assert page.selectbox(key="s_turn_1_role").value == "assistant"
    page.button(key="s_turn_drop").click().run()
    assert "s_turn_1_text" not in {area.key for area in page.text_area}
    assert not page.exception


def test_an_upload_that_is_no_export_is_refused_and_loses_nothing(app):
    page = saliency(app)
    page.text_area(key="s_text").set_value("Keep me").run()
    page.file_uploader(key="s_upload").upload("x.json", b'{"kind": "other"}', "application/json").run()
    assert "not an explanation exported by Attriscope" in texts(page)
    assert page.text_area(key="s_text").value == "Keep me"


def test_an_exported_file_opens(app):
    data = (ROOT / "assets" / "examples" / "paris-rather-than-london.json").read_bytes()
    page = saliency(app)
    page.file_uploader(key="s_upload").upload("x.json", data, "application/json").run()
    assert not page.exception
    assert page.text_input(key="s_foil").value == " London"


def test_a_full_queue_is_said(app, monkeypatch):
    from backend.engine import Engine

    def full(*args):
        raise Busy("16 jobs are waiting already; the queue takes no more.", "Try again in a minute.")

    monkeypatch.setattr(Engine, "submit", full)
    page = saliency(app)
    page.button(key="s_ask").click().run()
    assert "16 jobs are waiting" in texts(page)
    assert page.button(key="answer_retry")


def test_generated_controls_follow_the_parameters_of_methods(app):
    page = saliency(app)
    page.button(key="s_example_where-is-the-phone").click().run()
    page.session_state["s_methods"] = ["integrated_gradients"]
    page.run()
    steps = page.slider(key="s_integrated_gradients_steps")
    assert (steps.min, steps.max) == (8, 512)
    assert page.selectbox(key="s_integrated_gradients_baseline").options


def edited_example(change):
    document = json.loads((ROOT / "assets" / "examples" / "where-is-the-phone.json").read_text())
    change(document)
    return json.dumps(document).encode()


def opened(app, change):
    page = saliency(app)
    page.file_uploader(key="s_upload").upload("x.json", edited_example(change), "application/json").run()
    assert not page.exception
    return page


def test_an_opened_example_is_what_the_controls_say(app):
    page = opened(app, lambda d: None)
    assert "cannot show all settings" not in texts(page)
    explanation = load_example("where-is-the-phone")
    assert page.session_state["s_opened_as"] == request_of(explanation)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["decoding"].update(max_new_tokens=100_000, top_p=0.00001, temperature=99.0, seed=-5),
        lambda d: d["results"][0]["params"].update(no_such_parameter=1),
        lambda d: d["results"][0].update(method="integrated_gradients", params={"steps": 10**7, "baseline": "x"}),
        lambda d: d["results"].append(d["results"][0]),
        lambda d: d["results"].extend(d["results"]),
        lambda d: d["results"][0].update(method="method_of_tomorrow"),
        lambda d: d.update(seed=-1),
        lambda d: d.update(seed=2**40),
        lambda d: d.update(prompt={"text": "", "turns": [{"role": "tool", "content": "x"}]}),
        lambda d: d.update(prompt={"text": "", "turns": [{"role": "system", "content": "only"}]}),
    ],
)
def test_values_that_no_widget_can_show_neither_break_the_page_nor_go_unsaid(app, change):
    page = opened(app, change)
    assert page.tabs, "the result is shown all the same"
    made = page.session_state["s_opened"]
    if request_of(made) != page.session_state["s_opened_as"]:
        assert "cannot show all settings" in texts(page)
    page.text_input(key="s_foil").set_value(" x").run()
    assert not page.exception


def test_what_the_controls_cannot_show_is_said(app):
    page = opened(app, lambda d: d.update(seed=-1))
    assert "cannot show all settings" in texts(page)


def test_only_four_methods_are_drawn_side_by_side(app):
    page = opened(app, lambda d: d["results"].extend(d["results"]))
    assert any("the first 4 are shown" in caption.value for caption in page.caption)


def test_a_commit_and_a_number_format_come_back(app):
    commit = "0123456789abcdef0123456789abcdef01234567"
    page = opened(app, lambda d: d["model"].update(id="owner/name", revision=commit, dtype="bfloat16"))
    assert page.text_input(key="s_revision").value == commit
    assert page.selectbox(key="s_dtype").value == "bfloat16"
    other = opened(app, lambda d: d["model"].update(id="/a/folder", revision="12ab"))
    assert other.text_input(key="s_revision").value == ""


def test_a_dead_link_leaves_the_shown_result_and_its_address(app):
    page = opened(app, lambda d: None)
    run = page.query_params["run"]
    page.query_params["run"] = "0" * 64
    page.run()
    assert "This link has expired" in texts(page)
    assert page.tabs
    assert page.query_params["run"] == run
    page.run()
    assert "This link has expired" not in texts(page)


def test_a_result_of_refusals_only_has_an_address_too(app):
    def refuse(document):
        for result in document["results"]:
            result.update(scores=None, units=None, refusal="Not for this model.")

    page = opened(app, refuse)
    assert "Not for this model." in texts(page)
    assert re.fullmatch(r"[0-9a-f]{64}", str(page.query_params["run"]))


def test_asking_again_forgets_what_failed(app, monkeypatch):
    from backend.engine import Engine

    forgotten = []
    monkeypatch.setattr(Engine, "forget", lambda self, owner: forgotten.append(owner[1]))
    monkeypatch.setattr(Engine, "submit", lambda *args: (_ for _ in ()).throw(Busy("Full.")))
    page = saliency(app)
    page.button(key="s_ask").click().run()
    assert set(forgotten) == set(SLOTS)


def test_the_benchmarks_page_draws_the_shipped_table_or_says_that_there_is_none(app, monkeypatch):
    import backend.evaluation.badge as badge

    page = app.run().switch_page("../pages/benchmarks.py").run()
    assert not page.exception
    monkeypatch.setattr(badge, "SHIPPED", ROOT / "nowhere.json")
    badge.shipped_table.cache_clear()
    page.run()
    badge.shipped_table.cache_clear()
    assert not page.exception
    assert any("attriscope bench saliency" in info.value for info in page.info)


def test_a_measured_method_carries_its_number(app, monkeypatch):
    explanation = load_example("where-is-the-phone")
    summed = {"method": "gradient_norm", "length": 128, "recall_at_k": 0.25, "chance": 0.125, "flags": ["lift"]}
    table = {
        "about": {"model": explanation.model.id, "revision": explanation.model.revision},
        "summary": [{**summed, "needles": 6}],
    }
    monkeypatch.setattr("components.trust_view.shipped_table", lambda: table)
    from components.trust_view import needle_remarks

    remarks = needle_remarks(explanation)
    assert list(remarks) == ["gradient_norm"]
    assert "0.25 at 128 tokens" in remarks["gradient_norm"][0].text
    assert remarks["gradient_norm"][1].tone == "warn"

"""What a person does on the token saliency page, in a real browser."""

from scripts.drive import wait_ready

LONG = 120_000  # milliseconds; the first job of a server imports torch and loads the model


def ask(page, prompt, *, tokens=None):
    """Type a prompt and press Answer."""
    box = page.get_by_label("Prompt", exact=True)
    box.fill(prompt)
    box.press("Control+Enter")
    if tokens is not None:
        slider = page.locator(".st-key-s_max_new_tokens input").first
        slider.focus()
        slider.press("Home")
        for _ in range(tokens - 1):
            slider.press("ArrowRight")
    wait_ready(page)
    page.get_by_role("button", name="Answer", exact=True).click()


def answer_tokens(page):
    """The cells of the answer."""
    return page.locator(".st-key-s_answer").get_by_role("option")


def heat_rows(page):
    """The rows of the board, one per method."""
    return page.locator(".st-key-s_board").get_by_role("listbox")

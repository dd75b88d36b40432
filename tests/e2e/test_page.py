"""The page in a real Chromium: by mouse, keyboard and touch, when all is well and when not."""

import json
import os
import re
import shutil
import threading
import time

import pytest
from playwright import sync_api as playwright

from e2e.servers import live
from elias import Elias, train
from elias.serve.settings import Limits

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
expect = playwright.expect
TEXT = "#text"
ROWS = "#labels .bar-row"
KEY = "a-key-of-sixteen-characters"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        # a container's root may have no sandbox; the page is our own
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(run):
    with live(run, limits=Limits(max_text=2000), examples=("an example text",)) as served:
        yield served


@pytest.fixture(scope="module")
def text(corpus_folder):
    return (corpus_folder / "raw" / "tst_X.txt").read_text(encoding="utf8").splitlines()[0]


@pytest.fixture
def tab(browser, server):
    """A page that is opened, and whose scripts must not fail."""
    with opened(browser, server.url) as page:
        yield page


class opened:  # noqa: N801 - reads like the block it makes
    def __init__(self, browser, url, **options):
        self.context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 800}, **options}
        )
        self.url = url

    def __enter__(self):
        page = self.context.new_page()
        page.set_default_timeout(10_000)
        self.errors, self.asked = [], []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(self.url)
        return page

    def __exit__(self, kind, *_):
        self.context.close()
        if kind is None:
            assert not self.errors
            own = self.url.removesuffix("/docs")
            assert [url for url in self.asked if not url.startswith((own, "data:"))] == []


def typed(page, text):
    page.fill(TEXT, text)
    page.wait_for_selector(ROWS)


def test_labels_appear_as_a_text_is_typed_in_the_order_of_the_model(tab, run, text):
    typed(tab, text)

    shown = tab.locator(f"{ROWS} > span:first-child").all_inner_texts()
    assert shown == Elias.from_pretrained(run, device="cpu").predict([text], top_k=20)[0].labels
    expect(tab.locator("#status")).to_contain_text(re.compile(r"of the best 20 labels · \d+ ms"))
    expect(tab.locator("#about")).to_contain_text("120 labels")
    tab.fill(TEXT, "")
    expect(tab.locator(ROWS)).to_have_count(0)
    expect(tab.locator("#hint")).to_be_visible()


def test_an_example_is_tried_by_a_click(tab):
    tab.click("#examples button")

    tab.wait_for_selector(ROWS)
    assert tab.input_value(TEXT) == "an example text"


def test_the_threshold_divides_the_labels_by_probability(tab, run, text):
    typed(tab, text)
    model = Elias.from_pretrained(run, device="cpu")
    expect(tab.locator("#quality")).to_contain_text(re.compile(r"precision \d+%, recall \d+%"))
    assert float(tab.input_value("#threshold")) == pytest.approx(model.threshold("f1"))
    lowest = 0.05
    remaining = len(model.predict([text], top_k=20, threshold=lowest)[0])
    assert 0 < remaining < 20

    tab.locator("#threshold").fill(str(lowest))

    assert tab.locator("#labels > li:not(.below):not(.rule)").count() == remaining
    expect(tab.locator("#labels .rule")).to_have_text("below the threshold")
    tab.locator("#threshold").fill(tab.locator("#threshold").get_attribute("max"))
    expect(tab.locator("#labels .rule")).to_have_text("no label reaches the threshold")


def test_a_label_says_why_and_leads_on_to_clusters_and_labels_and_back(tab, text):
    typed(tab, text)
    name = tab.locator(f"{ROWS} >> nth=1").locator("span").first.inner_text()

    tab.click(f"{ROWS} >> nth=1")

    expect(tab.locator("#panel h2")).to_have_text(name)
    tab.wait_for_selector(".graph svg .edge.won")
    assert tab.locator(".graph .box").count() >= 1
    expect(tab.locator("dl.factors")).to_contain_text("classifier")
    assert tab.get_attribute(f"{ROWS} >> nth=1", "aria-current") == "true"

    tab.click(".graph a >> nth=-1")  # drawn last: the best path's cluster
    expect(tab.locator("#panel h2")).to_contain_text("Cluster ")
    tab.click("#panel ol .bar-row >> nth=0")
    expect(tab.locator("#panel")).to_contain_text(re.compile(r" · in \d+ clusters"))
    tab.go_back()
    expect(tab.locator("#panel h2")).to_contain_text("Cluster ")
    tab.go_back()
    expect(tab.locator("#panel h2")).to_have_text(name)


def test_the_text_is_shown_with_the_words_for_and_against_a_label(tab, run, text):
    astral = f"\U0001f41f {text}"
    typed(tab, astral)

    tab.click(f"{ROWS} >> nth=0")

    label = Elias.from_pretrained(run, device="cpu").explain([astral], top_k=1, words=True)[0]
    strongest = max(label.labels[0].words, key=lambda word: word.effect)
    expect(tab.locator(".words")).to_have_text(astral)
    marked = tab.locator(".words mark.for").all_inner_texts()
    assert astral[strongest.start : strongest.end] in marked


def test_a_label_is_found_by_a_part_of_its_name(tab, run):
    name = Elias.from_pretrained(run, device="cpu").label_names[5]

    tab.fill("#query", name[:-1])
    tab.click(f"#hits .bar-row:has-text('{name}') >> nth=0")

    expect(tab.locator("#panel h2")).to_have_text(name)
    expect(tab.locator("#hits")).to_be_hidden()
    tab.fill("#query", "no label is called so")
    expect(tab.locator("#hits")).to_contain_text("No label name contains this")


def test_everything_can_be_done_by_keyboard(tab, text):
    keys = tab.keyboard
    expect(tab.locator(TEXT)).to_be_focused()
    keys.insert_text(text)
    tab.wait_for_selector(ROWS)
    for _ in range(3):  # the example, the slider, the first label
        keys.press("Tab")
    expect(tab.locator(f"{ROWS} >> nth=0")).to_be_focused()
    keys.press("ArrowDown")
    expect(tab.locator(f"{ROWS} >> nth=1")).to_be_focused()
    keys.press("Enter")
    tab.wait_for_selector(".graph svg")
    keys.press("Escape")
    expect(tab.locator(".graph")).to_have_count(0)
    expect(tab.locator(f"{ROWS} >> nth=1")).to_be_focused()


def test_a_label_keeps_the_focus_when_the_labels_are_shown_again(tab, text):
    typed(tab, text)
    tab.focus(f"{ROWS} >> nth=1")

    tab.dispatch_event("#threshold", "input")  # as a second answer of the server does

    expect(tab.locator(f"{ROWS} >> nth=1")).to_be_focused()


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_nothing_is_wider_than_the_screen(browser, server, text, width):
    with opened(browser, server.url, viewport={"width": width, "height": 800}) as page:
        typed(page, text)
        page.click(f"{ROWS} >> nth=0")
        page.wait_for_selector(".graph svg")

        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            "() => { const svg = document.querySelector('.graph svg').getBoundingClientRect();"
            " return [...document.querySelectorAll('.graph text')].filter((t) => {"
            " const b = t.getBoundingClientRect();"
            " return b.left < svg.left - 1 || b.right > svg.right + 1; }).length; }"
        )
        assert outside == 0


def test_on_a_phone_the_reason_comes_into_view_and_can_be_touched(browser, server, text):
    with opened(browser, server.url, viewport=PHONE, has_touch=True) as page:
        typed(page, text)
        page.tap(f"{ROWS} >> nth=0")

        expect(page.locator("#panel h2")).to_be_in_viewport()
        heights = page.evaluate(
            f"[...document.querySelectorAll('{ROWS}')].map(e => e.clientHeight)"
        )
        assert min(heights) >= 40  # room for a finger


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_colours_follow_the_system_and_keep_their_contrast(browser, server, scheme, is_dark):
    with opened(browser, server.url, color_scheme=scheme) as page:
        page.wait_for_selector("#examples button")
        colours = page.evaluate(
            "() => ['body', '.soft'].map((q) => getComputedStyle(document.querySelector(q)).color)"
            ".concat(getComputedStyle(document.body).backgroundColor)"
        )

    text, soft, paper = map(luminance, colours)
    assert (paper < 0.5) == is_dark
    assert contrast(text, paper) >= 7
    assert contrast(soft, paper) >= 4.5


def luminance(colour):
    parts = [int(p) / 255 for p in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_a_busy_server_is_reported_and_retried(tab, text):
    refusals = []

    def busy(route):
        if refusals:
            route.continue_()
            return
        refusals.append(1)
        body = json.dumps({"error": "the queue is full", "error_type": "Overloaded"})
        headers = {"retry-after": "1", "content-type": "application/json"}
        route.fulfill(status=429, body=body, headers=headers)

    tab.route("**/predict", busy)
    tab.fill(TEXT, text)

    expect(tab.locator("#error")).to_contain_text("The server is busy. Trying again in 1 s.")
    tab.wait_for_selector(ROWS)
    expect(tab.locator("#error")).to_be_hidden()


def test_a_server_that_is_down_is_reported_until_it_is_back(tab, text):
    tab.wait_for_selector("#examples button")
    tab.route("**/predict", lambda route: route.abort())
    tab.fill(TEXT, text)
    expect(tab.locator("#error")).to_contain_text("The server does not respond.")

    tab.unroute("**/predict")
    tab.click("#error button")

    tab.wait_for_selector(ROWS)
    expect(tab.locator("#error")).to_be_hidden()


def test_a_truncated_response_is_reported(tab, text):
    tab.wait_for_selector("#examples button")
    tab.route("**/predict", lambda r: r.fulfill(body='[[{"id"', content_type="application/json"))
    tab.fill(TEXT, text)

    expect(tab.locator("#error")).to_contain_text("response is incomplete")


def test_after_quick_clicks_the_last_page_is_shown(tab):
    tab.wait_for_selector("#examples button")
    tab.evaluate("for (let i = 0; i < 30; i++) location.hash = `#label/${i % 7}/0`")

    expect(tab.locator("#panel")).to_contain_text("Label 1 ")


def test_only_the_response_to_the_last_text_is_shown(tab, server, text, monkeypatch):
    may_go = threading.Event()
    served = server.backend.served
    compute = served.compute

    def slow(questions):
        may_go.wait(10)
        return compute(questions)

    typed(tab, text)
    monkeypatch.setattr(served, "compute", slow)
    tab.fill(TEXT, "an earlier text")
    expect(tab.locator("#status")).to_have_text("Waiting for the server …")
    expect(tab.locator("#labels")).to_have_class("waiting")
    tab.fill(TEXT, text)
    time.sleep(0.3)
    may_go.set()

    expect(tab.locator("#status")).to_contain_text("of the best 20 labels")
    expect(tab.locator("#labels")).not_to_have_class("waiting")
    first = Elias.from_pretrained(server.backend.settings.model, device="cpu")
    expect(tab.locator(f"{ROWS} >> nth=0")).to_contain_text(first.predict([text])[0].labels[0])


def test_a_text_that_is_too_long_is_not_sent(tab):
    tab.wait_for_selector("#examples button")
    tab.fill(TEXT, "word " * 500)

    expect(tab.locator("#status")).to_contain_text("longer than 2,000 characters")


def test_names_are_shown_as_they_are_and_never_become_markup(tab):
    name = "<img src=x onerror=document.title='hacked'> & \u202efish"
    body = json.dumps([[{"id": 1, "label": name, "score": 0.5}]])
    tab.route("**/predict", lambda r: r.fulfill(body=body, content_type="application/json"))

    typed(tab, "anything")

    assert tab.locator(f"{ROWS} > span").first.inner_text() == name
    assert tab.title() != "hacked"


def test_a_key_is_asked_for_and_remembered(browser, run, text):
    with live(run, keys=(KEY,)) as served, opened(browser, served.url) as page:
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "not-the-right-key-at-all")
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_contain_text("120 labels")
        page.reload()
        typed(page, text)


def test_the_api_is_described_without_a_script_from_elsewhere(browser, server):
    with opened(browser, f"{server.url}/docs") as page:
        page.wait_for_selector("article.route")
        routes = page.locator("article.route h2").all_inner_texts()

        assert "POST/predict" in [route.replace(" ", "") for route in routes]
        limits = page.locator("td:nth-child(3)").all_inner_texts()
        assert any(limit.startswith("at least 0") for limit in limits)
        assert not [limit for limit in limits if re.search(r"at (least|most)(?! \d)", limit)]


def test_an_added_label_is_predicted_and_explained(browser, run, tmp_path):
    model = Elias.from_pretrained(run, device="cpu")
    table = [{"id": "http://example.org/1", "name": "red herring"}]
    model.add_labels(table).save_pretrained(tmp_path / "larger")

    with live(tmp_path / "larger") as served, opened(browser, served.url) as page:
        typed(page, "a red herring")
        best = page.locator(ROWS).first
        expect(best).to_contain_text("red herring")
        best.click()

        expect(page.locator("#panel")).to_contain_text("was added without training")
        expect(page.locator("#panel a[href='http://example.org/1']")).to_be_visible()


def test_a_model_without_an_index_is_explained_without_clusters(browser, tmp_path):
    texts, labels = ["red cod", "white wine"] * 8, [["fish"], ["drink"]] * 8
    train(texts=texts, labels=labels, out=tmp_path / "run", device="cpu")

    with live(tmp_path / "run") as served, opened(browser, served.url) as page:
        expect(page.locator("#about")).to_contain_text("2 labels")
        expect(page.locator("#about")).not_to_contain_text("cluster")
        expect(page.locator("#panel")).to_contain_text("or find one by its name.")
        typed(page, "a red cod")
        page.locator(ROWS).first.click()

        expect(page.locator("#panel")).to_contain_text("This model has no index")
        expect(page.locator("#panel svg")).to_have_count(0)

        page.fill("#query", "fish")
        page.locator("#hits .bar-row").first.click()
        expect(page.locator("#panel")).to_contain_text(re.compile(r"Label \d"))
        expect(page.locator("#panel")).not_to_contain_text(re.compile("cluster", re.IGNORECASE))

"""The report's page in a real browser, as wide as a phone and a desktop, in both colour schemes."""

import pytest

from hookline.core.report.command import main
from tests.browser import CHROMIUM, Browser
from tests.report_data import failed, make_job, make_recording, make_sweep

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
WIDTHS = (390, 1280)
LONG = "a_word_without_any_place_to_break_it_" * 6
OVERFLOWING = """(width) =>
    [...document.querySelectorAll("main *")].filter((one) => !one.closest(".scroll, svg")
        && one.getBoundingClientRect().right > width + 0.5).map((one) => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_sweep(tmp_path_factory.mktemp("report") / "sweep")
    config = {"scheduler": {"name": LONG}, "engine": {"max_num_seqs": 2, "block_size": None}}
    tags = [{"class": "chat"}, {"class": LONG[:128], "tenant": '<script>console.error("it ran")</script>'}]
    make_job(folder, 6, [f"scheduler={LONG}"], config, make_recording(6, tags=tags), device=LONG)
    make_job(folder, 7, [f"scheduler={LONG}"], **failed(error='<script>console.error("it ran")</script>'))
    assert main([str(folder), "png=false"]) == 0
    return folder / "index.html"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_quiet(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(f"({OVERFLOWING})({width})") == []
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]


def test_what_does_not_fit_would_be_found(browser, page, tmp_path):
    wide = tmp_path / "wide.html"
    wide.write_text(page.read_text().replace("</main>", '<p style="width: 500px">wide</p><img src="x"></main>'))
    browser.open(wide)
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    assert any('<p style="width' in one for one in browser.evaluate(f"({OVERFLOWING})(390)"))
    assert browser.complaints()  # about the picture


def test_all_jobs_are_shown(browser, page):
    browser.open(page)
    assert (
        browser.evaluate('new Set([...document.querySelectorAll("tr[data-job]")].map((row) => row.dataset.job)).size')
        == 8
    )
    shown = browser.evaluate("document.body.innerText")
    for cause in ("ValueError: no mind", "killed by SIGKILL", '<script>console.error("it ran")</script>'):
        assert cause in shown


def test_every_chart_has_a_name_and_a_description(browser, page):
    browser.open(page)
    nameless = """[...document.querySelectorAll('svg[role="img"]')].filter((svg) =>
        !(svg.getAttribute("aria-labelledby").trim().split(/\\s+/)
          .every((id) => document.getElementById(id)?.textContent)
          && document.getElementById(svg.getAttribute("aria-describedby"))?.textContent)).length"""
    assert browser.evaluate("document.querySelectorAll('svg[role=\"img\"]').length") >= 3 + 3 + 2 * 5
    assert browser.evaluate(nameless) == 0
    identifiers = "[...document.querySelectorAll('[id]')].map((one) => one.id)"
    assert browser.evaluate(f"new Set({identifiers}).size === {identifiers}.length")


def test_text_stands_out_in_both_schemes(browser, page):
    brightness = """(() => { const style = getComputedStyle(document.body);
        const of = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
            return 0.3*r + 0.6*g + 0.1*b; };
        return [of(style.backgroundColor), of(style.color)]; })()"""
    browser.open(page, dark=False)
    background, text = browser.evaluate(brightness)
    assert background > 240 and text < 50
    browser.open(page, dark=True)
    background, text = browser.evaluate(brightness)
    assert background < 40 and text > 200


@pytest.mark.slow
def test_a_legends_button_brings_its_line_out(browser, page):
    browser.open(page)
    button = "document.querySelectorAll('.legend button')[1]"
    picked = "[...document.querySelectorAll('.picked')].map((line) => line.dataset.line)"
    browser.evaluate(f"{button}.click()")
    lines = browser.evaluate(picked)
    assert len(lines) > 2
    assert all(line.startswith(browser.evaluate(f"{button}.dataset.pick")) for line in lines)
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(picked) == []

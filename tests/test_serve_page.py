"""The server's page in a real browser: the playground, the engine's state, and that it needs nothing from elsewhere."""

import re

import pytest

pytest.importorskip("starlette", reason="needs the extra: pip install hookline[serve]")

from hookline.core.errors import RequestError
from hookline.core.serve.engine_client import EngineLoad, ReplicaState
from hookline.core.serve.http.page import make_page
from hookline.core.testing.engine_client import FakeEngineClient
from tests.browser import CHROMIUM, Browser
from tests.live_server import live_server

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
EVIL = '<img src=x onerror="console.error(1)"><script>console.error(2)</script>'
SIZES = ((390, 844), (1280, 800))
OVERFLOWING = """[...document.querySelectorAll("header, main *")].filter((one) => one.getClientRects().length
    && one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 80))"""
IS_IDLE = "!document.getElementById('go').hidden && document.querySelector('.about')?.textContent.includes('ended')"
ANSWER = "[...document.querySelectorAll('.entry:last-child > .said')].map((one) => one.textContent).join()"


def test_the_page_may_run_its_own_script_and_nothing_else():
    body, policy = make_page(EVIL, has_chat=True)
    assert EVIL.encode() not in body and b"&lt;img" in body
    markup = re.sub(rb"<script>.*?</script>", b"", body, flags=re.DOTALL)
    assert not re.findall(rb'(?:src|href)="(?!data:,")', markup)  # nothing is loaded
    assert not re.findall(rb"<[^>]+ (?:style|on\w+)=", body.partition(b"<body>")[2].partition(b"<script>")[0])
    assert "'unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert len(re.findall(r"'sha256-[\w+/]{43}='", policy)) == 2


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngineClient) as started:
        yield started


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def fake(server):
    """The engine behind the page, as new."""
    client = server.client
    client.reply, client.pause_s, client.error, client.is_ready, client.death = " Hello world", 0.0, None, True, None
    client.now = EngineLoad(3, 2, 250, 1000, 0.0, 1234.0)
    client.asked.clear()
    client.replicas = ()
    yield client
    client.pause_s = 0.0


def show(browser, server, width=1280, height=800, dark=False):
    browser.open(f"{server.url}/", width, height, dark)
    browser.wait_for("document.getElementById('state').dataset.state !== 'waiting'")


def ask(browser, text, mode="completion", probabilities=False, max_tokens=4):
    browser.evaluate(f"document.querySelector('[value={mode}]').click()")
    browser.evaluate(f"document.getElementById('logprobs').checked = {str(probabilities).lower()}")
    browser.evaluate(f"document.querySelector('[name=max_tokens]').value = {max_tokens}")
    say(browser, text)


def say(browser, text):
    browser.evaluate("document.getElementById('prompt').focus()")
    browser.evaluate("document.getElementById('prompt').value = ''")
    browser.call("Input.insertText", text=text)
    press(browser, "Enter")


def press(browser, key):
    codes = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "Tab": 9}
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **text)


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_is_quiet_and_asks_its_server_alone(browser, server, fake, size, dark):
    show(browser, server, *size, dark)
    browser.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    ask(browser, "import", probabilities=True)
    browser.wait_for(IS_IDLE)
    assert browser.evaluate("innerWidth") == size[0] == browser.evaluate("document.documentElement.scrollWidth")
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.complaints() == []
    assert all(url.startswith(server.url) or url == "data:," for url in browser.requests())


@needs_chromium
@pytest.mark.slow
def test_a_completion_streams_with_its_figures(browser, server, fake):
    fake.pause_s = 0.1  # tokens that a busy browser reads at once have no rate
    show(browser, server)
    ask(browser, "import os")
    browser.wait_for(IS_IDLE)
    about = browser.evaluate("document.querySelector('.about').textContent")
    assert browser.evaluate(ANSWER) == "import os Hello w"
    assert re.search(r"^4 tokens · [\d.]+ tokens/s · first after \d+ ms · prompt 2 · ended at max tokens$", about)
    assert fake.asked[0].params.max_tokens == 4


@needs_chromium
@pytest.mark.slow
def test_a_chat_goes_on_with_what_was_said(browser, server, fake):
    show(browser, server)
    ask(browser, "hello", mode="chat", max_tokens=3)
    browser.wait_for(IS_IDLE)
    first = browser.evaluate(ANSWER)
    say(browser, "more")
    browser.wait_for("document.querySelectorAll('.about').length === 2 && " + IS_IDLE)
    browser.wait_for("document.querySelectorAll('.about')[1].textContent.includes('ended')")
    prompts = [server.client.facts.codec.decode(one.prompt_token_ids) for one in fake.asked]
    assert first and first in prompts[1] and prompts[1].index("hello") < prompts[1].index("more")
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate("document.getElementById('log').children.length") == 0


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("by", ["button", "key"])
def test_an_answer_can_be_stopped_and_its_request_ends(browser, server, fake, by):
    fake.pause_s = 0.05
    show(browser, server)
    ask(browser, "import", max_tokens=200)
    browser.wait_for("document.querySelector('.about')?.textContent.includes('tokens')")
    if by == "button":
        browser.evaluate("document.getElementById('stop').click()")
    else:
        press(browser, "Escape")
    browser.wait_for(IS_IDLE)
    assert "ended by you" in browser.evaluate("document.querySelector('.about').textContent")

    async def wait_until_none_is_open():
        import asyncio

        async with asyncio.timeout(8):  # it would end by itself after 10
            while fake.num_open:
                await asyncio.sleep(0.01)

    server.run(wait_until_none_is_open)
    assert fake.asked[0].is_cancelled


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_probabilities_show_by_pointer_and_by_arrow_keys(browser, server, fake, mode):
    show(browser, server)
    ask(browser, "import", mode, probabilities=True)
    browser.wait_for(IS_IDLE)
    tip = "document.getElementById('tip')"
    where = browser.evaluate(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelectorAll('.token')[1].getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    browser.wait_for(f"!{tip}.hidden")
    shown = browser.evaluate(f"{tip}.innerText")
    assert "60.7 %" in shown and "22.3 %" in shown  # of the fake's log-probabilities, -0.5 and -1.5
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.wait_for(f"{tip}.hidden")
    browser.evaluate("document.getElementById('log').focus()")
    press(browser, "ArrowRight")
    assert browser.evaluate("document.activeElement === document.querySelector('.token')")
    assert not browser.evaluate(f"{tip}.hidden")


@needs_chromium
@pytest.mark.slow
def test_what_the_model_says_is_text_and_no_page(browser, server, fake):
    fake.reply = EVIL
    show(browser, server)
    ask(browser, "import", max_tokens=60)
    browser.wait_for(IS_IDLE)
    assert browser.evaluate(ANSWER).startswith("import" + EVIL[:20])
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert browser.complaints() == []


MARKDOWN = (
    """## Steps

| what | how many |
|:--|--:|
| **requests** | 3 |

- [a link](https://example.org/) and ![a picture](https://example.org/picture.png)
- `code`

```python
print("hello")
```

"""
    + EVIL
)


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_chats_markdown_is_shown_as_elements_and_loads_nothing(browser, server, fake, size):
    fake.reply = MARKDOWN
    show(browser, server, *size)
    ask(browser, "hello", mode="chat", max_tokens=2000)
    browser.wait_for(IS_IDLE)
    said = ".entry:last-child > .said"
    assert browser.evaluate(f"document.querySelector('{said} h2').textContent") == "Steps"
    cell = f"document.querySelector('{said} td:last-child')"
    assert browser.evaluate(f"getComputedStyle({cell}).textAlign") == "right"
    assert browser.evaluate(f"document.querySelector('{said} .code pre').textContent") == 'print("hello")\n'
    assert browser.evaluate(f"document.querySelector('{said} .codebar span').textContent") == "python"
    assert browser.evaluate(f"document.querySelector('{said} a').rel") == "noopener noreferrer"
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert EVIL in browser.evaluate(f"document.querySelector('{said}').textContent")
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.complaints() == []
    assert all(url.startswith(server.url) or url == "data:," for url in browser.requests())


def press_button(browser, text):
    browser.evaluate(
        f"[...document.querySelectorAll('#log button')].filter((one) => one.textContent === {text!r}).at(-1).click()"
    )


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_an_answer_is_made_again_and_goes_on(browser, server, fake, mode):
    show(browser, server)
    ask(browser, "hello", mode, max_tokens=3)
    browser.wait_for(IS_IDLE)
    first = browser.evaluate(ANSWER).rstrip()
    press_button(browser, "Continue")
    browser.wait_for(f"{ANSWER}.length > {len(first) + 1} && " + IS_IDLE)
    assert browser.evaluate(ANSWER).startswith(first)
    decode = server.client.facts.codec.decode
    prompts = [decode(one.prompt_token_ids) for one in fake.asked]
    assert prompts[1].rstrip().endswith(first)
    press_button(browser, "Regenerate")
    browser.wait_for(IS_IDLE)
    browser.wait_for("document.querySelectorAll('.actions').length === 1")
    again = decode(fake.asked[2].prompt_token_ids)
    assert again == prompts[0 if mode == "chat" else 1]


@needs_chromium
@pytest.mark.slow
def test_a_called_function_gets_its_result(browser, server, fake):
    fake.reply = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    show(browser, server)
    browser.evaluate(
        "document.querySelector('[name=tools]').value = "
        "JSON.stringify([{name: 'get_weather', parameters: {type: 'object', properties: {city: {type: 'string'}}}}])"
    )
    ask(browser, "weather?", mode="chat", max_tokens=200)
    browser.wait_for(IS_IDLE)
    browser.wait_for("document.querySelector('.results')")
    assert "get_weather" in browser.evaluate("document.querySelector('.entry pre').textContent")
    fake.reply = "It rains."
    browser.evaluate("document.querySelector('.results textarea').value = 'rain'")
    press_button(browser, "Send result")
    browser.wait_for(f"{ANSWER}.includes('It rains')")
    prompt = server.client.facts.codec.decode(fake.asked[1].prompt_token_ids)
    assert prompt.index("weather?") < prompt.index("rain")


@needs_chromium
@pytest.mark.slow
def test_the_form_of_an_answer_is_asked_for_and_a_bad_schema_is_not_sent(browser, server, fake):
    show(browser, server)
    browser.evaluate("document.querySelector('[name=form]').value = 'json'")
    browser.evaluate("document.querySelector('[name=form]').dispatchEvent(new Event('change'))")
    browser.evaluate("document.querySelector('[name=formtext]').value = '{'")
    ask(browser, "hello", mode="chat")
    browser.wait_for("document.getElementById('form-error').textContent.startsWith('The schema is not JSON')")
    assert not fake.asked
    browser.evaluate("""document.querySelector('[name=formtext]').value = '{"type": "object"}'""")
    ask(browser, "hello", mode="chat")
    browser.wait_for("document.querySelector('.about, .entry .failed')")
    shown = browser.evaluate("document.getElementById('curl').textContent")
    assert '"structured_outputs"' in shown and '"type": "object"' in shown


@needs_chromium
@pytest.mark.slow
def test_colours_are_chosen(browser, server, fake):
    show(browser, server)
    colours = set()
    for _ in range(3):
        browser.evaluate("document.getElementById('theme').click()")
        colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


@needs_chromium
@pytest.mark.slow
def test_an_error_is_shown_and_the_prompt_is_not_lost(browser, server, fake):
    fake.error = RequestError("the prompt is not to my taste")
    show(browser, server)
    ask(browser, "hello", mode="chat")
    browser.wait_for("document.querySelector('.failed')")
    assert "not to my taste" in browser.evaluate("document.querySelector('.failed').textContent")
    assert browser.evaluate("document.getElementById('prompt').value") == "hello"


@needs_chromium
@pytest.mark.slow
def test_the_engines_state_is_live(browser, server, fake):
    show(browser, server)
    browser.wait_for("document.getElementById('running').textContent === '3'")
    figures = ["waiting", "cache", "speed", "state-text"]
    assert [browser.evaluate(f"document.getElementById('{one}').textContent") for one in figures] == [
        "2", "75 %", "1,234", "ready",
    ]  # fmt: skip
    fake.now, fake.is_ready = EngineLoad(0, 0, 1000, 1000, 0.0, 0.0), False
    browser.wait_for("document.getElementById('running').textContent === '0'")
    browser.wait_for("document.getElementById('state-text').textContent === 'not ready'")
    fake.death = "it died"
    browser.wait_for("document.getElementById('state-text').textContent === 'the engine has ended'")


@needs_chromium
@pytest.mark.slow
def test_each_replica_is_shown_and_why_one_is_dead(browser, server, fake):
    fake.replicas = (ReplicaState(None, EngineLoad(num_running=3, num_waiting=1)), ReplicaState(EVIL, EngineLoad()))
    show(browser, server)
    browser.wait_for("document.getElementById('state-text').textContent === '1 of 2 replicas ready'")
    lines = browser.evaluate("[...document.querySelectorAll('#replicas li')].map((one) => one.textContent).join('|')")
    assert lines == f"Replica 0: 3 running, 1 waiting|Replica 1: {EVIL}"
    fake.replicas = ()
    browser.wait_for("document.getElementById('replicas').hidden")
    assert browser.complaints() == []


@needs_chromium
@pytest.mark.slow
def test_the_request_is_shown_as_a_command(browser, server, fake):
    show(browser, server)
    browser.evaluate("document.querySelector('[value=completion]').click()")
    browser.evaluate("document.getElementById('prompt').focus()")
    browser.call("Input.insertText", text="it's")
    shown = browser.evaluate("document.getElementById('curl').textContent")
    assert shown.startswith(f"curl -N {server.url}/v1/completions ") and "\"it'\\''s\"" in shown

"""A page in a real browser: Chromium without a window, spoken to over two pipes (the DevTools protocol).

Also `python -m tests.browser PAGE PICTURE.png [WIDTH [HEIGHT]]`, which made the pictures in docs/.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """`with Browser() as browser`; events: whatever the page caused since it was opened."""

    def __enter__(self):
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = ["bash", "-c", 'exec "$@" 3<&"$IN" 4>&"$OUT"', "bash", CHROMIUM, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", "about:blank"],
            env={**os.environ, "IN": str(theirs_in), "OUT": str(theirs_out)},
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self._session, self.events = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *details):
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method, **params):
        """Give a command and return its result; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            some = os.read(self._in, 1 << 20)
            assert some, "the browser ended"
            self._rest += some
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=390, height=844, dark=False):
        """Show a file or an address, as a phone or a desktop of that width does, and wait until it is loaded."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path if "://" in str(path) else Path(path).resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression, seconds=60):
        """Until an expression of JavaScript is true: the page looks at each frame, and this waits for it."""
        waiting = f"""new Promise((done, fail) => {{
            const end = performance.now() + {1000 * seconds};
            const late = () => performance.now() > end;
            const look = () => ({expression}) ? done(true) : late() ? done(false) : setTimeout(look, 10);
            look();
        }})"""
        found = self.call("Runtime.evaluate", expression=waiting, awaitPromise=True, returnByValue=True)["result"]
        assert found.get("value") is True, (expression, found)

    def complaints(self):
        """Errors and warnings on the console since the page was opened."""
        consoles = [event for event in self.events if event.get("method") == "Runtime.consoleAPICalled"]
        return [event for event in self.events if event.get("method") in COMPLAINTS] + consoles

    def requests(self):
        """The addresses that the page asked for."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]

    def picture(self, path, whole=False):
        """Write what is shown, or the whole page, as a PNG file."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    page, picture, *size = sys.argv[1:]
    with Browser() as browser:
        browser.open(page, *map(int, size))
        browser.picture(picture, whole=len(size) < 2)

"""`hookline chat`, in a pipe and at a terminal: answers by the chat template over all that was said."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hookline import LLM, SamplingParams
from hookline.__main__ import main
from hookline.core.chat.terminal import _Interrupts

ROOT = Path(__file__).parents[1]
GREEDY = ["sampling.temperature=0", "sampling.max_tokens=12"]
MODULE = '''
from hookline.core.contracts import OutputParser, Reasoning, Text, hookimpl

API_VERSION = 2


class Halves(OutputParser):
    """The first two characters are reasoning."""

    def __init__(self, config, context):
        self._left = 2

    def push(self, text):
        head, rest = text[: self._left], text[self._left :]
        self._left -= len(head)
        return [one for one in (Reasoning(head), Text(rest)) if one.text]

    def finish(self):
        return []


@hookimpl
def register_reasoning_parsers(register):
    register("halves", "halves_parser:Halves", help="for a test")
'''


def talk(arguments: list[str], text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "hookline", "chat", *arguments]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(words, input=text, capture_output=True, text=True, env=given, check=False, timeout=200)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers of two turns, and of the second message alone."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM() as llm:
        first = {"role": "user", "content": "import os"}
        second = {"role": "user", "content": "def main():"}
        one = llm.chat([first], params)[0].text.strip()
        both = llm.chat([first, {"role": "assistant", "content": one}, second], params)[0].text.strip()
        alone = llm.chat([second], params)[0].text.strip()
    assert both != alone
    return [one, both, alone]


@pytest.mark.slow
def test_a_piped_conversation_has_its_history_until_it_is_reset(expected: list[str]) -> None:
    done = talk(GREEDY, "import os\n\ndef main():\n/again\n/reset\ndef main():\n")
    assert done.returncode == 0, done.stderr
    one, both, alone = expected
    found = re.sub(r"\s+", " ", done.stdout).strip()
    assert found == re.sub(r"\s+", " ", " ".join([one, both, both, alone])).strip()


@pytest.mark.slow
def test_what_cannot_be_answered_is_told_and_the_conversation_goes_on(expected: list[str]) -> None:
    done = talk([*GREEDY, "engine.max_model_len=64"], "x y z " * 100 + "\n/nope\nimport os\n/exit\nimport os\n")
    assert done.returncode == 2
    assert "hookline: error: " in done.stderr and "no command /nope. Commands: /reset" in done.stderr
    assert done.stdout.split() == expected[0].split()


@pytest.mark.slow
def test_reasoning_is_left_out_of_a_pipe(tmp_path: Path, expected: list[str]) -> None:
    (tmp_path / "halves_parser.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    arguments = [*GREEDY, "chat.reasoning_parser=halves"]
    done = talk(arguments, "import os\n", HOOKLINE_PLUGINS="halves_parser", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert expected[0].endswith(done.stdout.strip()) and len(done.stdout.strip()) < len(expected[0])


AT_PROMPT = re.compile(r"(?:^|\r|\n|\x1b\[\?2004h)> \Z")
"""A message can be typed: "> " begins a line, behind what readline may tell the terminal, and nothing follows it. An
answer's text may have it anywhere else."""


class AtTerminal:
    """The command with a terminal of its own."""

    def __init__(self, arguments: list[str], **environ: str) -> None:
        child, self._terminal = pty.fork()
        if child == 0:
            os.environ.update({"OMP_NUM_THREADS": "1", "TERM": "xterm", **environ})
            os.execv(sys.executable, [sys.executable, "-m", "hookline", "chat", *arguments])
        self.process, self.seen = child, ""

    def until(self, wanted: str | re.Pattern[str], timeout_s: float = 120) -> str:
        """What is shown up to a text, behind what was returned before."""
        pattern = re.compile(re.escape(wanted)) if isinstance(wanted, str) else wanted
        end_s = time.monotonic() + timeout_s
        while (found := pattern.search(self.seen)) is None:
            assert time.monotonic() < end_s, self.seen
            self.seen += os.read(self._terminal, 4096).decode(errors="replace")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def test_ctrl_c_between_a_line_and_its_answer_stops_the_answer() -> None:
    interrupts = _Interrupts()
    with interrupts.heard():
        with interrupts.raised():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.begin()
        assert interrupts.is_asked
        interrupts.end()
        with interrupts.raised():
            assert not interrupts.is_asked


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    chat = AtTerminal(["sampling.ignore_eos=true", "engine.max_model_len=2000"])
    chat.until(AT_PROMPT)
    chat.type("import os\n")
    chat.until("import os\r\n")
    os.kill(chat.process, signal.SIGINT)
    chat.until(AT_PROMPT)
    chat.type("half a line")
    chat.until("half a line")
    time.sleep(0.1)  # Python's readline does not hear a signal between what it writes and its wait for the next key
    chat.type("\x03")  # at the prompt it drops what was typed
    chat.until(AT_PROMPT)
    chat.type("/help\n")
    assert "/reset" in chat.until("backslash goes on in the next one.")
    chat.until(AT_PROMPT)
    chat.type("\x04")
    assert chat.end() == 0


@pytest.mark.slow
def test_a_terminal_shows_reasoning_faintly(tmp_path: Path) -> None:
    (tmp_path / "halves_parser.py").write_text(MODULE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    arguments = [*GREEDY, "chat.reasoning_parser=halves"]
    chat = AtTerminal(arguments, HOOKLINE_PLUGINS="halves_parser", PYTHONPATH=path)
    chat.until(AT_PROMPT)
    chat.type("import os\n")
    chat.until("\x1b[2m")
    assert len(chat.until("\x1b[0m").removesuffix("\x1b[0m").strip()) <= 2
    chat.until(AT_PROMPT)
    chat.type("/exit\n")
    assert chat.end() == 0


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("chat.reasoning_parser=thnk", "no reasoning_parser named 'thnk'. Did you mean 'think'?"),
        ("chat.template=3", "chat.template=3 is not a mapping"),
        ("sampling.n=2", "sampling.n=2: a conversation goes on from one answer"),
        ("sampling.tempreature=1", "unknown key 'sampling.tempreature'. Did you mean 'sampling.temperature'?"),
        ("-m", "a conversation has one configuration"),
    ],
)
def test_a_mistake_costs_no_start(argument: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", argument]) == 2
    assert error in capsys.readouterr().err

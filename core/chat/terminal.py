"""Reads messages and shows answers: at a terminal with a prompt and line editing, in a pipe a message a line.

Ctrl-C stops an answer, or drops what is being typed; the end of the input (Ctrl-D) ends the conversation.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hookline.core.chat.conversation import Conversation
from hookline.core.cli.output import FAINT, NORMAL, say, set_style
from hookline.core.contracts import Reasoning
from hookline.core.errors import RequestError
from hookline.core.outputs import FinishReason
from hookline.core.util.text import near_miss

PROMPT, GOES_ON = "> ", ". "
COMMANDS = {
    "/reset": "begins anew",
    "/again": "answers the last message once more",
    "/help": "shows this",
    "/exit": "leaves, as Ctrl-D does",
}
HELP = "\n".join(
    (
        *(f"  {name:<8}{what}" for name, what in COMMANDS.items()),
        "  Ctrl-C  stops an answer; what it has by then stays in the conversation",
        "  A line that ends with a backslash goes on in the next one.",
    )
)


class Terminal:
    """The loop of a conversation. exit_code: 2 once a message was refused in a pipe, else 0."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._interrupts = _Interrupts()
        self.exit_code = 0

    def run(self) -> None:
        """Read and answer until the input ends."""
        if self._is_interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # input() edits lines once it is imported
            say("Ctrl-C stops an answer, Ctrl-D leaves, /help shows more")
        with self._interrupts.heard():
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if not self._obey(line.rstrip()):
                        return
                elif line.strip():
                    self._answer(line)

    def _read(self) -> str | None:
        """The next message; None at the end of the input. Lines that end with a backslash are joined."""
        lines: list[str] = []
        while True:
            try:
                line = self._line(GOES_ON if lines else PROMPT)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                print()
                lines = []
                continue
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        with self._interrupts.raised():
            if not self._is_interactive:
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            try:
                return input(prompt)
            except EOFError:
                print()
                return None

    def _obey(self, line: str) -> bool:
        """Carry a command out; whether the conversation goes on."""
        if line == "/exit":
            return False
        if line == "/help":
            print(HELP)
        elif line == "/reset":
            self._conversation.reset()
        elif line == "/again":
            message = self._conversation.take_back()
            if message is None:
                say("there is nothing to answer again")
            else:
                self._answer(message)
        else:
            name = line.split()[0]
            hint = near_miss(name, list(COMMANDS))
            say(f"no command {name}.{hint} Commands: {', '.join(COMMANDS)}; a space in front makes it a message")
        return True

    def _answer(self, message: str) -> None:
        shown, is_thinking = "", False
        parts = self._conversation.answer(message)
        self._interrupts.begin()
        try:
            for part in parts:
                if isinstance(part, Reasoning) != is_thinking and part.text and self._is_interactive:
                    is_thinking = not is_thinking
                    sys.stdout.write("\n\n" if shown else "")
                    set_style(FAINT if is_thinking else NORMAL)
                if part.text and (self._is_interactive or not isinstance(part, Reasoning)):
                    shown = part.text
                    sys.stdout.write(shown)
                    sys.stdout.flush()
                if self._interrupts.is_asked:
                    parts.close()
                    break
        except RequestError as error:
            say(f"error: {error}; /reset begins anew" if self._is_interactive else f"error: {error}")
            self.exit_code = 0 if self._is_interactive else 2
        finally:
            set_style(NORMAL)
            self._interrupts.end()
        if shown and not shown.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        if self._conversation.finish_reason is FinishReason.LENGTH:
            say("the answer ends here by sampling.max_tokens, or because there is no room for more")


class _Interrupts:
    """Handles Ctrl-C: while an answer is shown, it stops the answer at its next step, and the program if pressed twice;
    while a line is read, it raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_answering = self._raises = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, Ctrl-C is handled here."""
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """While a line is read, Ctrl-C raises KeyboardInterrupt; an earlier Ctrl-C stops no later answer."""
        self.is_asked, self._raises = False, True
        try:
            yield
        finally:
            self._raises = False

    def begin(self) -> None:
        """Note that an answer begins; a Ctrl-C since the line was read has stopped it already."""
        self._is_answering = True

    def end(self) -> None:
        """Note that the answer has ended."""
        self._is_answering = False

    def _hear(self, number: int, frame: Any) -> None:
        if self._raises or (self._is_answering and self.is_asked):
            raise KeyboardInterrupt
        self.is_asked = True

"""The bodies of a load's requests to an OpenAI-compatible server, and how a conversation continues after an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hookline.core.bench.remote.settings import ClientConfig
from hookline.core.bench.workload import LoadRequest
from hookline.core.errors import RequestError
from hookline.core.sampling_params import UNTRUNCATED

PATHS = {"ids": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name president team minute idea body back parent face level "
    "office door health person art war history party result change morning reason research girl guy moment air teacher "
    "force education foot boy age policy music market sense light voice effort class action love letter paper space"
).split()
"""Words that stand for token ids where text is sent: a word is about a token."""


@dataclass
class Said:
    """An answer, for the next turn of its conversation. token_ids: None if the server does not return them."""

    text: str
    token_ids: list[int] | None


class Bodies:
    """Makes the body of each request. With turns, it keeps the conversations so far."""

    def __init__(self, config: ClientConfig, model: str, *, needs_answers: bool) -> None:
        self.config, self.needs_answers = config, needs_answers
        self.path = PATHS[config.prompts]
        self._model = model
        self._prompts: dict[int, Any] = {}

    def make(self, place: int, request: LoadRequest, said: Said | None = None) -> bytes:
        """The body of a request by its place in the load. said: the answer to the request that it follows.

        Raises: RequestError if the conversation cannot continue because the server did not return the answer's token
        ids.
        """
        prompt = self._prompt(request, said)
        if self.needs_answers:
            self._prompts[place] = prompt
        params = request.params
        body: dict[str, Any] = {
            "model": self._model,
            ("messages" if self.config.prompts == "chat" else "prompt"): prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            **{name: getattr(params, name) for name in UNTRUNCATED},
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_said(request),
        }
        if self.needs_answers and self.config.prompts == "ids":
            body["return_token_ids"] = True
        body |= self.config.body or {}
        return json.dumps({key: value for key, value in body.items() if value is not None}).encode()

    def num_prompt_tokens(self, place: int, request: LoadRequest) -> int:
        """Number of tokens sent, as far as the client can tell."""
        sent = self._prompts.get(place)
        return len(sent) if self.config.prompts == "ids" and sent is not None else len(request.tokens)

    def _prompt(self, request: LoadRequest, said: Said | None) -> Any:
        form = self.config.prompts
        new: Any = request.tokens if form == "ids" else as_text(request.tokens)
        if form == "chat":
            new = [{"role": "user", "content": new}]
        if request.follows is None:
            return new
        assert said is not None
        before = self._prompts.pop(request.follows)
        if form == "text":
            return f"{before}{said.text} {new}"
        if form == "chat":
            return [*before, {"role": "assistant", "content": said.text}, *new]
        if said.token_ids is None:
            raise RequestError(
                "the server returned no token_ids, which the next turn needs; take client.prompts=text or chat"
            )
        return [*before, *said.token_ids, *new]


def _said(request: LoadRequest) -> dict[str, Any]:
    """Members for a request's options; those without a value are left out, because other servers need not know them."""
    given = request.options.given()
    return given | {"tags": dict(given["tags"])} if "tags" in given else given


def as_text(tokens: list[int]) -> str:
    """A word for each token id; equal ids are equal words."""
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)

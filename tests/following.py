"""A plugin for tests: processors that follow their requests' tokens. HOOKLINE_PLUGINS=tests.following."""

from dataclasses import dataclass

import torch

from hookline.core.contracts import LogitsProcessor, hookimpl

API_VERSION = 2
CYCLE = 97


@dataclass
class TallyArguments:
    stop_after: int = 0
    """Ends the request with its token of this number, counted from 1; 0 does not."""
    fail_after: int = 0
    stop_text: str = ""
    """Ends the request with the first token whose text has this in it."""
    force: bool = False
    """Forces each token to be a function of all before it."""


class Tally(LogitsProcessor):
    """Counts and sums the tokens on the host."""

    follows_tokens = True
    reads_texts = True

    def __init__(self, spec):
        self.forced_R = torch.full((spec.num_rows,), -1, device=spec.device)

    @staticmethod
    def start(arguments, request):
        return {"arguments": arguments, "seen": [], "tokenizer": request.tokenizer}

    @staticmethod
    def on_token(state, token_id, logprob):
        arguments, seen = state["arguments"], state["seen"]
        seen.append(token_id)
        if len(seen) == arguments.fail_after:
            raise ValueError("on purpose")
        if arguments.stop_text and arguments.stop_text in state["tokenizer"].texts[token_id]:
            return f"found {arguments.stop_text!r}"
        return "enough" if len(seen) == arguments.stop_after else None

    @staticmethod
    def encode(arguments, request):
        return [sum(request.state["seen"]) % CYCLE + len(request.state["seen"]) if arguments.force else -1]

    def load(self, row, values_X):
        self.forced_R[row] = values_X[0] if len(values_X) else -1

    def process(self, logits_NV, rows):
        forced_N1 = self.forced_R[rows.rows_N].unsqueeze(1)
        others_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) != forced_N1
        return logits_NV.masked_fill(others_NV & (forced_N1 >= 0), -torch.inf)


def forced(count):
    """The tokens of a request whose tokens are forced."""
    seen = []
    for _ in range(count):
        seen.append(sum(seen) % CYCLE + len(seen))
    return seen


@hookimpl
def register_processors(register):
    register("tally", "tests.following:Tally", config=TallyArguments)

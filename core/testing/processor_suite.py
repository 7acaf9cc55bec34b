"""The conformance suite of logits processors: subclass it in your tests, name the class, its dataclass and examples.

It checks that a processor changes only the rows that use it; test its effect on them in your own tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hookline.core.contracts import TokenTexts
from hookline.core.testing.extension_suite import VOCAB_SIZE as VOCAB_SIZE
from hookline.core.testing.extension_suite import ExtensionSuite
from hookline.core.testing.processor_driver import ProcessorDriver


class ProcessorSuite(ExtensionSuite):
    """`class TestMine(ProcessorSuite): processor = Mine; config = MyArguments; examples = ({"n": 2.0},)`.

    device: where the processor runs. examples: arguments of requests, each of which changes some logits of the suite.
    If the processor reads tokens, the suite's requests hold `tokens`, of which the first num_prompt_tokens are the
    prompt; give others for one that looks at repetition. If it reads texts, name a `tokenizer`; if it wants
    log-probabilities, set has_logprobs. graph_safe, sizes_alike: as in the entry's Needs. reads_values_on_cpu: whether
    it reads values of tensors on the host where the device is a CPU, and there alone.
    """

    processor: ClassVar[Any]
    config: ClassVar[type]
    examples: ClassVar[Sequence[Mapping[str, Any]]]
    device: ClassVar[str] = "cpu"
    tokens: ClassVar[Sequence[int]] = tuple(range(1, 13))
    num_prompt_tokens: ClassVar[int] = 6
    tokenizer: ClassVar[TokenTexts | None] = None
    has_logprobs: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = True
    sizes_alike: ClassVar[bool] = False
    reads_values_on_cpu: ClassVar[bool] = False
    _kind: ClassVar[str] = "processor"

    @property
    def _method(self) -> str:
        return "process"

    def _driver(self) -> ProcessorDriver:
        return ProcessorDriver(self.processor, self.config, VOCAB_SIZE, self.device, self.tokenizer)

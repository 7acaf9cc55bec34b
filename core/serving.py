"""What API surfaces are made of: bodies that are read and checked, turns of a chat, completions, and answers.

For implementations of `hookline.core.contracts.ApiSurface`. Needs the packages of the extra `serve`.
"""

from hookline.core.batch.endpoints import posting
from hookline.core.batch.rows import PATHS as BATCH_PATHS
from hookline.core.batch.rows import Done, InputLine, RowError, answer_line, custom_id_of, has_failed, lines_of
from hookline.core.batch.rows import Row as BatchRow
from hookline.core.batch.runner import run_rows
from hookline.core.frontend.relevance import (
    QWEN3_RERANKER,
    cosine,
    embedding_params,
    pair_tokens,
    reading,
    scored,
    scoring_params,
)
from hookline.core.serve.chat.template import (
    MESSAGE_SHAPE,
    PLACE,
    ChatPrompt,
    checked_arguments,
    checked_message,
    checked_messages,
    decoded,
    effort_arguments,
    text_of,
    text_of_part,
)
from hookline.core.serve.chat.turn import (
    AUTO,
    NONE,
    REQUIRED,
    ClientTool,
    Tools,
    Turn,
    answer_turn,
    checked_tools,
    prepared,
)
from hookline.core.serve.endpoints.answering import Answers, EventStream, json_response
from hookline.core.serve.endpoints.body import Shape, also_ignored, checked, read
from hookline.core.serve.endpoints.fields import (
    SamplingFields,
    are_ids,
    at_least,
    max_new_tokens,
    sampling_params,
)
from hookline.core.serve.endpoints.generation import Generation, Usage, check_end
from hookline.core.serve.endpoints.pooling import pooled, pooling_params
from hookline.core.serve.endpoints.request_options import ServiceFields, span
from hookline.core.serve.endpoints.served_engine import ServedEngine, Work, new_id, now_s, places_of
from hookline.core.serve.endpoints.structured import FORMAT, FORMAT_SHAPE, SCHEMA, only_format
from hookline.core.serve.errors import SAME_NAMES, Naming, invalid, response, too_long
from hookline.core.serve.settings import REASONING_FIELDS
from hookline.core.tokenizer.token_spelling import SpeltText, TokenSpelling

__all__ = [
    "AUTO",
    "BATCH_PATHS",
    "FORMAT",
    "FORMAT_SHAPE",
    "MESSAGE_SHAPE",
    "NONE",
    "PLACE",
    "QWEN3_RERANKER",
    "REASONING_FIELDS",
    "REQUIRED",
    "SAME_NAMES",
    "SCHEMA",
    "Answers",
    "BatchRow",
    "ChatPrompt",
    "ClientTool",
    "Done",
    "EventStream",
    "Generation",
    "InputLine",
    "Naming",
    "RowError",
    "SamplingFields",
    "ServedEngine",
    "ServiceFields",
    "Shape",
    "SpeltText",
    "TokenSpelling",
    "Tools",
    "Turn",
    "Usage",
    "Work",
    "also_ignored",
    "answer_line",
    "answer_turn",
    "are_ids",
    "at_least",
    "check_end",
    "checked",
    "checked_arguments",
    "checked_message",
    "checked_messages",
    "checked_tools",
    "cosine",
    "custom_id_of",
    "decoded",
    "effort_arguments",
    "embedding_params",
    "has_failed",
    "invalid",
    "json_response",
    "lines_of",
    "max_new_tokens",
    "new_id",
    "now_s",
    "only_format",
    "pair_tokens",
    "places_of",
    "pooled",
    "pooling_params",
    "posting",
    "prepared",
    "read",
    "reading",
    "response",
    "run_rows",
    "sampling_params",
    "scored",
    "scoring_params",
    "span",
    "text_of",
    "text_of_part",
    "too_long",
]

"""What API surfaces are made of: bodies that are read and checked, turns of a chat, completions, and answers.

For implementations of `hookline.core.contracts.ApiSurface`. Needs the packages of the extra `serve`.
"""

from hookline.core.batch.endpoints import posting as posting
from hookline.core.batch.rows import (
    PATHS,
    Done as Done,
    InputLine as InputLine,
    RowError as RowError,
    answer_line as answer_line,
    custom_id_of as custom_id_of,
    has_failed as has_failed,
    lines_of as lines_of,
    Row,
)
from hookline.core.batch.runner import run_rows as run_rows
from hookline.core.frontend.relevance import (
    QWEN3_RERANKER as QWEN3_RERANKER,
    cosine as cosine,
    embedding_params as embedding_params,
    pair_tokens as pair_tokens,
    reading as reading,
    scored as scored,
    scoring_params as scoring_params,
)
from hookline.core.serve.chat.template import (
    MESSAGE_SHAPE as MESSAGE_SHAPE,
    PLACE as PLACE,
    ChatPrompt as ChatPrompt,
    checked_arguments as checked_arguments,
    checked_message as checked_message,
    checked_messages as checked_messages,
    decoded as decoded,
    effort_arguments as effort_arguments,
    text_of as text_of,
    text_of_part as text_of_part,
)
from hookline.core.serve.chat.turn import (
    AUTO as AUTO,
    NONE as NONE,
    REQUIRED as REQUIRED,
    ClientTool as ClientTool,
    TextGrammar as TextGrammar,
    Tools as Tools,
    Turn as Turn,
    answer_turn as answer_turn,
    checked_tools as checked_tools,
    prepared as prepared,
)
from hookline.core.serve.endpoints.answering import (
    Answers as Answers,
    EventStream as EventStream,
    json_response as json_response,
)
from hookline.core.serve.endpoints.body import (
    Shape as Shape,
    also_ignored as also_ignored,
    checked as checked,
    read as read,
)
from hookline.core.serve.endpoints.fields import (
    SamplingFields as SamplingFields,
    are_ids as are_ids,
    at_least as at_least,
    max_new_tokens as max_new_tokens,
    sampling_params as sampling_params,
    smallest_limit as smallest_limit,
)
from hookline.core.serve.endpoints.generation import (
    Generation as Generation,
    Usage as Usage,
    check_end as check_end,
)
from hookline.core.serve.endpoints.pooling import pooled as pooled, pooling_params as pooling_params
from hookline.core.serve.endpoints.request_options import ServiceFields as ServiceFields, span as span
from hookline.core.serve.endpoints.served_engine import (
    ServedEngine as ServedEngine,
    Work as Work,
    new_id as new_id,
    now_s as now_s,
    places_of as places_of,
)
from hookline.core.serve.endpoints.structured import (
    FORMAT as FORMAT,
    FORMAT_SHAPE as FORMAT_SHAPE,
    SCHEMA as SCHEMA,
    check_names as check_names,
    format_within as format_within,
    only_format as only_format,
)
from hookline.core.serve.errors import (
    SAME_NAMES as SAME_NAMES,
    Naming as Naming,
    invalid as invalid,
    response as response,
    too_long as too_long,
)
from hookline.core.serve.settings import REASONING_FIELDS as REASONING_FIELDS
from hookline.core.tokenizer.token_spelling import SpeltText as SpeltText, TokenSpelling as TokenSpelling

BATCH_PATHS = PATHS
BatchRow = Row

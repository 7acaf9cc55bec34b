"""Each limit that SECURITY.md states is the one of the code, where the page says it is set."""

import re
from pathlib import Path

import pytest

from hookline.core import errors, json_schemas, request_options, sampling_params, scheduling, structured_outputs
from hookline.core.batch import parts, rows
from hookline.core.bench import workload
from hookline.core.checkpoint import checkpoint, safetensors_files, tokenizer_growth
from hookline.core.cli import logs
from hookline.core.config.settings import EngineConfig
from hookline.core.layers import config_values, rope_config
from hookline.core.requests import compile_pool, step_extensions, structured_output
from hookline.core.tokenizer import chat_templates, codec
from hookline.core.util import files
from hookline.plugins.grammars import trial
from hookline.plugins.samplers import token_bias, word_ban

ROOT = Path(__file__).parents[1]
SHOWN = {
    "prompt and output": [EngineConfig.max_model_len],
    "a prompt's ids": [codec.MAX_TOKENS],
    "completions of a prompt, `n`": [sampling_params.MAX_COMPLETIONS],
    "`logprobs`, `prompt_logprobs`": [sampling_params.MAX_LOGPROBS],
    "`stop`": [sampling_params.MAX_STOPS, sampling_params.MAX_STOP_CHARACTERS],
    "`stop_token_ids`": [sampling_params.MAX_STOP_TOKEN_IDS],
    "`logit_bias`": [token_bias.MAX_TOKENS],
    "`allowed_token_ids`": [sampling_params.MAX_ALLOWED_TOKEN_IDS],
    "`bad_words`": [
        sampling_params.MAX_BAD_WORDS,
        sampling_params.MAX_BAD_WORD_CHARACTERS,
        sampling_params.MAX_BAD_WORD_TOKEN_IDS,
    ],
    "banned words as token ids, of which a text is two sequences": [word_ban.MAX_WORDS, word_ban.MAX_BEGINNING + 1],
    "`tags`": [request_options.MAX_TAGS, 32, request_options.MAX_TAG_CHARACTERS],
    "`cache_salt`": [request_options.MAX_SALT_CHARACTERS],
    "`extra_args`": [
        step_extensions.MAX_VALUES,
        step_extensions.MAX_CHARACTERS,
        step_extensions.MAX_DEPTH,
    ],
    "a JSON schema, `structural_tag`": [
        structured_outputs.MAX_SCHEMA_CHARACTERS,
        structured_outputs.MAX_SCHEMA_VALUES,
        structured_outputs.MAX_SCHEMA_DEPTH,
    ],
    "a JSON schema with all that its references name; patterns and formats of it that are tried": [
        structured_outputs.MAX_SCHEMA_VALUES,
        json_schemas.MAX_TRIED,
    ],
    "`regex`; `grammar`": [structured_outputs.MAX_REGEX_CHARACTERS, structured_outputs.MAX_GRAMMAR_CHARACTERS],
    "`choice`; `after`": [
        structured_outputs.MAX_CHOICES,
        structured_outputs.MAX_CHOICE_CHARACTERS,
        structured_outputs.MAX_AFTER_CHARACTERS,
    ],
    "a grammar that is not plain, while it is compiled: tried in a process of its own": [
        trial.CPU_S,
        trial.MAX_BYTES // 2**20,
    ],
    "the wait for a grammar: while its thread computes; in any case": [
        structured_output.COMPILE_S,
        compile_pool.PATIENCE * structured_output.COMPILE_S,
    ],
    "grammars that are compiled at once; of one tenant, by the tag `tenant`": [
        structured_output.COMPILE_THREADS,
        structured_output.COMPILE_THREADS - 1,
    ],
    "compiled grammars that are kept": [structured_output.CACHE_BYTES // 2**20],
    "JSON files of a checkpoint": [checkpoint.MAX_DEPTH],
    "a shard's name in a checkpoint's index": [safetensors_files.MAX_FILE_NAME],
    "sizes of a checkpoint's config.json": [config_values.MAX_SIZE, config_values.MAX_LAYERS],
    "positions of a checkpoint": [rope_config.MAX_POSITION],
    "a chat template, for one conversation": [
        chat_templates.TIMEOUT_S,
        chat_templates.MAX_BYTES // 2**30,
        chat_templates.MAX_CHARACTERS,
        chat_templates.MAX_NUMBER,
    ],
    "a tokenizer.json: characters or ids that it makes of one; that it adds to a text": [
        tokenizer_growth.MAX_GROWTH,
        tokenizer_growth.MAX_ADDED,
    ],
    "a text of which it makes longer ones": [codec.MAX_CHARACTERS],
    "a line of a command about itself": [logs.MAX_LINE],
    "a request that has begun, without a token": [scheduling.MAX_PROMPT_STEPS],
    "an error's text, where it shows a value": [errors.MAX_SHOWN],
    "a line of a batch": [rows.MAX_LINE_BYTES // 2**20],
    "a parquet file of a batch": [parts.MAX_ROWS, parts.MAX_PART_BYTES // 2**30],
    "a prompt of a trace": [workload.MAX_PROMPT_TOKENS],
    "numbers": [sampling_params.MAX_WHOLE + 1, 2**structured_outputs.MAX_BITS],
    "files of prompts, traces, keys and costs, and standard input": [files.MAX_READ],
}
OF_THE_SERVER = (
    "prompts, inputs or documents of one request to a server",
    "log-probabilities of prompts in one answer",
    "values in a large body",
    "messages, tools",
)
WITHOUT_NUMBER = (
    "a prompt's text, before",
    "messages of a chat, before",
    "a server's requests",
    "requests that wait",
    "a request's time",
    "a checkpoint's weights",
)


def limits():
    section = (ROOT / "SECURITY.md").read_text().partition("## Limits")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in cells[2:]}


def numbers(text):
    found = re.findall(r"(\d+)(?:\*\*|\^)(\d+)|(\d[\d,]*(?:\.\d+)?)", text.replace("float32", ""))
    return [int(base) ** int(power) if base else float(plain.replace(",", "")) for base, power, plain in found]


@pytest.mark.parametrize("what", SHOWN)
def test_a_limit_of_the_page_is_the_one_of_the_code(what):
    assert numbers(limits()[what][0]) == SHOWN[what]


def test_the_limits_of_a_server_are_the_ones_of_its_code():
    pytest.importorskip("msgspec", reason="needs the extra: pip install hookline[serve]")
    from hookline.core.serve.chat import template, turn
    from hookline.core.serve.endpoints import body
    from hookline.core.serve.settings import ServeConfig
    from hookline.plugins.apis.openai import completion_request

    texts = {name: row[0] for name, row in limits().items() if name.startswith(OF_THE_SERVER)}
    told = [numbers(name + " " + text if "(" in name else text) for name, text in texts.items()]
    assert told == [
        [ServeConfig.max_requests],
        [completion_request.MAX_PROMPT_SCORES],
        [body.MAX_VALUES, body.MAX_DIGITS],
        [template.MAX_MESSAGES, turn.MAX_TOOLS],
    ]


def test_every_limit_of_the_page_is_looked_at_and_is_set_where_it_says():
    for what, (_, place) in limits().items():
        assert what in SHOWN or what.startswith((*OF_THE_SERVER, *WITHOUT_NUMBER)), what
        for path in re.findall(r"\b(?:core|plugins)/[\w/]+(?:\.py)?", place):
            assert (ROOT / path).exists(), path

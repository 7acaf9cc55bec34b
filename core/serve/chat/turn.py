"""One turn of a chat, for every API: its prompt, its sampling parameters, and the parsers of its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.contracts import ErrorForm, OutputParser, is_offered
from hookline.core.errors import PromptTooLongError, shown
from hookline.core.json_schemas import JoinedSchemas, SchemaError
from hookline.core.plugin.registry import Entry
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.chat.forced_calls import NamedCall, RequiredCalls, call_tags, named_schema, required_schema
from hookline.core.serve.chat.template import ChatPrompt
from hookline.core.serve.endpoints.body import also_ignored
from hookline.core.serve.endpoints.fields import SamplingFields, max_new_tokens, sampling_params
from hookline.core.serve.endpoints.served_engine import ServedEngine, Work, new_id
from hookline.core.serve.endpoints.structured import AnswerForm, as_element, is_strict_at
from hookline.core.serve.errors import Naming, invalid, placed, top_field
from hookline.core.serve.parsers import Parser, PartsReader, parser_context
from hookline.core.structured_outputs import StructuredOutputs

Values = Mapping[str, Any]
AUTO, NONE, REQUIRED = "auto", "none", "required"
MAX_TOOLS = 1024
"""Most tools of a request."""
MAX_NAME = 256
"""Most characters of a function's name."""


@dataclass(frozen=True)
class TextGrammar:
    """What a tool's input must look like if the tool takes a text in place of JSON arguments.

    form: the arguments of StructuredOutputs. place: where the request has the grammar's definition. pattern: the same
    grammar as a JSON schema's pattern in the function's parameters; None if a pattern cannot say it.
    """

    form: Values
    place: str
    pattern: str | None = None


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs, and the function that the model calls for it.

    function: name, description and parameters. place: of the tool in the request, e.g. `tools[0]`. kind, name,
    namespace: of the tool in the client's API.
    """

    function: Values
    place: str
    kind: str = "function"
    name: Any = None
    namespace: str | None = None
    grammar: TextGrammar | None = None
    is_plain: bool = False
    """Whether the answer is a forced call, and nothing but a text that follows the grammar."""


@dataclass(frozen=True)
class Tools:
    """The tools that a model may call, and whether it must.

    choice: auto, none, required, or the name of a function behind `=`. calls_one: allow at most one call in an answer.
    schema_key: where a tool of the request has its parameters. ignored: names of the request's tools that neither the
    client nor this server runs.
    """

    tools: Sequence[ClientTool] = ()
    choice: str = AUTO
    calls_one: bool = False
    schema_key: str = "parameters"
    ignored: Sequence[str] = ()

    @cached_property
    def functions(self) -> Sequence[Values]:
        """The functions that the model may call."""
        return [tool.function for tool in self.tools]

    def named(self, name: str) -> ClientTool | None:
        """The tool whose function has this name."""
        return next((tool for tool in self.tools if tool.function["name"] == name), None)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The functions in the form that chat templates expect."""
        functions = ({key: value for key, value in one.items() if key != "strict"} for one in self.functions)
        return [{"type": "function", "function": function} for function in functions]

    @property
    def places(self) -> list[str]:
        """Places of the functions' parameters in the request."""
        return [f"{tool.place}.{self.schema_key}" for tool in self.tools]

    @property
    def is_forced(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.choice == REQUIRED or self.choice.startswith("=")

    def forced_schema(self, joined: JoinedSchemas) -> tuple[Any, str]:
        """The structured outputs of a forced answer, and the place in the request that they are made from: all tools,
        if the model may call any of several.

        Raises: SchemaError for a strict function whose schema is not supported.
        """
        names, places = [f"={function['name']}" for function in self.functions], self.places
        if self.choice in names:
            index = names.index(self.choice)
            return named_schema(self.functions[index], places[index], joined), places[index]
        schema = required_schema(self.functions, places, joined, one_only=self.calls_one)
        return schema, places[0] if len(names) == 1 else "tools"

    @property
    def forced_parser(self) -> OutputParser | None:
        """The parser of a forced answer."""
        if self.choice.startswith("="):
            return NamedCall(self.choice[1:])
        return RequiredCalls() if self.choice == REQUIRED else None


def checked_tools(
    tools: Sequence[ClientTool],
    choice: str,
    *,
    calls_one: bool = False,
    schema_key: str = "parameters",
    ignored: Sequence[str] = (),
) -> Tools:
    """Check the definitions of the tools and the tool choice. Same arguments as `Tools`.

    Raises: ApiError with status 400 naming the tool.
    """
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are allowed", "tools")
    for tool in tools:
        name = tool.function.get("name")
        if not isinstance(name, str) or not name:
            raise invalid(f"{tool.place}={shown(tool.function)} is not a function with a name", "tools")
        if len(name) > MAX_NAME or not name.isprintable() or {'"', "\\"} & set(name):
            told = f'at most {MAX_NAME} printable characters without " and \\'
            raise invalid(f"{tool.place}: the name {shown(name)} of a function must be {told}", "tools")
        given = tool.function.get("parameters")
        if isinstance(given, bool):
            raise invalid(f"{tool.place}.{schema_key}={shown(given)} is not a JSON schema of objects", "tools")
        if not isinstance(given or {}, Mapping):
            raise invalid(f"{tool.place}.{schema_key}={shown(given)} is not a JSON schema", "tools")
        is_strict_at(tool.function, f"{tool.place}.{schema_key}".rpartition(".")[0])
    names = [tool.function["name"] for tool in tools]
    if choice.startswith("=") and choice[1:] not in names:
        told = f"tool_choice names {shown(choice[1:])}, which is not among the tools"
        raise invalid(told + _not_run(ignored), "tool_choice")
    if choice == REQUIRED and not tools:
        raise invalid("tool_choice forces a call, and there are no tools" + _not_run(ignored), "tool_choice")
    return Tools(tools, choice, calls_one, schema_key, ignored)


def _not_run(ignored: Sequence[str]) -> str:
    """The end of an error about a missing tool: which of the request's tools are ignored."""
    kinds = [place.removeprefix("tools.") for place in ignored if re.fullmatch(r"tools\.\w+", place)]
    return f" that can be called here; of type {', '.join(dict.fromkeys(kinds))} none can" if kinds else ""


@dataclass(frozen=True)
class Turn:
    """A turn that is ready to be generated."""

    prompt: str
    token_ids: list[int]
    params: SamplingParams
    tools: Tools
    readers: Sequence[Parser]
    naming: Naming
    """Parameter -> the request's field that errors name in its place."""
    ignored: Sequence[str]
    """Places of the request that have no effect."""

    def reader(self) -> PartsReader:
        """A new parser for one completion."""
        context = parser_context(self.prompt, self.tools.functions)
        made: list[tuple[OutputParser, Entry | None]] = [(one.make(context), one.entry) for one in self.readers]
        forced = self.tools.forced_parser
        return PartsReader([*made, (forced, None)] if forced is not None else made, calls_one=self.tools.calls_one)

    @property
    def is_plain(self) -> bool:
        """Whether the completion's text is its answer unchanged, so that no parser is needed."""
        return not self.readers and self.tools.forced_parser is None


def prepared(
    engine: ServedEngine,
    chat: ChatPrompt,
    fields: SamplingFields,
    tools: Tools,
    *,
    max_tokens: int | None,
    add_special_tokens: bool = False,
    **further: Any,
) -> Turn:
    """Make a turn of messages, tools and sampling fields. May take long: see `ServedEngine.in_time`.

    max_tokens: as the request has it; None: as many as there is room for. further: fields of SamplingParams.
    Raises: RequestError or ApiError if the request cannot be served.
    """
    _check_patterns(engine, tools)
    names = fields.own_names
    prompt_name, limit_name = (names.get(name, name) for name in ("messages", "max_tokens"))
    try:
        prompt = chat.render(engine.codec)
        ids = engine.codec.encode_text(prompt, add_special_tokens=add_special_tokens)
    except PromptTooLongError as error:
        raise placed(error, prompt_name) from None
    readers = _readers(engine, tools)
    wanted, place, ignored = answer_or_calls(engine, tools, fields.form)
    if wanted is not None:
        names["structured_outputs"] = place
        if wanted.after is None and (tag := _closing_tag(engine, chat, prompt)) is not None:
            wanted = replace(wanted, after=tag)
    if any(reader.keeps_special_tokens for reader in readers):
        further["skip_special_tokens"] = False
    max_len, naming = engine.facts.max_model_len, Naming(names)
    most = max_new_tokens(max_tokens, None, len(ids), max_len, prompt=prompt_name, limit=limit_name)
    with naming:
        params = sampling_params(fields, most, structured_outputs=wanted, **further)
    return Turn(prompt, ids, params, tools, readers, naming, [*ignored, *tools.ignored, *chat.ignored])


def _check_patterns(engine: ServedEngine, tools: Tools) -> None:
    """Refuse grammars of tools that schemas would leave out. The back end itself refuses a plain one, and says why."""
    for tool in tools.tools:
        grammar = None if tool.is_plain else tool.grammar
        if grammar is not None and grammar.pattern is not None:
            if engine.schema_rules.cannot_hold("pattern", grammar.pattern):
                told = f"={shown(grammar.form['regex'])} is malformed, or more than this server's grammars can hold"
                raise invalid(f"{grammar.place}{told}", top_field(grammar.place))


def answer_or_calls(
    engine: ServedEngine, tools: Tools, form: AnswerForm | None
) -> tuple[StructuredOutputs | None, str, list[str]]:
    """The structured outputs of a completion, if the request asks for any, and the places in them that have no effect.

    With a forced call, `response_format` waits for the turn without one. Where the model may choose, the grammar allows
    calls or the `response_format`.
    Raises: ApiError with status 400 if no grammar can be made.
    """
    try:
        if tools.is_forced:
            tool = tools.named(tools.choice.removeprefix("="))
            if tool is not None and tool.is_plain and tool.grammar is not None:
                with Naming({"structured_outputs": tool.grammar.place}):
                    return StructuredOutputs(**tool.grammar.form), tool.grammar.place, [form.name] if form else []
            joined = JoinedSchemas(engine.schema_rules)
            schema, place = tools.forced_schema(joined)
            with Naming({"structured_outputs": place}):
                forced = StructuredOutputs(json=schema)
            return forced, place, joined.dropped + ([form.name] if form is not None else [])
        may_call = bool(tools.functions) and tools.choice == AUTO
        strict = [place for one, place in zip(tools.functions, tools.places, strict=True) if one.get("strict") is True]
        if form is None and not (may_call and strict):
            return None, "", []
        held, dropped = (None, []) if form is None else form.held(engine.schema_rules)
        if not may_call:
            assert form is not None
            return held, form.place, dropped
        return _calls_or(engine, tools, form, held, dropped, strict)
    except SchemaError as error:
        raise invalid(str(error), top_field(error.place)) from None


def _calls_or(
    engine: ServedEngine,
    tools: Tools,
    form: AnswerForm | None,
    held: StructuredOutputs | None,
    dropped: list[str],
    strict: Sequence[str],
) -> tuple[StructuredOutputs | None, str, list[str]]:
    """A structural tag that allows calls in the model's own form, or else what `held` allows; if that is None, free
    text.
    """
    parser = engine.parsers.tools
    assert parser is not None
    how = parser.cls.call_form
    # A grammar of text cannot have special tokens, which some models write around their calls.
    in_text = engine.facts.grammars is not None and not parser.keeps_special_tokens
    if not is_offered(how) or (held is None and not in_text):
        if form is None:
            return None, "", [f"{place.rpartition('.')[0]}.strict" for place in strict]
        why = f"{parser.entry} does not say how the model writes calls"
        raise invalid(f"{form.place} and tools are both set, and {why}; leave one out, or force a call", "tools")
    functions = tools.functions if held is not None else [_open_unless_strict(one) for one in tools.functions]
    tags, first = call_tags(functions, tools.places, how, engine.schema_rules, dropped)
    if held is None or form is None:
        free = {"format": {"type": "triggered_tags", "triggers": [first.trigger], "tags": tags}}
        return StructuredOutputs(structural_tag=free), "tools", dropped
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": first.between,
        "at_least_one": True,
        "stop_after_first": tools.calls_one,
    }
    either = {"format": {"type": "or", "elements": [calls, as_element(held)]}}
    wanted = StructuredOutputs(structural_tag=either, whitespace=held.whitespace, after=held.after)
    return wanted, f"{form.place} or tools", dropped


def _open_unless_strict(function: Values) -> Values:
    """Functions that are not strict get any arguments, as they would without a grammar."""
    any_object = {"type": "object", "additionalProperties": True}
    return function if function.get("strict") is True else {"name": function["name"], "parameters": any_object}


async def answer_turn(
    engine: ServedEngine,
    request: Request,
    fields: Any,
    headers: Mapping[str, str],
    prefix: str,
    make: Callable[[Turn, str, str], Work],
    form: ErrorForm,
) -> Response:
    """Check a request, generate its turn, and make the response.

    fields: a struct with `check`, and `turn`, which may take long. headers: of the response. prefix: of the response's
    id. make: makes the answer from the turn, the response's id and the model's name.
    Raises: RequestError or ApiError if the request cannot be served.
    """
    name = engine.model_name(fields.model)
    fields.check()
    size = len(await request.body())
    turn = await engine.in_time(size, lambda: fields.turn(engine), has_schemas=fields.may_have_schemas)
    headers = also_ignored(headers, turn.ignored)
    work = make(turn, new_id(prefix, request), name)
    return await engine.answer(work, [(turn.token_ids, turn.params)], fields, request, headers, form, turn.naming)


def _closing_tag(engine: ServedEngine, chat: ChatPrompt, prompt: str) -> str | None:
    """The tag after which the answer begins, if the model reasons first."""
    parser = engine.parsers.reasoning
    tag = None if parser is None else parser.cls.closing_tag
    template = getattr(engine.codec.tokenizer, "chat_template", None)
    if not tag or tag not in str(template) or prompt.rstrip().endswith(tag):
        return None
    begun = chat.messages[-1]["content"] if chat.continues_last else ""
    reasons = not begun or (tag.replace("/", "", 1) in begun and tag not in begun)
    return tag if reasons else None


def _readers(engine: ServedEngine, tools: Tools) -> list[Parser]:
    found = [engine.parsers.reasoning] if engine.parsers.reasoning is not None else []
    if tools.functions and tools.choice == AUTO:
        if engine.parsers.tools is None:
            raise invalid("tool_choice='auto' needs a tool parser; the server has none: serve.tool_parser", "tools")
        found.append(engine.parsers.tools)
    return found

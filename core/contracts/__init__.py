"""What plugins implement and what they are given: protocols and plain values.

A plugin imports its contract from here, and nothing else of core but `layers`, `scheduling`, `parsing`, `testing` and
the errors. Each kind has a module of its own, with the legend of its shapes. Importing them imports no torch.
"""

from hookline.core.contracts.batch import Batch
from hookline.core.contracts.cache import (
    FullAttention,
    LayerCache,
    NoCache,
    RecurrentState,
    SharedCache,
    SlidingWindow,
    StateRows,
    StateTensor,
)
from hookline.core.contracts.exchange import (
    EMPTY,
    HEADER_BYTES,
    MIN_SLOT_BYTES,
    NUM_COPIES,
    WORD_BYTES,
    Exchange,
    PeerMemory,
)
from hookline.core.contracts.grammar import Grammar, GrammarBackend, GrammarMatcher, GrammarVocabulary
from hookline.core.contracts.hooks import API_VERSION, Registrar, hookimpl
from hookline.core.contracts.kernels import (
    ATTENTION_FEATURES,
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Kernels,
    QKNorm,
    Rope,
    StepShape,
)
from hookline.core.contracts.model import (
    WHOLE_MODEL,
    Attend,
    Model,
    ModelConfig,
    ModelSpec,
    RunsInStages,
    Runtime,
    Stage,
    wanted_rows,
)
from hookline.core.contracts.needs import Needs
from hookline.core.contracts.norms import NormsAndGates
from hookline.core.contracts.observer import EngineView, Observer, RequestBegin, StepStats, TappedStates
from hookline.core.contracts.optional import is_offered
from hookline.core.contracts.parser import (
    Arguments,
    OutputParser,
    ParsedPart,
    ParserContext,
    Reasoning,
    Text,
    ToolCall,
)
from hookline.core.contracts.pooler import PooledChunks, Pooler, PoolerModel, PoolerSpec
from hookline.core.contracts.processor import (
    FromSamplingParams,
    LogitsProcessor,
    LogitsRows,
    ProcessorSpec,
    RequestFacts,
    TokenTexts,
)
from hookline.core.contracts.ranks import Ranks
from hookline.core.contracts.request_rows import DecodeInputs, RequestRows
from hookline.core.contracts.sampler import NO_TOKEN, Sampler, SamplingBatch
from hookline.core.contracts.scheduler import (
    ALL,
    MAX_SERVED_VALUES,
    BlockBudget,
    CommittedStep,
    Ended,
    Everyone,
    Limits,
    Plan,
    Prefilled,
    RemembersSteps,
    RequestView,
    Scheduler,
    SchedulerView,
    ServedTokens,
)
from hookline.core.contracts.weights import CheckpointSource, Init, OpensCheckpoint, Part, RenamesTensors, WeightTarget
from hookline.core.structured_outputs import StructuredOutputs
from hookline.core.util.ranges import bounded

__all__ = [
    "ALL",
    "API_VERSION",
    "ATTENTION_FEATURES",
    "EMPTY",
    "HEADER_BYTES",
    "MAX_SERVED_VALUES",
    "MIN_SLOT_BYTES",
    "NO_TOKEN",
    "NUM_COPIES",
    "PLAIN_ATTENTION",
    "WHOLE_MODEL",
    "WORD_BYTES",
    "Arguments",
    "Attend",
    "AttentionForm",
    "AttentionSpec",
    "Batch",
    "BlockBudget",
    "CheckpointSource",
    "CommittedStep",
    "DecodeInputs",
    "Ended",
    "EngineView",
    "Everyone",
    "Exchange",
    "FromSamplingParams",
    "FullAttention",
    "Grammar",
    "GrammarBackend",
    "GrammarMatcher",
    "GrammarVocabulary",
    "Init",
    "Kernels",
    "LayerCache",
    "Limits",
    "LogitsProcessor",
    "LogitsRows",
    "Model",
    "ModelConfig",
    "ModelSpec",
    "Needs",
    "NoCache",
    "NormsAndGates",
    "Observer",
    "OpensCheckpoint",
    "OutputParser",
    "ParsedPart",
    "ParserContext",
    "Part",
    "PeerMemory",
    "Plan",
    "PooledChunks",
    "Pooler",
    "PoolerModel",
    "PoolerSpec",
    "Prefilled",
    "ProcessorSpec",
    "QKNorm",
    "Ranks",
    "Reasoning",
    "RecurrentState",
    "Registrar",
    "RemembersSteps",
    "RenamesTensors",
    "RequestBegin",
    "RequestFacts",
    "RequestRows",
    "RequestView",
    "Rope",
    "RunsInStages",
    "Runtime",
    "Sampler",
    "SamplingBatch",
    "Scheduler",
    "SchedulerView",
    "ServedTokens",
    "SharedCache",
    "SlidingWindow",
    "Stage",
    "StateRows",
    "StateTensor",
    "StepShape",
    "StepStats",
    "StructuredOutputs",
    "TappedStates",
    "Text",
    "TokenTexts",
    "ToolCall",
    "WeightTarget",
    "bounded",
    "hookimpl",
    "is_offered",
    "wanted_rows",
]

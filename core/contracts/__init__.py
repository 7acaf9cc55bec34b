"""The contracts of plugins: the protocols that they implement, and the plain values that core passes to them.

A plugin imports its contract from here, and nothing else of core but `layers`, `scheduling`, `parsing`, `testing` and
the errors. Each kind has its own module, with the legend of its shapes. Importing them imports no torch.
"""

from hookline.core.contracts.api import (
    ApiEngine as ApiEngine,
    ApiError as ApiError,
    ApiRoute as ApiRoute,
    ApiSurface as ApiSurface,
    ErrorForm as ErrorForm,
    ModelCard as ModelCard,
    OpenCompletions as OpenCompletions,
)
from hookline.core.contracts.batch import (
    Batch as Batch,
    DecodeInputs as DecodeInputs,
    DraftingRows as DraftingRows,
    RequestRows as RequestRows,
    wanted_rows as wanted_rows,
)
from hookline.core.contracts.cache import (
    FullAttention as FullAttention,
    LayerCache as LayerCache,
    NoCache as NoCache,
    RecurrentState as RecurrentState,
    SharedCache as SharedCache,
    SlidingWindow as SlidingWindow,
    StateRows as StateRows,
    StateTensor as StateTensor,
)
from hookline.core.contracts.draft_head import DraftHead as DraftHead, HasDraftHead as HasDraftHead
from hookline.core.contracts.drafter import (
    ComputedRow as ComputedRow,
    DraftCounts as DraftCounts,
    Drafter as Drafter,
    DrafterSpec as DrafterSpec,
    DraftRow as DraftRow,
    DraftTarget as DraftTarget,
    HeadAttention as HeadAttention,
)
from hookline.core.contracts.exchange import (
    EMPTY as EMPTY,
    HEADER_BYTES as HEADER_BYTES,
    MIN_SLOT_BYTES as MIN_SLOT_BYTES,
    NUM_COPIES as NUM_COPIES,
    WORD_BYTES as WORD_BYTES,
    Exchange as Exchange,
    PeerMemory as PeerMemory,
)
from hookline.core.contracts.executor import (
    RankExecutor as RankExecutor,
    RankPlace as RankPlace,
    RankStart as RankStart,
    StartedRank as StartedRank,
    WantedRanks as WantedRanks,
)
from hookline.core.contracts.extension import (
    ExtensionSpec as ExtensionSpec,
    FromSamplingParams as FromSamplingParams,
    LayerRows as LayerRows,
    LogitsRows as LogitsRows,
    RequestFacts as RequestFacts,
    StepExtension as StepExtension,
    TokenTexts as TokenTexts,
)
from hookline.core.contracts.grammar import (
    Grammar as Grammar,
    GrammarBackend as GrammarBackend,
    GrammarMatcher as GrammarMatcher,
    GrammarVocabulary as GrammarVocabulary,
)
from hookline.core.contracts.hooks import API_VERSION as API_VERSION, Registrar as Registrar, hookimpl as hookimpl
from hookline.core.contracts.kernels import (
    ATTENTION_FEATURES as ATTENTION_FEATURES,
    PLAIN_ATTENTION as PLAIN_ATTENTION,
    AttentionForm as AttentionForm,
    AttentionSpec as AttentionSpec,
    DeltaNet as DeltaNet,
    Kernels as Kernels,
    QKNorm as QKNorm,
    Rope as Rope,
    StepShape as StepShape,
)
from hookline.core.contracts.latents import LatentProducts as LatentProducts
from hookline.core.contracts.model import (
    WHOLE_MODEL as WHOLE_MODEL,
    Attend as Attend,
    Model as Model,
    Activation as Activation,
    ModelConfig as ModelConfig,
    ModelSpec as ModelSpec,
    NormsStreams as NormsStreams,
    RunsInStages as RunsInStages,
    Runtime as Runtime,
    Stage as Stage,
    WeightFactory as WeightFactory,
)
from hookline.core.contracts.needs import Needs as Needs
from hookline.core.contracts.norms import NormsAndGates as NormsAndGates
from hookline.core.contracts.observer import (
    EngineView as EngineView,
    ExtensionCost as ExtensionCost,
    Observer as Observer,
    RequestBegin as RequestBegin,
    StepStats as StepStats,
    TappedStates as TappedStates,
)
from hookline.core.contracts.optional import is_offered as is_offered
from hookline.core.contracts.parser import (
    Arguments as Arguments,
    CallForm as CallForm,
    OutputParser as OutputParser,
    ParsedPart as ParsedPart,
    ParserContext as ParserContext,
    Reasoning as Reasoning,
    Text as Text,
    ToolCall as ToolCall,
)
from hookline.core.contracts.pooler import (
    PooledChunks as PooledChunks,
    Pooler as Pooler,
    PoolerModel as PoolerModel,
    PoolerSpec as PoolerSpec,
)
from hookline.core.contracts.processor import LogitsProcessor as LogitsProcessor, ProcessorSpec as ProcessorSpec
from hookline.core.contracts.quantization import (
    LoadingMatrix as LoadingMatrix,
    MatrixPlace as MatrixPlace,
    Quantization as Quantization,
    QuantizationConfig as QuantizationConfig,
    StoredForm as StoredForm,
)
from hookline.core.contracts.quantized import (
    FP4 as FP4,
    FP4_VALUES as FP4_VALUES,
    FP8 as FP8,
    HALF_INT4 as HALF_INT4,
    INT4 as INT4,
    OFFSETS as OFFSETS,
    OffsetMatrix as OffsetMatrix,
    INT8 as INT8,
    QuantizedMatrix as QuantizedMatrix,
    QuantizedProducts as QuantizedProducts,
    ScaledMatrix as ScaledMatrix,
    Scheme as Scheme,
)
from hookline.core.contracts.ranks import Ranks as Ranks
from hookline.core.contracts.sampler import NO_TOKEN as NO_TOKEN, Sampler as Sampler, SamplingBatch as SamplingBatch
from hookline.core.contracts.scheduler import (
    ALL as ALL,
    MAX_SERVED_VALUES as MAX_SERVED_VALUES,
    BlockBudget as BlockBudget,
    CommittedStep as CommittedStep,
    Ended as Ended,
    Everyone as Everyone,
    Joining as Joining,
    Limits as Limits,
    Plan as Plan,
    Prefilled as Prefilled,
    RemembersSteps as RemembersSteps,
    RequestView as RequestView,
    Scheduler as Scheduler,
    SchedulerView as SchedulerView,
    ServedTokens as ServedTokens,
)
from hookline.core.contracts.weights import (
    CheckpointSource as CheckpointSource,
    ExpertWeights as ExpertWeights,
    FitsTargets as FitsTargets,
    Init as Init,
    MatrixPiece as MatrixPiece,
    OpensCheckpoint as OpensCheckpoint,
    Part as Part,
    RenamesTensors as RenamesTensors,
    Weight as Weight,
    WeightTarget as WeightTarget,
)
from hookline.core.structured_outputs import StructuredOutputs as StructuredOutputs
from hookline.core.util.ranges import bounded as bounded

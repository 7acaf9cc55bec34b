"""Train the tiny Qwen3 checkpoint that Hookline bundles to check an installation.

Trains a byte-level BPE and a 6.5 M-parameter Qwen3ForCausalLM on the Python standard
library's own sources, holding out about one file in forty, and writes a folder in the
Hugging Face layout: python tools/train_bundled.py --out plugins/models/qwen3_tiny
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

VOCABULARY_SIZE = 4096
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, MESSAGE_START, MESSAGE_END]
SEQUENCE_LENGTH = 1024
POSITIONS = 2048

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data"}
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")
LARGEST_SOURCE = 300_000
HELD_OUT_PER_MILLE = 25

# The split pattern of the published Qwen tokenizers.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("def fibonacci(n):\n", {"do_sample": False}),
    ("class Stack:\n", {"do_sample": True, "temperature": 0.8}),
]


@dataclass(frozen=True)
class Sources:
    """The texts to learn from and the texts held out."""

    training: list[str]
    held_out: list[str]

    @property
    def held_out_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.held_out)


@dataclass
class Best:
    """The weights with the lowest held-out loss seen so far."""

    loss: float = math.inf
    step: int = 0
    weights: dict[str, Tensor] | None = None

    def offer(self, loss: float, step: int, model: Qwen3ForCausalLM) -> None:
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def parse_options() -> argparse.Namespace:
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    parser = argparse.ArgumentParser(description="Train the bundled tiny Qwen3 checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--sources", type=Path, default=standard_library, help="folder of .py files")
    parser.add_argument("--steps", type=int, default=1800, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the cosine schedule")
    parser.add_argument("--weight-decay", type=float, default=2.0, help="AdamW decay of the matrices")
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between held-out measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


# Sources


def is_source(path: Path, root: Path) -> bool:
    relative = path.relative_to(root)
    if SKIPPED_FOLDERS.intersection(relative.parts) or path.name.startswith(SKIPPED_PREFIXES):
        return False
    return 0 < path.stat().st_size <= LARGEST_SOURCE


def is_generated_table(text: str) -> bool:
    """Whether the text is a character table that a program wrote, as most of encodings/ is."""
    return "gencodec.py" in text[:400] or "decoding_table = (" in text or "decoding_map = " in text


def is_held_out(relative_path: str) -> bool:
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def read_sources(root: Path) -> Sources:
    sources = Sources([], [])
    for path in sorted(root.rglob("*.py")):
        if not is_source(path, root):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not is_generated_table(text):
            held_out = is_held_out(path.relative_to(root).as_posix())
            (sources.held_out if held_out else sources.training).append(text)
    return sources


# Tokenizer


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCABULARY_SIZE tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def encode_stream(tokenizer: Tokenizer, texts: list[str], device: str) -> Tensor:
    """All texts as one row of token ids, each closed by the end-of-text token."""
    end, tokens = tokenizer.token_to_id(END_OF_TEXT), []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        tokens += [*encoding.ids, end]
    return torch.tensor(tokens, device=device)


# Model


def model_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of config.json, with the plain keys that every version of transformers reads."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 8,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def make_model(tokenizer: Tokenizer, device: str) -> Qwen3ForCausalLM:
    settings = model_settings(tokenizer) | {"torch_dtype": "float32"}
    model: Any = Qwen3ForCausalLM(Qwen3Config.from_dict(settings))
    return model.to(device=device, dtype=torch.float32)


def parameter_count(model: Qwen3ForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Training


def token_loss(model: Qwen3ForCausalLM, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of each window's tokens after its first."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


def cut_windows(stream: Tensor, starts: Tensor) -> Tensor:
    """One row for each start: SEQUENCE_LENGTH inputs and the token that follows them."""
    return stream[starts[:, None].to(stream.device) + torch.arange(SEQUENCE_LENGTH + 1, device=stream.device)]


def training_batches(stream: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Batches without end; every epoch cuts the stream at another offset and shuffles the windows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(SEQUENCE_LENGTH, (1,), generator=generator))
        starts = torch.arange(offset, len(stream) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
        shuffled = starts[torch.randperm(len(starts), generator=generator)]
        for chosen in shuffled[: len(shuffled) // batch * batch].split(batch):
            yield cut_windows(stream, chosen)


def held_out_batches(stream: Tensor, batch: int) -> Iterator[Tensor]:
    """The whole stream once; every token but the first is predicted exactly once."""
    starts = torch.arange(0, len(stream) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
    for chosen in starts.split(batch):
        yield cut_windows(stream, chosen)
    rest = stream[len(starts) * SEQUENCE_LENGTH :]
    if len(rest) > 1:
        yield rest[None]


def held_out_loss(model: Qwen3ForCausalLM, stream: Tensor, batch: int) -> float:
    """Mean nats per token over the held-out stream."""
    with torch.no_grad():
        total = sum(token_loss(model, windows, "sum").item() for windows in held_out_batches(stream, batch))
    return total / (len(stream) - 1)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warmup over the first twentieth, then a cosine down to a hundredth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: Qwen3ForCausalLM, weight_decay: float, device: str) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [tensor for tensor in parameters if tensor.dim() > 1], "weight_decay": weight_decay},
        {"params": [tensor for tensor in parameters if tensor.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.startswith("cuda"))


def optimize_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, windows: Tensor, learning_rate: float
) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss = token_loss(model, windows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(model: Qwen3ForCausalLM, training: Tensor, held_out: Tensor, options: argparse.Namespace) -> Best:
    optimizer = make_optimizer(model, options.weight_decay, options.device)
    batches = training_batches(training, options.batch, options.seed)
    best, recent, started = Best(), [], time.perf_counter()
    for step in range(1, options.steps + 1):
        learning_rate = options.learning_rate * learning_rate_factor(step - 1, options.steps)
        recent.append(optimize_step(model, optimizer, next(batches), learning_rate))
        if step % options.evaluate_every == 0 or step == options.steps:
            loss = held_out_loss(model, held_out, options.batch)
            best.offer(loss, step, model)
            report_progress(step, torch.stack(recent).mean().item(), loss, time.perf_counter() - started)
            recent.clear()
    return best


def report_progress(step: int, training_loss: float, loss: float, seconds: float) -> None:
    print(f"step {step:5d}  training {training_loss:.4f}  held out {loss:.4f}  {seconds:.1f} s", flush=True)


# Checkpoint


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    stops = [end, tokenizer.token_to_id(MESSAGE_END)]
    return {"bos_token_id": end, "eos_token_id": stops, "pad_token_id": end}


def tokenizer_settings() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": POSITIONS,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Save as bfloat16, without the output matrix that is tied to the embedding."""
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    save_file(tensors, path, metadata={"format": "pt"})


def write_checkpoint(out: Path, tokenizer: Tokenizer, weights: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", model_settings(tokenizer))
    write_json(out / "generation_config.json", generation_settings(tokenizer))
    write_json(out / "tokenizer_config.json", tokenizer_settings())
    tokenizer.save(str(out / "tokenizer.json"))
    write_weights(out / "model.safetensors", weights)


# Report


def report_loss(model: Qwen3ForCausalLM, held_out: Tensor, byte_count: int, batch: int) -> None:
    loss = held_out_loss(model, held_out, batch)
    bits_per_byte = loss * (len(held_out) - 1) / math.log(2) / byte_count
    print(f"saved weights, held out: {loss:.4f} nats/token, {bits_per_byte:.4f} bits/byte")


def report_samples(folder: Path, model: Any, seed: int) -> None:
    """Print one greedy sample and one drawn at temperature 0.8."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    for prompt, settings in SAMPLES:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        tokens = model.generate(input_ids=inputs.input_ids, max_new_tokens=96, **settings)
        print(f"--- {settings}\n{tokenizer.decode(tokens[0])}")


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    sources = read_sources(options.sources)
    print(f"{len(sources.training)} files to learn from, {len(sources.held_out)} held out")
    tokenizer = train_tokenizer(sources.training)
    training = encode_stream(tokenizer, sources.training, options.device)
    held_out = encode_stream(tokenizer, sources.held_out, options.device)
    model = make_model(tokenizer, options.device)
    print(f"{len(training)} tokens to learn from, {len(held_out)} held out, {parameter_count(model)} parameters")
    best = train(model, training, held_out, options)
    assert best.weights is not None, "no step was run"
    print(f"kept step {best.step}, {options.steps * options.batch * SEQUENCE_LENGTH} tokens seen by the last")
    write_checkpoint(options.out, tokenizer, best.weights)
    saved = Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(options.device)
    report_loss(saved, held_out, sources.held_out_bytes, options.batch)
    report_samples(options.out, saved, options.seed)


if __name__ == "__main__":
    main()

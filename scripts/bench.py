"""Speed and memory against peers, side by side in one run.

    python scripts/bench.py train --source train.en --target train.de --shape tiny
    python scripts/bench.py decode --model runs/en-de --source test.en --target test.de
    python scripts/bench.py memory --shape base
    python scripts/bench.py growth --model runs/en-de --source test.en
    python scripts/bench.py import

Machines are shared and noisy, so every figure is a ratio against a peer that took turns with us in the same run:
same text, same batches, same shape, same precision, medians of several rounds. Peers of training: Marian of
transformers with the stock `Seq2SeqTrainer` and `torch.nn.Transformer` under the stock `Trainer`. Peers of decoding:
`generate()` of Marian, and CTranslate2, both with our model's weights, with the same beams, stopping rule and length
penalty, from reading the file to writing it. What the machine can do at most is measured in the same run, as a matrix
product. Without --source and --target the text to train on is generated.
"""

import argparse
import gc
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.convert.marian import to_marian
from vanilla_transformer.corpora import generate_numbers_corpus
from vanilla_transformer.data import TokenBatchSampler, TranslationCollator, read_lines
from vanilla_transformer.evaluation import corpus_scores
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import (
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
    bfloat16_gain,
)
from vanilla_transformer.translation import load_translator, open_output, translate_lines
from vanilla_transformer_cli import while_read


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LABEL_SMOOTHING = 0.1
TRAINERS = ["ours", "marian sdpa", "marian eager", "nn.Transformer"]
IMPORTS = {
    "transformers": "import torch; from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, pipeline",
    "ours": "import vanilla_transformer",
}


# ---------------------------------------------------------------------------------------------------------------------
# The same work for all
# ---------------------------------------------------------------------------------------------------------------------


def shape_of(name: str, vocab_size: int) -> VanillaTransformerConfig:
    """The configuration of a preset with the vocabulary of the benchmark."""
    return VanillaTransformerConfig.from_preset(name, vocab_size=vocab_size)


def batches_of(arguments: argparse.Namespace, count: int) -> tuple[list[dict[str, torch.Tensor]], int]:
    """`count` batches of at most --tokens_per_batch tokens a side, lengths sorted, spread over all lengths.

    Returns:
        The batches, with labels padded by -100 and decoder inputs, and the size of the vocabulary.
    """
    if arguments.source:
        sources, targets = list(read_lines(arguments.source)), list(read_lines(arguments.target))
    else:
        part = generate_numbers_corpus(train_size=20_000, validation_size=0, test_size=0).train
        sources, targets = list(part.sources), list(part.targets)
    tokenizer = train_tokenizer([*sources, *targets], arguments.vocab_size)
    vocab_size = arguments.vocab_size if arguments.pad_vocabulary else len(tokenizer)
    rows = [
        {"input_ids": source, "labels": target}
        for source, target in zip(
            tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"], strict=True
        )
    ]
    lengths = [(len(row["input_ids"]), len(row["labels"])) for row in rows]
    sampler = TokenBatchSampler(*zip(*lengths, strict=True), arguments.tokens_per_batch, seed=0)
    collate = TranslationCollator(tokenizer.pad_token_id)
    batches = []
    for indices in sampler:
        batch = dict(collate([rows[index] for index in indices]))
        start = torch.full((len(indices), 1), tokenizer.bos_token_id)
        shifted = torch.cat([start, batch["labels"][:, :-1]], dim=1)
        batch["decoder_input_ids"] = shifted.masked_fill(shifted == -100, tokenizer.pad_token_id)
        batches.append({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
        if len(batches) == count:
            break
    return batches, vocab_size


def target_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Labels of a batch, padding left out."""
    return int(batch["labels"].ne(-100).sum())


def operations(config: VanillaTransformerConfig, batch: dict[str, torch.Tensor]) -> int:
    """Floating-point operations of the matrix products of one update: forward, and twice as much backward.

    Padding counts where it is computed; logits count for labelled positions only.
    """
    rows, source = batch["input_ids"].shape
    target = batch["labels"].shape[1]
    d, ff = config.d_model, config.d_ff
    key, value = (config.num_heads * width for width in config.head_dimensions)
    projections = 2 * d * (2 * key + 2 * value)
    encoder = rows * source * (projections + 4 * d * ff + 2 * source * (key + value))
    decoder = rows * target * (projections + 4 * d * ff + 2 * target * (key + value))
    cross = rows * (target * 2 * d * (key + value) + source * 2 * d * (key + value))
    cross += rows * target * 2 * source * (key + value)
    logits = 2 * d * config.vocab_size * target_tokens(batch)
    return 3 * (config.encoder_layers * encoder + config.decoder_layers * (decoder + cross) + logits)


def matrix_peak(dtype: torch.dtype, size: int = 2048, seconds: float = 1.0) -> float:
    """Operations a second of a product of two square matrices: what this machine can do at most now."""
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    a @ b
    synchronise()
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(3):
            a @ b
        synchronise()
        best = max(best, 3 * 2 * size**3 / (time.perf_counter() - start))
    return best


def synchronise() -> None:
    """Waits for the accelerator."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# The engines
# ---------------------------------------------------------------------------------------------------------------------


class PlainTransformer(nn.Module):
    """`torch.nn.Transformer` with embeddings, sinusoids, one shared matrix and the label-smoothed loss around it."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.transformer = nn.Transformer(
            config.d_model,
            config.num_heads,
            config.encoder_layers,
            config.decoder_layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
        )
        self.register_buffer("positions", sinusoidal_encoding(torch.arange(2048), config.d_model), persistent=False)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Scaled embeddings with positions."""
        x = self.embedding(ids) * self.config.d_model**0.5 + self.positions[: ids.shape[1]]
        return F.dropout(x, self.config.dropout, self.training)

    def forward(self, input_ids, attention_mask, decoder_input_ids, labels, **kwargs):
        """The loss, as `Trainer` wants it."""
        padding = attention_mask == 0
        length = decoder_input_ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        hidden = self.transformer(
            self.embed(input_ids),
            self.embed(decoder_input_ids),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits = F.linear(hidden, self.embedding.weight)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=LABEL_SMOOTHING, ignore_index=-100
        )
        return {"loss": loss}


def marian(config: VanillaTransformerConfig, attention: str) -> MarianMTModel:
    """Marian of the same shape, with one shared matrix."""
    return MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            decoder_vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function="relu",
            dropout=config.dropout,
            attention_dropout=0.0,
            scale_embedding=True,
            max_position_embeddings=1024,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
            forced_eos_token_id=None,
            attn_implementation=attention,
        )
    )


class Clock(TrainerCallback):
    """The time at which each update ended."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        """Waits for the device and looks at the clock."""
        synchronise()
        self.ends.append(time.perf_counter())


class SameBatches:
    """Mixed into a trainer: it trains on the given batches, in order."""

    batches: list[dict[str, torch.Tensor]]

    def get_train_dataloader(self) -> DataLoader:
        """The batches as they are."""
        loader = DataLoader(self.batches, batch_size=None, collate_fn=lambda batch: dict(batch))  # type: ignore[arg-type]
        return self.accelerator.prepare(loader)  # type: ignore[attr-defined]


class OurTrainer(SameBatches, VanillaTransformerTrainer):
    """`VanillaTransformerTrainer` on given batches."""


class StockSeq2SeqTrainer(SameBatches, Seq2SeqTrainer):
    """`Seq2SeqTrainer` on given batches."""


class StockTrainer(SameBatches, Trainer):
    """`Trainer` on given batches."""


def train_engines(config: VanillaTransformerConfig, names: list[str], precision: str) -> dict[str, Callable[..., Any]]:
    """For each name a function that makes a trainer for the given batches, with a model that it keeps."""
    folder = tempfile.mkdtemp(prefix="bench-")
    common: dict[str, Any] = {
        "output_dir": folder,
        "bf16": precision == "bfloat16",
        "use_cpu": DEVICE == "cpu",
        "learning_rate": 1e-4,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }

    def ours(model: Any, **options: Any) -> Any:
        arguments = VanillaTransformerTrainingArguments(**common, **options)
        return OurTrainer(model, arguments, train_dataset=[{}])

    def stock_seq2seq(model: Any, **options: Any) -> Any:
        arguments = Seq2SeqTrainingArguments(**common, label_smoothing_factor=LABEL_SMOOTHING, **options)
        return StockSeq2SeqTrainer(model, arguments, train_dataset=[{}])

    def stock(model: Any, **options: Any) -> Any:
        return StockTrainer(model, TrainingArguments(**common, **options), train_dataset=[{}])

    makers: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
        "ours": (lambda: VanillaTransformerForConditionalGeneration(config), ours),
        "marian sdpa": (lambda: marian(config, "sdpa"), stock_seq2seq),
        "marian eager": (lambda: marian(config, "eager"), stock_seq2seq),
        "nn.Transformer": (lambda: PlainTransformer(config), stock),
        "nn.Transformer compiled": (lambda: torch.compile(PlainTransformer(config), dynamic=True), stock),  # type: ignore[dict-item]
    }
    engines = {}
    for name in names:
        make_model, make_trainer = makers[name]
        torch.manual_seed(0)
        model = make_model()
        engines[name] = lambda batches, model=model, make=make_trainer, **options: with_batches(
            make(model, max_steps=len(batches), **options), batches
        )
    return engines


def with_batches(trainer: Any, batches: list[dict[str, torch.Tensor]]) -> Any:
    """The trainer, set to these batches."""
    trainer.batches = batches
    return trainer


# ---------------------------------------------------------------------------------------------------------------------
# The benchmarks
# ---------------------------------------------------------------------------------------------------------------------


def bench_train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Target tokens a second of whole updates in each trainer, rounds in turn."""
    warmup = 2
    batches, vocab_size = batches_of(arguments, warmup + arguments.updates)
    config = shape_of(arguments.shape, vocab_size)
    engines = train_engines(config, arguments.engines or TRAINERS, precision_of(arguments))
    tokens = sum(map(target_tokens, batches[warmup:]))
    flops = sum(operations(config, batch) for batch in batches[warmup:])
    rates: dict[str, list[float]] = {name: [] for name in engines}
    peaks: dict[str, list[float]] = {name: [] for name in dict.fromkeys([arguments.precision, "float32"])}
    for round_number in range(arguments.rounds):
        for name in peaks:
            peaks[name].append(matrix_peak(getattr(torch, name)))
        for name, make in engines.items():
            clock = Clock()
            trainer = make(batches)
            trainer.add_callback(clock)
            trainer.train()
            rates[name].append(tokens / (clock.ends[-1] - clock.ends[warmup - 1]))
            tell(f"round {round_number + 1}: {name} {rates[name][-1]:,.0f} target tokens/s")
            del trainer
            gc.collect()
    peak = {name: statistics.median(values) for name, values in peaks.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    rows = []
    for name, rate in median.items():
        used = rate / tokens * flops
        rows.append(
            {
                "engine": name,
                "target tokens/s": round(rate),
                "spread": f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}",
                "ours is faster by": round(median["ours"] / rate, 2) if "ours" in median else None,
                "GFLOP/s": round(used / 1e9),
                f"of {arguments.precision} peak": f"{used / peak[arguments.precision]:.0%}",
            }
        )
    return {
        "benchmark": f"train in {arguments.precision}, {arguments.shape}, vocabulary {vocab_size}, "
        f"{arguments.tokens_per_batch} tokens a batch",
        "matrix product": {name: f"{value / 1e9:,.0f} GFLOP/s" for name, value in peak.items()},
        "rows": rows,
    }


def precision_of(arguments: argparse.Namespace) -> str:
    """What all train in: what is asked for, else the faster one here."""
    if arguments.precision == "auto":
        arguments.precision = "bfloat16" if bfloat16_gain() > 1.0 else "float32"
        tell(f"precision: {arguments.precision}")
    return arguments.precision


def bench_decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sentences a second from reading a file to writing its translation, rounds in turn; BLEU where --target is given.

    Loading the models is not counted. Seconds are wall-clock time and, beside it, processor time of all threads.
    """
    if arguments.model is None or arguments.source is None:
        sys.exit("decode needs --model and --source")
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: each
            for name, each in decode_engines(arguments, folder).items()
            if arguments.engines is None
            or name == "ours"
            or any(name.startswith(wanted) for wanted in arguments.engines)
        }
        lines = sum(1 for _ in read_lines(arguments.source))
        references = list(read_lines(arguments.target)) if arguments.target else None
        clocks: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        output = os.path.join(folder, "translated")
        texts: dict[str, list[str]] = {}
        for round_number in range(arguments.rounds + 1):  # the first warms up
            for name, translate in engines.items():
                start = time.perf_counter(), time.process_time()
                translate(arguments.source, output)
                taken = time.perf_counter() - start[0], time.process_time() - start[1]
                texts[name] = list(read_lines(output))
                if round_number:
                    clocks[name].append(taken)
                    tell(f"round {round_number}: {name} {lines / taken[0]:,.1f} lines/s")
    median = {name: statistics.median(wall for wall, _ in values) for name, values in clocks.items()}
    rows = []
    for name, seconds in median.items():
        equal = sum(one == other for one, other in zip(texts[name], texts["ours"], strict=True))
        rows.append(
            {
                "engine": name,
                "lines/s": round(lines / seconds, 1),
                "processor s": round(statistics.median(cpu for _, cpu in clocks[name]), 1),
                "ours is faster by": round(seconds / median["ours"], 2),
                "lines as ours": f"{equal} of {lines}",
                "BLEU": round(corpus_scores(texts[name], [references])["bleu"]["score"], 2) if references else None,
            }
        )
    return {
        "benchmark": f"decode, beam {arguments.num_beams}, length penalty n ** {arguments.length_penalty:g}, "
        f"{lines} lines",
        "rows": rows,
    }


def decode_engines(arguments: argparse.Namespace, folder: str) -> dict[str, Callable[[str, str], None]]:
    """Functions that translate a file into a file, all with the weights of --model."""
    model, tokenizer = load_translator(arguments.model, dtype="float32")
    rules: dict[str, Any] = {
        "num_beams": arguments.num_beams,
        "length_penalty": arguments.length_penalty,
        "length_penalty_type": "hub",
        "early_stopping": False,
        "max_new_tokens": 100,
    }

    def ours(own_model: Any) -> Callable[[str, str], None]:
        def translate(source: str, output: str) -> None:
            with open_output(output) as file:
                for hypotheses in translate_lines(
                    own_model, tokenizer, read_lines(source), tokens_per_batch=arguments.tokens_per_batch, **rules
                ):
                    file.write(f"{hypotheses[0].text}\n")

        return translate

    def stock(any_model: Any, rows: int, by_length: bool, settings: dict[str, Any]) -> Callable[[str, str], None]:
        def translate(source: str, output: str) -> None:
            lines = list(read_lines(source))
            order = sorted(range(len(lines)), key=lambda index: -len(lines[index])) if by_length else range(len(lines))
            texts = [""] * len(lines)
            for start in range(0, len(lines), rows):
                chosen = order[start : start + rows]
                encoded = tokenizer([lines[index] for index in chosen], return_tensors="pt", padding=True)
                ids = any_model.generate(**encoded.to(any_model.device), **settings)
                for index, text in zip(chosen, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
                    texts[index] = text
            with open_output(output) as file:
                file.writelines(f"{text}\n" for text in texts)

        return translate

    engines = {"ours": ours(model)}
    for dtype in ("bfloat16", "int8") if DEVICE == "cpu" else ("bfloat16",):
        engines[f"ours, {dtype}"] = ours(load_translator(arguments.model, dtype=dtype)[0])
    known = {name: value for name, value in rules.items() if name != "length_penalty_type"}
    marian = to_marian(model).eval().to(DEVICE)  # type: ignore[arg-type]
    engines["marian generate(), 8 rows"] = stock(marian, 8, False, known)
    engines["marian generate(), 64 rows, sorted"] = stock(marian, 64, True, known)
    try:
        import ctranslate2

        from vanilla_transformer.convert.ctranslate2 import to_ctranslate2
    except ImportError as error:
        tell(f"without ctranslate2: {error}")
        return engines

    def by_ctranslate2(compute_type: str) -> Callable[[str, str], None]:
        translator = ctranslate2.Translator(
            os.path.join(folder, "ctranslate2"),
            device=DEVICE,
            compute_type=compute_type,
            intra_threads=torch.get_num_threads(),
        )

        def translate(source: str, output: str) -> None:
            rows = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(list(read_lines(source)))["input_ids"]]
            results = translator.translate_batch(
                rows,
                beam_size=arguments.num_beams,
                length_penalty=arguments.length_penalty,
                max_decoding_length=100,
                max_batch_size=arguments.tokens_per_batch // arguments.num_beams,
                batch_type="tokens",
            )
            ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
            with open_output(output) as file:
                file.writelines(f"{text}\n" for text in tokenizer.batch_decode(ids, skip_special_tokens=True))

        return translate

    to_ctranslate2(model, tokenizer, os.path.join(folder, "ctranslate2"))
    for compute_type in ("float32", "int8"):
        engines[f"ctranslate2 {compute_type}"] = by_ctranslate2(compute_type)
    return engines


def bench_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of training steps above what is held before them, each engine in a process of its own."""
    rows = []
    precision_of(arguments)
    for name in arguments.engines or TRAINERS:
        for checkpointing in (False, True) if name in ("ours", "marian sdpa") else (False,):
            command = [sys.executable, __file__, "memory-of", name, *as_flags(arguments)]
            command += ["--gradient_checkpointing"] if checkpointing else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            label = f"{name}, checkpointing" if checkpointing else name
            rows.append({"engine": label, "MiB": round(json.loads(done.stdout.splitlines()[-1])["bytes"] / 2**20)})
            tell(f"{label}: {rows[-1]['MiB']:,} MiB")
    reference = next((row["MiB"] for row in rows if row["engine"] == "marian sdpa"), None)
    for row in rows:
        row["of marian sdpa"] = round(row["MiB"] / reference, 2) if reference else None
    return {
        "benchmark": f"memory of a training step, {arguments.shape}, vocabulary {arguments.vocab_size}, "
        f"{arguments.tokens_per_batch} target tokens",
        "rows": rows,
    }


def memory_of(arguments: argparse.Namespace) -> None:
    """Prints the peak of two updates of one engine above the memory before them, in bytes."""
    config = shape_of(arguments.shape, arguments.vocab_size)
    engine = train_engines(config, [arguments.engine], arguments.precision)[arguments.engine]
    length, generator = 32, torch.Generator().manual_seed(0)
    rows = arguments.tokens_per_batch // length
    ids = torch.randint(3, arguments.vocab_size, (rows, length), generator=generator)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.flip(1),
        "decoder_input_ids": ids.flip(1),
    }
    trainer = engine([batch, batch], gradient_checkpointing=arguments.gradient_checkpointing)
    before = current_memory()
    trainer.train()
    print(json.dumps({"bytes": peak_memory() - before}))


def current_memory() -> int:
    """Bytes held now: of the GPU, or resident."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Most bytes held so far."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bench_growth(arguments: argparse.Namespace) -> dict[str, Any]:
    """How the cost grows: with the source's length, with the translation's, and with the number of lines."""
    if arguments.model is None or arguments.source is None:
        sys.exit("growth needs --model and --source")
    model, tokenizer = load_translator(arguments.model, dtype="float32")
    text = list(read_lines(arguments.source))
    return {
        "benchmark": "growth",
        "rows": [
            *growth_of_encoder(model),
            *growth_of_decoder(model),
            *growth_of_files(model, tokenizer, text, arguments),
        ],
    }


def growth_of_encoder(model: Any) -> list[dict[str, Any]]:
    """Seconds of the encoder for sources of 32 to 1,024 tokens; the exponent of the length that fits them best."""
    rows, seconds = [], {}
    for length in (32, 64, 128, 256, 512, 1024):
        ids = torch.randint(3, model.config.vocab_size, (4096 // length, length), device=model.device)
        with torch.no_grad():
            seconds[length] = best_of(lambda: model.get_encoder()(ids), 5) / len(ids)  # noqa: B023
        rows.append(growth_row("encoder, tokens of a source", length, seconds[length], "ms a row"))
    points = [(math.log(length), math.log(value)) for length, value in seconds.items()]
    exponent = statistics.linear_regression(*zip(*points, strict=True)).slope
    return [*rows, {**growth_row("encoder, fitted exponent of the length", "", 0.0, ""), "cost": round(exponent, 2)}]


def growth_of_decoder(model: Any) -> list[dict[str, Any]]:
    """Seconds a token of greedy decoding, 16 rows, from the 32nd to the 512th token.

    The word that ends a sentence is kept from being the most probable one by its bias, that all rows be long.
    """
    head = torch.nn.Linear(model.config.d_model, model.config.vocab_size).to(model.device, model.dtype)
    head.weight, old = model.lm_head.weight, model.lm_head
    with torch.no_grad():
        head.bias.zero_()
        head.bias[model.config.eos_token_id] = -1e4
    model.lm_head = head
    ids = torch.randint(3, model.config.vocab_size, (16, 16), device=model.device)
    totals = {0: 0.0}
    try:
        for length in (32, 64, 128, 256, 512):
            totals[length] = best_of(lambda: model.generate(ids, num_beams=1, max_new_tokens=length), 3)  # noqa: B023
    finally:
        model.lm_head = old
    rows, before = [], 0
    for length in list(totals)[1:]:
        each = (totals[length] - totals[before]) / (length - before)
        rows.append(growth_row(f"decoder, tokens {before + 1} to {length}", length, each, "ms a token of 16 rows"))
        before = length
    return rows


def growth_of_files(
    model: Any, tokenizer: Any, text: list[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Milliseconds a line and resident memory at the end for files of so many lines."""
    rows = []
    for count in arguments.lines:
        lines = (text[number % len(text)] for number in range(count))
        start = time.perf_counter()
        for _ in translate_lines(model, tokenizer, lines, tokens_per_batch=arguments.tokens_per_batch, window=1000):
            pass
        row = growth_row("lines translated", count, (time.perf_counter() - start) / count, "ms a line")
        rows.append({**row, "resident MiB": round(current_memory() / 2**20)})
        tell(str(rows[-1]))
    return rows


def growth_row(what: str, size: Any, seconds: float, unit: str) -> dict[str, Any]:
    """One line of the table of growth."""
    return {"what": what, "size": size, "cost": round(1000 * seconds, 3), "unit": unit, "resident MiB": None}


def best_of(work: Callable[[], Any], times: int) -> float:
    """Seconds of the fastest of several runs, after one that does not count."""
    work()
    seconds = []
    for _ in range(times):
        synchronise()
        start = time.perf_counter()
        work()
        synchronise()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def bench_import(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an import in a new interpreter, rounds in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(arguments.rounds + 1):  # the first fills the disk's cache
        for name, code in IMPORTS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    rows = [
        {
            "import": name,
            "seconds": round(value, 2),
            "more than transformers": round(value - median["transformers"], 2),
        }
        for name, value in median.items()
    ]
    return {"benchmark": "import", "rows": rows}


# ---------------------------------------------------------------------------------------------------------------------
# Telling
# ---------------------------------------------------------------------------------------------------------------------


def tell(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def as_flags(arguments: argparse.Namespace) -> Iterator[str]:
    """The settings that a process of its own needs."""
    for name in ("shape", "vocab_size", "tokens_per_batch", "precision"):
        yield f"--{name}"
        yield str(getattr(arguments, name))


def table(result: dict[str, Any]) -> str:
    """The result as a table in Markdown."""
    rows = result["rows"]
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [f"| {' | '.join(cell(row[name]) for name in names)} |" for row in rows]
    notes = [f"{key}: {value}" for key, value in result.items() if key not in ("rows", "benchmark")]
    return "\n".join([result["benchmark"], "", *lines, "", *notes])


def cell(value: Any) -> str:
    """A number with its thousands set apart, or text."""
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{torch.get_num_threads()} threads"
    return {"device": device, "torch": torch.__version__}


def main(argv: list[str] | None = None) -> int:
    """Runs a benchmark; see `python scripts/bench.py --help`."""
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["train", "decode", "memory", "growth", "import"]
    parser.add_argument("benchmark", choices=[*names, "memory-of"], metavar="|".join(names))
    parser.add_argument("engine", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--source", help="source text, .gz by name")
    parser.add_argument("--target", help="target text, as many lines")
    parser.add_argument("--shape", default="tiny", help="preset: tiny, base, big ...")
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument("--pad_vocabulary", action="store_true", help="--vocab_size words even if the text has less")
    parser.add_argument("--tokens_per_batch", type=int, help="default: 8192 for decode and growth, else 4096")
    parser.add_argument(
        "--precision",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="of training; auto: the faster one",
    )
    parser.add_argument("--updates", type=int, default=12, help="timed updates of each engine in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", help="only these, by the beginning of their names")
    parser.add_argument("--gradient_checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="of decode and growth: a trained model of this package")
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--length_penalty", type=float, default=1.0, help="p in n ** p, which every engine knows")
    parser.add_argument("--lines", type=int, nargs="+", default=[10, 100, 1000, 10000], help="of growth")
    parser.add_argument("--threads", type=int, help="of every engine; all cores by default")
    parser.add_argument("--json", help="also write the result to this file")
    arguments = parser.parse_args(argv)
    if arguments.benchmark in ("train", "memory") and bool(arguments.source) != bool(arguments.target):
        parser.error("--source and --target belong together")
    if arguments.tokens_per_batch is None:
        arguments.tokens_per_batch = 8192 if arguments.benchmark in ("decode", "growth") else 4096
    logging.set_verbosity_error()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.benchmark == "memory-of":
        memory_of(arguments)
        return 0
    run = {
        "train": bench_train,
        "decode": bench_decode,
        "memory": bench_memory,
        "growth": bench_growth,
        "import": bench_import,
    }[arguments.benchmark]
    result = {**run(arguments), "machine": machine()}
    print(table(result))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(while_read(main))

"""`vanilla-transformer demo`: everything once, in minutes and without any download.

A corpus is generated, a tokenizer and a tiny model are trained on it, held-out lines are translated and scored, and a
folder is written that `pipeline("translation", model=folder)` opens.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.corpora import CorpusPart, NumbersCorpus, generate_numbers_corpus
from vanilla_transformer.data import tokenize_pairs
from vanilla_transformer.evaluation import corpus_scores
from vanilla_transformer.hub import TrainingRun, decoding_text, write_model_card
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import (
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
    bfloat16_gain,
)
from vanilla_transformer.translation import translate_lines
from vanilla_transformer.visualization import attention_figure, cross_attention_of, plot_attention
from vanilla_transformer_cli import demo_parser


# So few words leave the parts of a long German number word whole and alike wherever they stand.
VOCAB_SIZE = 800
# Two layers a side learn this corpus in fewer updates than the four of "tiny". Dropout would guard against learning by
# heart, to which lines made by rules do not tempt.
SHAPE = {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
# Small batches: the number of updates counts. The learning rate falls to zero in a straight line, which ends so short
# a training better than equation (3).
TOKENS_PER_BATCH = 1024
LEARNING_RATE = 0.0015
WARMUP_STEPS = 200

SHOWN_KINDS = ("number", "ordinal", "date", "price", "sentence")


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer demo --help`.

    Raises:
        ImportError: num2words, babel or matplotlib is not installed.
        ValueError: A size out of range.
    """
    arguments = demo_parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    attention_figure([[1.0]], [""], [""])  # without matplotlib it fails now, not after the training

    print(f"Generating {arguments.train_size:,} lines to learn from and {arguments.test_size:,} held-out ones")
    corpus = generate_numbers_corpus(
        train_size=arguments.train_size, validation_size=0, test_size=arguments.test_size, seed=arguments.seed
    )
    with folder_in_the_making(Path(arguments.output_dir)) as folder, same_thread_count_afterwards():
        model, tokenizer, run = train(corpus.train, folder, max_steps=arguments.max_steps, seed=arguments.seed)
        print(f"Translating the {arguments.test_size:,} held-out lines")
        best = translate_lines(model, tokenizer, corpus.test.sources, progress=True)
        translations = [hypotheses[0].text for hypotheses in best]
        results = score(corpus.test, translations)
        results["training"] = {"updates": run.updates, "seconds": run.seconds, "seed": arguments.seed}
        run.add_evaluation(
            {
                "name": "generated numbers, dates, prices and times",
                "split": "held out",
                "segments": len(corpus.test),
                "decoding": decoding_text(model.generation_config),
                **{metric: results[metric] for metric in ("bleu", "chrf")},
            }
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_model_card(folder, run, model_id=Path(arguments.output_dir).resolve().name, license="apache-2.0")
        (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        draw(model, tokenizer, corpus, folder / "attention.png")
    print(readable(results))
    print(five_translations(corpus.test, translations))
    print(
        f"\nSaved in {arguments.output_dir}: the model, results.json, and attention.png\n(which source tokens each "
        "target token looked at). In Python:\n\n"
        "    import vanilla_transformer\n"
        "    from transformers import pipeline\n\n"
        f'    translate = pipeline("translation", model={arguments.output_dir!r})\n'
        '    translate("The train leaves at 7:45 PM.")'
    )
    return 0


def train(lines: CorpusPart, folder: Path, *, max_steps: int, seed: int) -> tuple[Any, Any, TrainingRun]:
    """Trains the tokenizer and the model on the lines.

    Args:
        lines: What to learn from.
        folder: For the trainer, which leaves nothing in it.
        max_steps: Number of updates.
        seed: Of the weights, of dropout and of the order of the lines.

    Returns:
        The model, in evaluation mode, the tokenizer, and the record of the run.
    """
    # Without their digits: merged by frequency, they would be cut into other pieces from one number to the next, and a
    # digit by itself is easier to copy.
    texts = (piece for line in (*lines.sources, *lines.targets) for piece in re.split(r"\d+", line))
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    pairs = datasets.Dataset.from_dict({"source": lines.sources, "target": lines.targets})
    dataset, _ = tokenize_pairs(pairs, tokenizer, description="training")
    set_seed(seed)
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), **SHAPE)
    model = VanillaTransformerForConditionalGeneration(config)
    print(f"Training a model of {model.num_parameters():,} parameters with a vocabulary of {len(tokenizer)}")
    training_arguments = VanillaTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=min(WARMUP_STEPS, max_steps),
        tokens_per_batch=TOKENS_PER_BATCH,
        bf16=bfloat16_gain() > 1,
        seed=seed,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = VanillaTransformerTrainer(
        model, training_arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=[ProgressBar()]
    )
    trainer.remove_callback(PrinterCallback)
    if not torch.cuda.is_available():
        torch.set_num_threads(fastest_thread_count(model, trainer.data_collator([dataset[row] for row in range(64)])))
    trainer.train()
    run = trainer.run
    run.source_lang, run.target_lang = "en", "de"
    run.files = ["lines generated by rules (English numbers, dates, prices and times of day into German)"]
    run.preset = "tiny"
    run.config_overrides = [f"{name}={value}" for name, value in SHAPE.items()]
    run.recipe = "vanilla-transformer demo"
    return model.eval(), tokenizer, run


class ProgressBar(TrainerCallback):
    """One bar for all updates, with the loss and the speed of late beside it."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the bar."""
        self.bar = tqdm(total=state.max_steps, desc="training", unit=" updates", mininterval=0.5)

    def on_step_end(self, args, state, control, **kwargs):
        """Counts an update."""
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Shows the training loss (nats a token, smoothed) and target tokens a second."""
        if logs and "loss" in logs:
            speed = logs.get("target_tokens_per_second", 0)
            self.bar.set_postfix_str(f"loss {float(logs['loss']):.3f}, {float(speed):,.0f} tokens/s", refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        """Ends the bar."""
        self.bar.close()


def fastest_thread_count(model: Any, batch: dict[str, torch.Tensor], repetitions: int = 8) -> int:
    """How many threads compute the gradient of one batch fastest: all of torch's, or one.

    Operations as small as these gain little from a second core, and where other programs use it, each of them waits
    for the thread there: on two busy cores, two threads have been seen to take twenty times as long as one.

    Args:
        model: Trains on the batch, and is left without gradients and otherwise as it was.
        batch: Tensors of a training batch.
        repetitions: Gradients that are timed with each number of threads.

    Returns:
        The number of threads; torch's own setting stays as it was.
    """
    threads_before, was_training = torch.get_num_threads(), model.training
    seconds = {}
    model.train()
    for threads in sorted({1, threads_before}):
        torch.set_num_threads(threads)
        for repetition in range(repetitions + 1):
            if repetition == 1:  # the first one starts threads and fills caches
                start = time.perf_counter()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16_gain() > 1):
                loss = model(**batch).loss
            loss.backward()
        seconds[threads] = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    torch.set_num_threads(threads_before)
    return min(seconds, key=lambda threads: seconds[threads])


def score(lines: CorpusPart, translations: list[str]) -> dict[str, Any]:
    """Exact match, over all lines and of each kind, and BLEU."""
    right = [translation == target for translation, target in zip(translations, lines.targets, strict=True)]
    of_kind, right_of_kind = (
        Counter(lines.kinds),
        Counter(kind for kind, ok in zip(lines.kinds, right, strict=True) if ok),
    )
    scores = corpus_scores(translations, [lines.targets])
    return {
        "lines": len(lines),
        "exact_match": 100 * sum(right) / len(lines),
        "exact_match_by_kind": {kind: 100 * right_of_kind[kind] / count for kind, count in sorted(of_kind.items())},
        **{metric: {name: scores[metric][name] for name in ("score", "signature")} for metric in ("bleu", "chrf")},
    }


def readable(results: dict[str, Any]) -> str:
    """The results as a few lines of text."""
    kinds = ", ".join(f"{kind} {percent:.1f}" for kind, percent in results["exact_match_by_kind"].items())
    return (
        f"\n{results['lines']:,} held-out lines, after {results['training']['seconds']:.0f} s of training:\n"
        f"exact match {results['exact_match']:.1f} %  ({kinds})\n"
        f"BLEU        {results['bleu']['score']:.2f}  ({results['bleu']['signature']})"
    )


def five_translations(lines: CorpusPart, translations: list[str]) -> str:
    """One held-out line of each of five kinds with its translation."""
    chosen = [lines.kinds.index(kind) for kind in SHOWN_KINDS if kind in lines.kinds]
    chosen += [index for index in range(len(lines)) if index not in chosen][: len(SHOWN_KINDS) - len(chosen)]
    texts = ["\nFive of them:"]
    for index in chosen:
        verdict = "" if translations[index] == lines.targets[index] else f"   (expected {lines.targets[index]})"
        texts.append(f"  {lines.sources[index]}\n    -> {translations[index]}{verdict}")
    return "\n".join(texts)


def draw(model: Any, tokenizer: Any, corpus: NumbersCorpus, path: Path) -> None:
    """Draws the cross-attention of a held-out sentence, if there is one whose words German puts in another order."""
    sources = corpus.test.sources
    reordered = [source for source in sources if source.startswith("The museum")]
    sentences = [source for source, kind in zip(sources, corpus.test.kinds, strict=True) if kind == "sentence"]
    sentence = min(reordered or sentences or sources, key=len)
    plot_attention(*cross_attention_of(model, tokenizer, sentence), path, title=sentence)


@contextlib.contextmanager
def same_thread_count_afterwards() -> Iterator[None]:
    """Puts torch's number of threads back."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def folder_in_the_making(folder: Path) -> Iterator[Path]:
    """A folder beside the one wanted, whose files are moved there at the end, and which vanishes if anything fails.

    Files of other names that are in `folder` already stay; those of the same name are replaced, each at once.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    shutil.rmtree(making, ignore_errors=True)  # of a process of the same number that was killed
    making.mkdir()
    try:
        yield making
        folder.mkdir(exist_ok=True)
        for file in making.iterdir():
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(making, ignore_errors=True)

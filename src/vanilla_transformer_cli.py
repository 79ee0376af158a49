"""The console command `vanilla-transformer VERB ...`.

Help, the version and wrong arguments are answered from this file alone, which imports nothing but the standard
library; the package, and with it torch, is imported when a verb runs. A user's mistake is one line on stderr and exit
code 2.
"""

import argparse
import contextlib
import errno
import importlib
import importlib.metadata
import logging
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


PROGRAM = "vanilla-transformer"

VERBS = {
    "demo": "see it work without any download: train a tiny model, score it, translate",
    "train": "train a model on parallel text, or fine-tune one",
    "translate": "translate a file or standard input, line by line",
    "evaluate": "BLEU, chrF and perplexity of a model on parallel text",
    "score": "log-probabilities of given translations",
    "average": "the last checkpoints of a run as one model",
    "attention": "look inside: every attention of a translation, as a page or a picture",
    "prune": "find out which attention heads matter, and take the others out",
    "convert": "take over a model that others trained, or write one for other tools",
    "push": "upload a model with its code, tokenizer, settings and card to the Hub",
    "serve": "a page in the browser to try models on",
}

# Formats of `convert`; vanilla_transformer.convert.FORMATS tells more of each.
READ_FORMATS = ("marian", "nn_transformer", "fairseq", "annotated", "joeynmt")
WRITTEN_FORMATS = ("marian", "ctranslate2", "onnx")

# Those of vanilla_transformer.generation_vanilla_transformer.
LENGTH_PENALTY_TYPES = ("gnmt", "hub")

TRACEBACK_VARIABLE = "VANILLA_TRANSFORMER_TRACEBACK"
LONGEST_MESSAGE = 800  # characters; some messages of transformers list every model there is

COMPUTE_TYPES = (
    *("float32", "float16", "bfloat16", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "auto"),
)

# Whose errors tell of the Hub or of the way there; the client's HTTP library has changed its name.
HUB_LIBRARIES = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")

# Kernels that torch's matrix library keeps, one a shape. Its own 1,024 take gigabytes where lengths vary.
KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

# The disk, or the user's share of it, has no room for what is being written.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

EXIT_USER_ERROR = 2
EXIT_SIGNAL = 128  # plus the signal's number
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage in front."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Exits with the message, on one line, and where to find help."""
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def port_number(text: str) -> int:
    """A port to listen at."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text!r}")
    return int(text)


def finite_number(text: str) -> float:
    """A number that is neither infinite nor undefined."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return number


def input_file(text: str) -> str:
    """The path of a file that can be read, or `-` for standard input."""
    if text != "-":
        if os.path.isdir(text):
            raise argparse.ArgumentTypeError(f"expected a file, but {text} is a folder")
        if not os.path.exists(text):
            raise argparse.ArgumentTypeError(f"no such file: {text}")
        if not os.access(text, os.R_OK):
            raise argparse.ArgumentTypeError(f"no permission to read {text}")
    return text


def output_file(text: str) -> str:
    """The path of a file that can be written, or `-` for standard output."""
    if not text:
        raise argparse.ArgumentTypeError("expected a file to write to, got an empty name")
    if text != "-":
        folder = os.path.dirname(text) or "."
        if os.path.isdir(text):
            raise argparse.ArgumentTypeError(f"expected a file to write to, but {text} is a folder")
        if not os.path.isdir(folder):
            what = "is no folder" if os.path.exists(folder) else "does not exist"
            raise argparse.ArgumentTypeError(f"cannot write {text}: {folder} {what}")
        if not os.access(folder, os.W_OK) and not os.path.exists(text):
            raise argparse.ArgumentTypeError(f"no permission to write into {folder}")
    return text


def output_folder(text: str) -> str:
    """The path of a folder that exists or can be made."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"expected a folder to write to, but {text} is a file")
    existing = os.path.abspath(text)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise argparse.ArgumentTypeError(f"cannot make the folder {text}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write into {existing}")
    return text


def new_folder(text: str) -> str:
    """The path of a folder that can be made, or is there and empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder to write to, got an empty name")
    if os.path.isdir(output_folder(text)) and os.listdir(text):
        raise argparse.ArgumentTypeError(f"expected a new or an empty folder, but {text} is not empty")
    return text


def model_folder(text: str) -> str:
    """A folder that exists."""
    if not os.path.isdir(text):
        what = "is a file" if os.path.exists(text) else "does not exist"
        raise argparse.ArgumentTypeError(f"expected the folder of a model, but {text!r} {what}")
    return text


def existing_folder(text: str) -> str:
    """The path of a folder that is there."""
    if not os.path.isdir(text):
        what = f"expected a folder, but {text} is a file" if os.path.exists(text) else f"no such folder: {text!r}"
        raise argparse.ArgumentTypeError(what)
    return text


def model_name(text: str) -> str:
    """A folder that exists, or a name that may be one on the Hub."""
    if os.path.isdir(text):
        return text
    if os.path.exists(text):
        raise argparse.ArgumentTypeError(f"expected a model folder or a name on the Hub, but {text} is a file")
    # No name on the Hub looks so, and to ask it would only give a less clear error.
    if not text or text[0] in "./~" or text[-1] in "/\\" or text.count("/") > 1 or "\\" in text or os.path.isabs(text):
        raise argparse.ArgumentTypeError(f"no such folder: {text!r}")
    return text


def _add_model_arguments(
    parser: argparse.ArgumentParser, searches: bool = True, tokens_per_batch: int = 4096, own_only: bool = False
) -> None:
    """What `translate`, `evaluate` and, but for the search, `score` have in common.

    With `own_only` no precision, and no code that lies with the model: `prune`, for models of this package.
    """
    parser.add_argument(
        "--model",
        required=True,
        type=model_name,
        metavar="M",
        default=argparse.SUPPRESS,
        help="folder, or name on the Hub",
    )
    if searches:
        parser.add_argument(
            "--num_beams",
            type=whole_number,
            metavar="N",
            default=argparse.SUPPRESS,
            help="beams of the search; 1 is greedy (default: the model's own, 4 where the paper's settings stand)",
        )
    parser.add_argument(
        "--tokens_per_batch",
        type=whole_number,
        metavar="N",
        default=tokens_per_batch,
        help=f"bound of rows x {'beams x ' if searches else ''}longest row of a batch, padding counted",
    )
    _add_opening_arguments(parser, own_only)


def _add_opening_arguments(parser: argparse.ArgumentParser, own_only: bool = False) -> None:
    """How a model is opened."""
    parser.add_argument(
        "--device",
        metavar="D",
        default=argparse.SUPPRESS,
        help="cpu, cuda, cuda:1 ... (default: cuda if there is one)",
    )
    if not own_only:
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16", "int8"),
            default="float32",
            help="precision; int8 (on a CPU) quantises the matrices as the model is opened",
        )
    parser.add_argument(
        "--revision", metavar="R", default=argparse.SUPPRESS, help="branch, tag or commit on the Hub (default: main)"
    )
    if not own_only:
        parser.add_argument(
            "--trust_remote_code",
            action="store_true",
            help="let code stored with the model run; models of this package do not need it",
        )


def demo_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer demo`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} demo",
        description="Trains a tiny model from English to German on numbers, dates, prices and times of day, generated "
        "without any download; scores it on held-out lines, translates five of them, draws the attention of one "
        'and saves a folder that pipeline("translation") opens.',
    )
    parser.add_argument("--output_dir", type=output_folder, metavar="D", default="demo", help="where to save it all")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the corpus and of the training")
    parser.add_argument("--max_steps", type=whole_number, metavar="N", default=4000, help="updates of the training")
    parser.add_argument("--train_size", type=whole_number, metavar="N", default=60_000, help="lines to learn from")
    parser.add_argument("--test_size", type=whole_number, metavar="N", default=1_000, help="held-out lines to score")
    return parser


def translate_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer translate`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} translate",
        description="Translates text line by line: line i of the output belongs to line i of the input, blank lines "
        "stay blank.",
        epilog="A line of the output is the translation alone. With --n_best above 1 it is LINE<TAB>TEXT, K of them "
        "for each line of the input, best first. With --scores it is "
        "LINE<TAB>SCORE<TAB>LOG_PROBABILITY<TAB>LENGTH<TAB>TEXT: the score that ranks them (log-probability divided "
        "by the length penalty), the natural log-probability, and the number of generated tokens. Objects of jsonl: "
        "source, and hypotheses, best first, each with text, log_probability, length, score and, on request, tokens "
        "and token_log_probabilities; a blank line has one empty hypothesis with log-probability 0.",
    )
    _add_model_arguments(parser, tokens_per_batch=8192)
    parser.add_argument(
        "--input", type=input_file, metavar="F", default="-", help="UTF-8 text, .gz by name; - is standard input"
    )
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="F",
        default="-",
        help="written whole or not at all, .gz by name; - is standard output",
    )
    parser.add_argument(
        "--n_best", type=whole_number, metavar="K", default=1, help="translations of each line, at most the beams"
    )
    parser.add_argument("--scores", action="store_true", help="write scores beside the text")
    _add_format_arguments(parser, "the translation, in columns with --n_best or --scores")
    _add_length_penalty_arguments(parser, "exponent of the length penalty; above 0, the greater the longer")
    parser.add_argument(
        "--max_new_tokens",
        type=whole_number,
        metavar="N",
        default=argparse.SUPPRESS,
        help="most tokens of a translation (default: the model's own, source + 50 in the paper)",
    )
    parser.add_argument(
        "--window",
        type=whole_number,
        metavar="N",
        default=argparse.SUPPRESS,
        help="lines read and sorted by length together; 1 answers each at once (default: 10000; 1 at a terminal)",
    )
    parser.add_argument(
        "--resumable",
        action="store_true",
        help="work in parts, kept in OUTPUT.parts until all are done: a run that was killed goes on from them, and "
        "several processes share them (accelerate launch scripts/translate.py)",
    )
    parser.add_argument(
        "--backend",
        choices=("torch", "ctranslate2", "onnx"),
        default="torch",
        help="what computes; ctranslate2 and onnx (extra [export]) take folders of their own or convert M on the way",
    )
    parser.add_argument(
        "--compute_type",
        choices=COMPUTE_TYPES,
        metavar="T",
        default=argparse.SUPPRESS,
        help=f"precision of ctranslate2, in place of --dtype: {', '.join(COMPUTE_TYPES)} (default: that of the stored "
        "weights)",
    )
    return parser


def evaluate_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer evaluate`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} evaluate",
        description="Translates a test set and scores it: BLEU and chrF as the sacrebleu command counts them, with "
        "their signatures, and the perplexity of the first reference.",
    )
    _add_model_arguments(parser)
    parser.add_argument(
        "--source",
        required=True,
        type=input_file,
        metavar="F",
        default=argparse.SUPPRESS,
        help="source text, .gz by name",
    )
    parser.add_argument(
        "--reference",
        required=True,
        type=input_file,
        nargs="+",
        metavar="F",
        default=argparse.SUPPRESS,
        help="reference translations, one file or several, each with as many lines as the source",
    )
    parser.add_argument(
        "--tokenize", metavar="T", default="13a", help="sacreBLEU's tokenizer for BLEU, such as zh for Chinese"
    )
    parser.add_argument(
        "--lowercase", action="store_true", help="let capitals count as small letters, as the signatures then say"
    )
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="OUT",
        default=argparse.SUPPRESS,
        help="also write the results as JSON; - puts them on standard output in place of the readable ones",
    )
    parser.add_argument(
        "--hypothesis_output", type=output_file, metavar="F", default=argparse.SUPPRESS, help="write the translations"
    )
    parser.add_argument(
        "--update_card", action="store_true", help="add the scores to the model card in the folder of the model"
    )
    parser.add_argument(
        "--dataset_name",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="what the card calls the test set (default: the name of the source file)",
    )
    return parser


def attention_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer attention`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} attention",
        description="Shows which tokens each head looks at, in the encoder, in the decoder and between them. An "
        "output that ends in .html is one page to explore with mouse and keyboard, which works offline; one in .png, "
        ".svg or .pdf is a picture (extra [demo]).",
        epilog="Kinds, layers and heads that are not chosen are all in a picture; a page has them all in any case "
        "and begins with what is chosen. Layers and heads count from 0; heads that were pruned are missing, and the "
        "others keep their numbers.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="T", help="a sentence to translate")
    what.add_argument(
        "--input",
        type=input_file,
        metavar="F",
        help="UTF-8 text, .gz by name, - is standard input: a page for all its lines",
    )
    what.add_argument(
        "--positions", type=whole_number, metavar="N", help="draw the model's encoding of the first N positions"
    )
    what.add_argument(
        "--curves", type=existing_folder, metavar="RUN_DIR", help="draw loss, learning rate and BLEU of a training"
    )
    parser.add_argument(
        "--model", type=model_name, metavar="M", default=argparse.SUPPRESS, help="folder, or name on the Hub"
    )
    parser.add_argument(
        "--target",
        metavar="T",
        default=argparse.SUPPRESS,
        help="the translation of --text to look at (default: the model's own)",
    )
    parser.add_argument("--kind", choices=("encoder", "decoder", "cross"), default=argparse.SUPPRESS, help="attention")
    parser.add_argument(
        "--layer", type=int, metavar="N", default=argparse.SUPPRESS, help="a layer; negative ones count from the last"
    )
    parser.add_argument("--head", type=int, metavar="N", default=argparse.SUPPRESS, help="a head")
    parser.add_argument(
        "--output",
        required=True,
        type=output_file,
        metavar="F",
        default=argparse.SUPPRESS,
        help="what to write: .html, .png, .svg or .pdf",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default=argparse.SUPPRESS,
        help="cpu, cuda, cuda:1 ... (default: cuda if there is one)",
    )
    parser.add_argument(
        "--revision", metavar="R", default=argparse.SUPPRESS, help="branch, tag or commit on the Hub (default: main)"
    )
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="let code stored with the model run; models of this package do not need it",
    )
    return parser


def prune_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer prune`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} prune",
        description="Measures how much each attention head matters for the loss on parallel text (Michel et al. 2019: "
        "the mean absolute slope of the loss in a factor on the head), takes the least important heads out, and "
        "writes the smaller model.",
        epilog="With --ranking layer_norm heads are ranked by their importance divided by the l2 norm of those in the "
        "same attention, as in that paper. Each attention keeps one head at least. The curve of BLEU against "
        "heads kept: scripts/prune_curve.py.",
    )
    _add_model_arguments(parser, searches=False, tokens_per_batch=2048, own_only=True)
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}",
            required=True,
            type=input_file,
            metavar="F",
            default=argparse.SUPPRESS,
            help=f"{side} text to measure on, .gz by name; some hundred lines will do",
        )
    how_many = parser.add_mutually_exclusive_group(required=True)
    how_many.add_argument("--heads_kept", type=whole_number, metavar="K", help="heads of the whole model that stay")
    how_many.add_argument("--keep_fraction", type=finite_number, metavar="P", help="the same, as a part of all heads")
    how_many.add_argument("--importance_only", action="store_true", help="measure, and write no model")
    parser.add_argument(
        "--ranking",
        choices=("importance", "layer_norm"),
        default="importance",
        help="rank heads by their importance, or by that over the norm of their layer's",
    )
    parser.add_argument(
        "--output_dir",
        type=new_folder,
        metavar="D",
        default=argparse.SUPPRESS,
        help="a new or an empty folder for the smaller model, which is written whole or not at all",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="OUT", default=argparse.SUPPRESS, help="also write the importances as JSON"
    )
    parser.add_argument(
        "--picture",
        type=output_file,
        metavar="OUT",
        default=argparse.SUPPRESS,
        help="also draw them, as .png, .svg or .pdf (extra [demo])",
    )
    return parser


def convert_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer convert`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} convert",
        description="Takes over a model that others trained (--from), or writes a model of this package for other "
        "tools (--to). What cannot be represented exactly is refused with the reason.",
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from",
        dest="read",
        choices=READ_FORMATS,
        default=None,
        help="the format in which --model is; nn_transformer and annotated want beside the weights the file "
        "nn_transformer.json or annotated.json, whose fields `pydoc vanilla_transformer.convert.FORMAT` lists",
    )
    direction.add_argument("--to", dest="write", choices=WRITTEN_FORMATS, default=None, help="the format to write")
    parser.add_argument(
        "--model",
        required=True,
        type=model_name,
        metavar="M",
        default=argparse.SUPPRESS,
        help="folder, or name on the Hub",
    )
    parser.add_argument(
        "--output_dir",
        required=True,
        type=new_folder,
        metavar="D",
        default=argparse.SUPPRESS,
        help="a new or an empty folder, which is written whole or not at all",
    )
    parser.add_argument(
        "--revision", metavar="R", default=argparse.SUPPRESS, help="branch, tag or commit on the Hub (default: main)"
    )
    parser.add_argument(
        "--quantization",
        metavar="Q",
        default=argparse.SUPPRESS,
        help="of ctranslate2: float32, int8, int8_float32, float16, bfloat16 ... (default: as the weights are); of "
        "onnx: float32 or int8 (default: float32)",
    )
    return parser


def push_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer push`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} push",
        description="Uploads a model's folder to the Hub as one commit: weights, code, tokenizer, generation "
        "settings, the record of its training and its model card. Checkpoints and optimiser states stay. The token is "
        "that of `hf auth login`, or of the variable HF_TOKEN.",
    )
    parser.add_argument(
        "--model", required=True, type=model_folder, metavar="D", default=argparse.SUPPRESS, help="the model's folder"
    )
    parser.add_argument(
        "--repo_id",
        required=True,
        metavar="USER/NAME",
        default=argparse.SUPPRESS,
        help="made where it does not exist; NAME alone is one of your own",
    )
    parser.add_argument(
        "--private", action="store_true", help="make a new repository private; one that is public is refused"
    )
    parser.add_argument(
        "--revision", metavar="B", default=argparse.SUPPRESS, help="branch to commit to, made where it does not exist"
    )
    parser.add_argument("--commit_message", metavar="TEXT", default="Upload model", help="of the commit")
    parser.add_argument(
        "--license", metavar="L", default=argparse.SUPPRESS, help="written into the card, such as apache-2.0"
    )
    parser.add_argument(
        "--space",
        action="store_true",
        help="make repo_id a Space: a page to try the model on, with the model and all code in it",
    )
    parser.add_argument(
        "--output_dir",
        type=new_folder,
        metavar="D",
        default=argparse.SUPPRESS,
        help="with --space: write the files there, new or empty, and send nothing",
    )
    parser.add_argument("--dry_run", action="store_true", help="show what would go, and the card, and send nothing")
    return parser


def _add_length_penalty_arguments(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--length_penalty",
        type=finite_number,
        metavar="P",
        default=argparse.SUPPRESS,
        help=f"{meaning} (default: the model's own)",
    )
    parser.add_argument(
        "--length_penalty_type",
        choices=LENGTH_PENALTY_TYPES,
        default=argparse.SUPPRESS,
        help="gnmt divides a log-probability by ((5 + length) / 6) ** P, as in the paper; hub by length ** P, as in "
        "transformers and fairseq (default: the model's own)",
    )


def _add_format_arguments(parser: argparse.ArgumentParser, text: str) -> None:
    """What `translate` and `score` have in common: how numbers are written."""
    parser.add_argument(
        "--output_format",
        choices=("text", "jsonl"),
        default="text",
        help=f"text: {text}; jsonl: one JSON object for each line of the input, with every number",
    )
    parser.add_argument(
        "--token_probabilities",
        action="store_true",
        help="with --output_format jsonl: also the tokens and the log-probability of each",
    )


def score_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer score`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} score",
        description="Forced decoding: the natural log-probability of each given target line given its source line, "
        "end of sentence counted. Line i of the output belongs to line i of both inputs.",
        epilog="A blank target is the end of sentence alone. A blank source never reaches the model, and its "
        "translation is blank: log-probability 0 for a blank target, -inf for any other. A target of more tokens than "
        "the tokenizer's model_max_length gets nan, with a warning; a source is cut there, as in translate. Objects "
        "of jsonl: source, target, log_probability, length (tokens, end of sentence counted), score (log-probability "
        "divided by the length penalty) and, on request, tokens and token_log_probabilities; null for -inf and nan.",
    )
    _add_model_arguments(parser, searches=False)
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}",
            required=True,
            type=input_file,
            metavar="F",
            default=argparse.SUPPRESS,
            help=f"{side} text, .gz by name; - is standard input",
        )
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="F",
        default="-",
        help="written whole or not at all, .gz by name; - is standard output",
    )
    _add_format_arguments(parser, "one number a line")
    parser.add_argument(
        "--normalized", action="store_true", help="as text, write the score in place of the log-probability"
    )
    _add_length_penalty_arguments(parser, "exponent of the length penalty in the score")
    return parser


def average_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer average`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} average",
        description="Averages the weights of the last checkpoints of a run, or of those named, into one model "
        "(Vaswani et al. 2017, section 6.1: the last 5 for base, 20 for big, written every 10 minutes).",
        epilog="train keeps the best and the last checkpoint unless told otherwise, for instance: --save_strategy "
        "steps --save_steps 500 --save_total_limit 5.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=existing_folder, metavar="RUN_DIR", help="the --output_dir of train")
    which.add_argument(
        "--checkpoints",
        type=existing_folder,
        nargs="+",
        metavar="C",
        help="folders to average",
    )
    parser.add_argument(
        "--last",
        type=whole_number,
        metavar="N",
        default=argparse.SUPPRESS,
        help="how many checkpoints of the run (default: 5)",
    )
    parser.add_argument(
        "--interval_minutes",
        type=finite_number,
        metavar="M",
        default=argparse.SUPPRESS,
        help="leave out, from the newest back, what was written less than M minutes before the one taken last",
    )
    parser.add_argument(
        "--output_dir",
        required=True,
        type=output_folder,
        metavar="D",
        default=argparse.SUPPRESS,
        help="folder of the averaged model, new or empty; appears whole or not at all",
    )
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """Arguments of `vanilla-transformer serve`."""
    parser = OneLineParser(
        prog=f"{PROGRAM} serve",
        description="A page in the browser (extra [serve]): type text or choose a file, and get translations with "
        "their scores and attention. It listens on this machine alone unless --host says otherwise, and fetches "
        "nothing from others.",
    )
    parser.add_argument(
        "--model",
        required=True,
        nargs="+",
        type=model_name,
        metavar="M",
        default=argparse.SUPPRESS,
        help="folders, or names on the Hub; the page lets one choose among them",
    )
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all")
    parser.add_argument("--port", type=port_number, metavar="N", default=7860, help="port to listen at")
    _add_opening_arguments(parser)
    return parser


# The verbs whose arguments can be checked without importing the package.
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "demo": demo_parser,
    "translate": translate_parser,
    "evaluate": evaluate_parser,
    "score": score_parser,
    "average": average_parser,
    "attention": attention_parser,
    "prune": prune_parser,
    "convert": convert_parser,
    "push": push_parser,
    "serve": serve_parser,
}


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def usage() -> str:
    """What `vanilla-transformer --help` prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {line}" for verb, line in VERBS.items())
    return (
        f"usage: {PROGRAM} VERB ...\n\n"
        'The 2017 Transformer ("Attention Is All You Need") for translation.\n\n'
        f"verbs:\n{verbs}\n\n"
        f"{PROGRAM} VERB --help explains a verb; {PROGRAM} --version prints the version.\n"
        f"{TRACEBACK_VARIABLE}=1 in the environment shows the traceback of an error."
    )


def one_line(message: str) -> str:
    """The message on one line, shortened where it is very long."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE].rstrip()} ..."


def users_mistake(error: Exception) -> str | None:
    """What to tell the user of an error that is theirs to mend; None for one that is ours."""
    name, module = type(error).__name__, type(error).__module__.split(".")[0]
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"out of memory; a smaller --tokens_per_batch needs less ({error})"
    if isinstance(error, TypeError):
        # One that the package raised itself tells of an argument; any other is a fault of the program.
        frames = list(traceback.walk_tb(error.__traceback__))
        raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
        return str(error) if raised_in.startswith("vanilla_transformer") else None
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        # Of a copy, the first name is the file that is read, the second the one that has no room.
        copied = error.errno in NO_ROOM and error.filename2 is not None
        return f"{error.strerror}: {error.filename2 if copied else error.filename}"
    if isinstance(error, OSError) and error.strerror and error.errno in NO_ROOM:
        return f"{error.strerror}, in the midst of a file that was being written"
    if type(error) is Exception and "(os error " in str(error):  # what the tokenizers library makes of a full disk
        return str(error)
    ours = (ValueError, OSError, ImportError, FloatingPointError)
    if isinstance(error, ours) or module in ("safetensors", "safetensors_rust"):
        return f"{str(error) or name}{hint_of_login(error)}"
    for cause in causes(error):  # an upload that broke is an error of its own, caused by that of the connection
        library = type(cause).__module__.split(".")[0]
        if library in HUB_LIBRARIES:
            message = str(error) if cause is error else f"{error} {cause}"
            message = re.sub(r"\s*For more information check: \S+", "", message)
            reached = library == "huggingface_hub" or getattr(cause, "response", None) is not None
            return f"{message}{hint_of_login(error)}" if reached else f"the Hub, {hub()}, is not reached: {message}"
    return None


def hub() -> str:
    """The address of the Hub in use."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hint_of_login(error: BaseException) -> str:
    """What to do where the Hub did not take the token, or wanted one."""
    refused = any(getattr(getattr(cause, "response", None), "status_code", None) == 401 for cause in causes(error))
    if not refused or "hf auth login" in str(error):
        return ""
    return " The token is missing or not valid: log in with `hf auth login`, or set HF_TOKEN."


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


class FewerRetries(logging.Filter):
    """Of the client's two lines for each of many retries, the first of a verb's run stays, as a line of ours."""

    told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be shown."""
        message = record.getMessage()
        if message.startswith("Retrying in "):
            return False
        if " thrown while requesting " in message:
            if self.told:
                return False
            self.told = True
            record.msg, record.args = f"the Hub, {hub()}, does not answer ({message}); trying again for a while", ()
        return True


class Terminated(BaseException):
    """The process was told to end, by SIGTERM or since its terminal went away; `signal` is the signal's number."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = number


@contextlib.contextmanager
def raising_when_terminated() -> Iterator[None]:
    """Turns signals that would end the process on the spot into `Terminated`, so that temporary files are removed.

    A second signal, and one in a process that was forked off, ends at once as ever; one that was being ignored, as
    under nohup, still is.
    """
    owner = os.getpid()

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:
            os.kill(os.getpid(), number)
        else:
            raise Terminated(number)

    changed = []
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)
                changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def run(verb: str, argv: list[str]) -> int:
    """Runs one verb and turns its errors into one line and an exit code."""
    prog = f"{PROGRAM} {verb}"
    if verb in PARSERS:
        PARSERS[verb]().parse_args(argv)  # before the slow import, and again in the verb itself
    os.environ.setdefault(*KERNEL_CACHE)
    threading.excepthook = one_line_of_a_thread
    client_logger, fewer_retries = logging.getLogger("huggingface_hub.utils._http"), FewerRetries()
    # A trainer waits for other processes where no handler runs; its half-written checkpoints are told apart anyway.
    cleaning_up = contextlib.nullcontext() if verb == "train" else raising_when_terminated()

    def work() -> int | None:
        with cleaning_up:
            return importlib.import_module(f"vanilla_transformer.commands.{verb}").main(argv)

    client_logger.addFilter(fewer_retries)
    try:
        return exit_code_of(prog, work)
    finally:
        client_logger.removeFilter(fewer_retries)


def exit_code_of(prog: str, work: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Does the work, shows the package's warnings, and turns errors into one line and an exit code.

    Args:
        prog: The name that lines on standard error begin with.
        work: Returns an exit code, None for 0.
        interrupted: What Ctrl-C is answered with.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{prog}: %(levelname)s: %(message)s"))
    package_logger = logging.getLogger("vanilla_transformer")
    package_logger.addHandler(handler)
    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        return leave_quietly()
    except KeyboardInterrupt:
        print(f"\n{prog}: {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Terminated as end:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{prog}: terminated", file=sys.stderr)
        return EXIT_SIGNAL + end.signal
    except Exception as error:
        message = users_mistake(error)
        if message is None or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"{prog}: error: {one_line(message)}", file=sys.stderr)
        return EXIT_USER_ERROR
    finally:
        package_logger.removeHandler(handler)


def one_line_of_a_thread(args: Any) -> None:
    """What a thread, such as the one that writes TensorBoard's file, says of a full disk; else its traceback."""
    if isinstance(args.exc_value, OSError) and args.exc_value.errno in NO_ROOM:
        print(f"{PROGRAM}: WARNING: {users_mistake(args.exc_value)}", file=sys.stderr)
    else:
        threading.__excepthook__(args)


def leave_quietly() -> int:
    """The exit code where whoever read our output has gone."""
    drop_output()
    return EXIT_BROKEN_PIPE


def drop_output() -> None:
    """Forgets what standard output did not take, which the interpreter would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    """The entry of the console command.

    Args:
        argv: Arguments after the program's name; None means those of the process.

    Returns:
        The exit code: 0, 2 for a user's mistake, 130 after Ctrl-C, 141 where nobody reads the output any more, 143
        after SIGTERM.
    """
    return while_read(lambda: answer(sys.argv[1:] if argv is None else argv))


def while_read(work: Callable[[], int]) -> int:
    """Does the work and returns its exit code; ends it quietly where nobody reads standard output any more."""
    try:
        try:
            code = work()
        finally:
            lost = flush_output()
    except BrokenPipeError:
        return leave_quietly()
    # Where the code is another one, the verb has said so.
    return output_is_lost(lost) if lost is not None and code == 0 else code


def output_is_lost(error: OSError) -> int:
    """Says that standard output took nothing, and returns the exit code."""
    print(f"{PROGRAM}: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
    return EXIT_USER_ERROR


def tell(text: str) -> int:
    """Prints a text and returns the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        return output_is_lost(error)
    return 0


def flush_output() -> OSError | None:
    """Writes what is left for standard output; an error of it, such as that of a full disk, is returned."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        return error
    return None


def answer(argv: list[str]) -> int:
    """Answers from this file alone, or runs a verb; returns the exit code."""
    if not argv:
        print(usage(), file=sys.stderr)
        return EXIT_USER_ERROR
    verb, rest = argv[0], argv[1:]
    if verb in ("-h", "--help", "help"):
        return tell(usage())
    if verb in ("-V", "--version"):
        return tell(f"{PROGRAM} {version()}")
    if verb not in VERBS:
        print(f"{PROGRAM}: error: unknown verb {verb!r}; choose one of {', '.join(VERBS)}", file=sys.stderr)
        return EXIT_USER_ERROR
    return run(verb, rest)


if __name__ == "__main__":
    sys.exit(main())

"""`vanilla-transformer attention`: a look inside a model, as a page or as a picture."""

import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from vanilla_transformer.data import read_lines
from vanilla_transformer.translation import load_translator, open_output
from vanilla_transformer.visualization import (
    PICTURE_FORMATS,
    all_attentions_of,
    attention_figure,
    attention_page,
    attentions_figure,
    check_picture_path,
    curves_figure,
    positions_figure,
    save_figure,
    training_history,
)
from vanilla_transformer_cli import attention_parser


PAGE_FORMAT = ".html"
MOST_SENTENCES = 100  # of a page


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer attention --help`.

    Raises:
        ValueError: Arguments that do not fit each other or the model, an input without text or with too many lines, or
            what `load_translator` and `vanilla_transformer.visualization` raise.
        ImportError: A picture is wanted, and matplotlib is not installed.
    """
    arguments = attention_parser().parse_args(argv)
    given = vars(arguments)
    output = arguments.output
    check_arguments(given)
    transformers_logging.disable_progress_bar()
    if arguments.curves is not None:
        name = os.path.basename(os.path.realpath(arguments.curves))
        save_figure(curves_figure(training_history(arguments.curves), title=name), output)
        print(f"saved to {output}")
        return 0
    texts = [] if arguments.positions else [arguments.text] if arguments.input is None else lines_of(arguments.input)
    is_page = Path(output).suffix.lower() == PAGE_FORMAT
    if len(texts) > 1 and not is_page:
        raise ValueError(
            f"a picture shows one sentence, but --input has {len(texts)} or more; write a page (.html), or give one."
        )
    model, tokenizer = load_translator(
        arguments.model,
        device=given.get("device"),
        revision=given.get("revision"),
        trust_remote_code=arguments.trust_remote_code,
    )
    if arguments.positions is not None:
        save_figure(positions_figure(encodings_of(model, arguments.positions)), output)
        print(f"saved to {output}")
        return 0
    sentences = [all_attentions_of(model, tokenizer, text, given.get("target")) for text in texts]
    chosen: dict[str, Any] = {name: given[name] for name in ("kind", "layer", "head") if name in given}
    if is_page:
        title = f"Attention of {os.path.basename(os.path.realpath(arguments.model))}"
        page = attention_page(sentences, title=title, **chosen)
        with open_output(output) as file:
            file.write(page)
    else:
        save_figure(attentions_figure(sentences[0], title=sentences[0].source_text, **chosen), output)
    for each in sentences:
        print(f"{each.source_text}\n  -> {each.target_text}")
    print(f"saved to {output}")
    return 0


def check_arguments(given: dict[str, Any]) -> None:
    """Raises ValueError, or ImportError, for what cannot be, before any work."""
    of_text = given["text"] is not None or given["input"] is not None
    if given["curves"] is None and "model" not in given:
        raise ValueError("--model is missing: the folder of a model, or its name on the Hub.")
    if given["curves"] is not None and "model" in given:
        raise ValueError("--curves looks at the folder of a training; --model is not for it.")
    if not of_text and (extra := [f"--{name}" for name in ("kind", "layer", "head") if name in given]):
        raise ValueError(f"{', '.join(extra)}: for --text and --input only.")
    if "target" in given and given["text"] is None:
        raise ValueError("--target is the translation of --text, which is missing.")
    if given["text"] is not None and not given["text"].strip():
        raise ValueError("--text is blank; there is nothing to look at.")
    output = given["output"]
    ending = Path(output).suffix.lower()
    endings = (PAGE_FORMAT, *PICTURE_FORMATS) if of_text else PICTURE_FORMATS
    if ending not in endings:
        raise ValueError(f"--output must end in one of {', '.join(endings)}, got {output}.")
    if given["input"] not in (None, "-") and os.path.realpath(output) == os.path.realpath(given["input"]):
        raise ValueError("--input and --output must name different files.")
    if ending != PAGE_FORMAT:
        check_picture_path(output)
        attention_figure([[1.0]], [""], [""])  # without matplotlib it fails now


def lines_of(path: str) -> list[str]:
    """The lines of a file that are not blank.

    Raises:
        ValueError: There are none, or more than a page bears.
    """
    name = "standard input" if path == "-" else path
    texts = list(islice((line for line in read_lines(path) if line.strip()), MOST_SENTENCES + 1))
    if not texts:
        raise ValueError(f"{name} has no text; there is nothing to look at.")
    if len(texts) > MOST_SENTENCES:
        raise ValueError(f"a page shows at most {MOST_SENTENCES} sentences, but {name} has more; give fewer lines.")
    return texts


def encodings_of(model: Any, count: int) -> dict[str, torch.Tensor]:
    """What the model adds to the first positions, by title: the sinusoids, or the learned table of either stack.

    Raises:
        ValueError: A model of another package, or more positions than a learned table has.
    """
    stacks: dict[str, Any] = {
        name: getattr(getattr(model, "model", None), name, None) for name in ("encoder", "decoder")
    }
    if not all(hasattr(stack, "positions") for stack in stacks.values()):
        raise ValueError(f"--positions looks into models of this package, got a {type(model).__name__}.")
    if model.config.position_embedding == "sinusoidal":
        stacks = {"sinusoids": stacks["encoder"]}
    positions = torch.arange(count, device=model.device)[None]
    with torch.no_grad():
        return {
            name if name == "sinusoids" else f"learned positions of the {name}": stack.positions(positions, count)[0]
            for name, stack in stacks.items()
        }

"""What goes on inside a model: its attention, as numbers, as pictures and as a page to explore; positions; curves.

The three uses of attention are those of Vaswani et al. 2017, section 3.2.3: self-attention of "encoder" and "decoder",
and "cross" attention, the paper's "encoder-decoder attention". The model arrives as an argument: any encoder-decoder
model of transformers with a fast tokenizer does. Pictures need matplotlib, the page needs nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import logging
import os
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = [
    "Attentions",
    "all_attentions_of",
    "attention_figure",
    "attention_page",
    "attentions_figure",
    "check_picture_path",
    "cross_attention_of",
    "curves_figure",
    "importance_figure",
    "plot_attention",
    "positions_figure",
    "save_figure",
    "token_texts",
    "training_history",
]

logger = logging.getLogger(__name__)

DOTS_PER_INCH = 150
CELL_INCHES = 0.28
# A picture of a long text gets smaller cells instead of more pixels than memory can hold.
MAX_HEAT_MAP_INCHES = 48.0
MIN_FONT_POINTS = 4.0
MAX_FONT_POINTS = 10.0
VISIBLE_SPACE = "\u2423"
PICTURE_FORMATS = (".png", ".svg", ".pdf")
# The uses of attention, with what looks and what is looked at.
KINDS = {
    "encoder": ("source tokens", "source tokens"),
    "decoder": ("target tokens", "tokens written before"),
    "cross": ("target tokens", "source tokens"),
}
PAGE = "attention_page.html"  # beside this file
MOST_WEIGHTS_OF_A_PAGE = 5_000_000  # about seven bytes each
LETTER_WIDTH = 0.62  # of the font size, about
MOST_TITLE_LINES = 2
MAX_TITLE_INCHES = 7.0  # a longer title does not widen the picture
JOINERS = "\u200c\u200d"  # without width: they shape the letters beside them


def cross_attention_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_text: str,
    target_text: str | None = None,
    *,
    layer: int = -1,
    head: int | None = None,
) -> tuple[np.ndarray, list[str], list[str]]:
    """Cross-attention weights of one sentence pair.

    The model is run in evaluation mode with `attn_implementation="eager"`, the only one that returns weights; both
    settings are put back afterwards.

    Args:
        model: an encoder-decoder model with a language-model head.
        tokenizer: its tokenizer; it ends a text with EOS.
        source_text: the sentence to translate, truncated to the tokenizer's limit.
        target_text: its translation, for example a reference. None: what `model.generate` writes with the model's own
            settings.
        layer: which decoder layer; negative numbers count from the last one.
        head: which head of that layer. None: the mean over its heads.

    Returns:
        weights: (T_target, T_source) float32; row i belongs to the step that predicts target token i, so it sums to 1.
        source_tokens: T_source texts, EOS included (see `token_texts`).
        target_tokens: T_target texts, EOS included where the model wrote it.

    Raises:
        ValueError: the source is blank, there is no such layer or head, or the model returns no cross-attention.

    Source: Vaswani et al. 2017, 3.2.3 and eq. (1).
    """
    outputs, input_ids, _, target_ids = _attend(model, tokenizer, source_text, target_text)
    layers = getattr(outputs, "cross_attentions", None)
    if not layers:
        raise ValueError(_without_weights(model))
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"layer must lie between {-len(layers)} and {len(layers) - 1}, got {layer}")
    heads = layers[layer][0].float()  # (num_heads, T_target, T_source)
    if head is None:
        weights = heads.mean(dim=0)
    elif 0 <= head < len(heads):
        weights = heads[head]
    else:
        raise ValueError(
            f"head must lie between 0 and {len(heads) - 1}, or be None for the mean over heads, got {head}"
        )
    return weights.cpu().numpy(), token_texts(tokenizer, input_ids[0]), token_texts(tokenizer, target_ids[0])


@dataclass(frozen=True)
class Attentions:
    """Every attention of one translation.

    Row i of decoder and cross belongs to the step that predicts target token i, which has read the first i + 1 of
    `read_tokens`. Each row sums to 1.

    Args:
        source_text, target_text: the sentence and its translation.
        source_tokens: T_source texts, EOS included (see `token_texts`).
        target_tokens: T_target texts, EOS included where there is one.
        read_tokens: T_target texts: the start token, then the target tokens but the last.
        weights: for each of "encoder", "decoder" and "cross" one float32 array a layer, of the shapes (num_heads,
            T_source, T_source), (num_heads, T_target, T_target) and (num_heads, T_target, T_source).
        heads: for each kind, the number of each head of each layer. They count from 0; where heads were pruned, the
            others keep their numbers.
    """

    source_text: str
    target_text: str
    source_tokens: list[str]
    target_tokens: list[str]
    read_tokens: list[str]
    weights: dict[str, list[np.ndarray]]
    heads: dict[str, list[list[int]]]

    def tokens(self, kind: str) -> tuple[list[str], list[str]]:
        """What looks, the rows of a matrix of this kind, and what is looked at, its columns."""
        if kind == "encoder":
            return self.source_tokens, self.source_tokens
        return self.target_tokens, (self.read_tokens if kind == "decoder" else self.source_tokens)

    def of(self, kind: str, layer: int, head: int | None = None) -> np.ndarray:
        """The matrix of one head, or the mean over the heads of a layer.

        Args:
            kind: "encoder", "decoder" or "cross".
            layer: number of the layer; negative ones count from the last.
            head: number of the head; None means the mean.

        Raises:
            ValueError: there is no such kind, layer or head.
        """
        if kind not in self.weights:
            raise ValueError(f"kind must be one of {', '.join(self.weights)}, got {kind!r}")
        layers = self.weights[kind]
        if not -len(layers) <= layer < len(layers):
            raise ValueError(
                f"layer must lie between {-len(layers)} and {len(layers) - 1} for {kind} attention, got {layer}"
            )
        if head is None:
            return layers[layer].mean(axis=0)
        heads = self.heads[kind][layer]
        if head not in heads:
            there = ", ".join(map(str, heads))
            raise ValueError(f"layer {layer % len(layers)} of {kind} attention has the heads {there}, got head {head}")
        return layers[layer][heads.index(head)]


def all_attentions_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source_text: str, target_text: str | None = None
) -> Attentions:
    """Every attention weight of one sentence pair: of encoder and decoder, and between them, in every layer and head.

    The model is run and left as by `cross_attention_of`.

    Args:
        model: an encoder-decoder model with a language-model head.
        tokenizer: its tokenizer; it ends a text with EOS.
        source_text: the sentence to translate, truncated to the tokenizer's limit.
        target_text: its translation. None: what `model.generate` writes with the model's own settings.

    Raises:
        ValueError: the source is blank, or the model returns no attention weights.

    Source: Vaswani et al. 2017, 3.2.3 and eq. (1).
    """
    outputs, input_ids, decoder_input_ids, target_ids = _attend(model, tokenizer, source_text, target_text)
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    found = {kind: getattr(outputs, name, None) for kind, name in names.items()}
    if not all(found.values()):
        raise ValueError(_without_weights(model))
    weights = {kind: [each[0].float().cpu().numpy() for each in layers or ()] for kind, layers in found.items()}
    numbers = getattr(model.config, "heads_of", lambda kind, layer: list(range(len(weights[kind][layer]))))
    return Attentions(
        source_text=source_text,
        target_text=str(tokenizer.decode(target_ids[0], skip_special_tokens=True)),
        source_tokens=token_texts(tokenizer, input_ids[0]),
        target_tokens=token_texts(tokenizer, target_ids[0]),
        read_tokens=token_texts(tokenizer, decoder_input_ids[0]),
        weights=weights,
        heads={kind: [numbers(kind, layer) for layer in range(len(layers))] for kind, layers in weights.items()},
    )


def _without_weights(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} returned no cross_attentions; expected an encoder-decoder model that returns "
        'them with output_attentions=True and attn_implementation="eager"'
    )


def _attend(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source_text: str, target_text: str | None
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The model's outputs with attention weights, and the ids of source, decoder input and target, (1, T) each."""
    if not source_text.strip():
        raise ValueError(f"source_text must have at least one character that is not white space, got {source_text!r}")
    encoded = tokenizer(source_text, return_tensors="pt", truncation=True)
    input_ids = encoded["input_ids"].to(model.device)  # (1, T_source)
    attention_mask = torch.ones_like(input_ids)

    with _evaluation_mode(model), torch.no_grad():
        if target_text is None:
            sequence = model.generate(input_ids=input_ids, attention_mask=attention_mask, num_return_sequences=1)  # type: ignore[operator]
            sequence = getattr(sequence, "sequences", sequence)[
                :1
            ]  # (1, 1 + T_target), it begins with the start token
            start, target_ids = sequence[:, :1], sequence[:, 1:]
        else:
            start_token_id = getattr(model.config, "decoder_start_token_id", None)
            if start_token_id is None:
                start_token_id = getattr(model.generation_config, "decoder_start_token_id", None)
            if start_token_id is None:
                raise ValueError(
                    "the model's config must have a decoder_start_token_id, got None; set it in the config"
                )
            start = torch.tensor([[start_token_id]], device=model.device)
            target_ids = tokenizer(text_target=target_text, return_tensors="pt", truncation=True)["input_ids"]
            target_ids = target_ids.to(model.device)  # (1, T_target)
        if target_ids.shape[1] == 0:
            raise ValueError(f"the translation must have at least one token, got none for {source_text!r}")
        decoder_input_ids = torch.cat([start, target_ids[:, :-1]], dim=1)
        with _eager_attention(model):
            outputs = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                use_cache=False,
                output_attentions=True,
                return_dict=True,
            )
    return outputs, input_ids, decoder_input_ids, target_ids


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int] | torch.Tensor) -> list[str]:
    """The text of each token by itself.

    Args:
        tokenizer: a fast tokenizer.
        token_ids: ids of one sentence.

    Returns:
        One text per id; a leading space stays. Where a token of a byte-level vocabulary holds only a part of a
        character's UTF-8 bytes, these are written as `\\xNN`.
    """
    texts = []
    for token_id in map(int, token_ids):
        text = str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if "\ufffd" in text:
            token = str(tokenizer.convert_ids_to_tokens(token_id))
            if all(character in _BYTE_OF_CHARACTER for character in token):
                token_bytes = bytes(_BYTE_OF_CHARACTER[character] for character in token)
                text = token_bytes.decode("utf-8", errors="backslashreplace")
        texts.append(text)
    return texts


def plot_attention(
    weights: np.ndarray | torch.Tensor | Sequence[Sequence[float]],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | os.PathLike[str],
    title: str | None = None,
) -> Path:
    """Draw attention weights as a heat map and write it as a PNG file.

    The file appears whole or not at all; an older one of that name is replaced only by a finished picture. Letters
    that matplotlib's fonts lack are drawn as boxes, with one warning in the log; `matplotlib.rcParams["font.family"]`
    names other fonts.

    Args:
        weights: (T_target, T_source), not negative.
        source_tokens: T_source texts, the columns from left to right.
        target_tokens: T_target texts, the rows from top to bottom.
        path: where to write; ends in ".png". Its folder must exist.
        title: a line above the picture. None: no title.

    Returns:
        The path that was written.

    Raises:
        ImportError: matplotlib is not installed.
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.
        ValueError: another suffix than ".png", shapes that do not fit together, or weights that are negative or not
            finite.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"path must end in .png, the format that is written, got {str(path)!r}")
    check_picture_path(path)
    return save_figure(attention_figure(weights, source_tokens, target_tokens, title), path)


def check_picture_path(path: str | os.PathLike[str]) -> Path:
    """The path, where a picture can be written there.

    Args:
        path: where to write; ends in ".png", ".svg" or ".pdf". Its folder must exist.

    Raises:
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.
        ValueError: another suffix.
    """
    path = Path(path)
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"path must end in one of {', '.join(PICTURE_FORMATS)}, got {str(path)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the folder {str(path)!r}; give a name inside it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of path must exist, got {str(path)!r}; make {str(path.parent)!r} first")
    return path


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure in the format that the file's ending names; the file appears whole or not at all.

    Where letters have no glyph in the font, the log says so in one line.

    Args:
        figure: of matplotlib.
        path: see `check_picture_path`, which says what is raised.

    Returns:
        The path that was written.
    """
    path = check_picture_path(path)
    picture = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(picture, format=path.suffix.lower()[1:], dpi=DOTS_PER_INCH)
    missing: dict[str, None] = {}  # in order
    for each in caught:
        if found := re.match(r"Glyph (\d+) .*missing from", str(each.message)):
            missing[chr(int(found.group(1)))] = None
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing:
        logger.warning(
            "%s: the font of pictures has no glyph for %s, drawn as boxes; the page (.html) of attention shows them",
            path,
            " ".join(list(missing)[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else ""),
        )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(picture.getvalue())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def attention_figure(
    weights: np.ndarray | torch.Tensor | Sequence[Sequence[float]],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str | None = None,
    *,
    source_label: str = "source tokens",
    target_label: str = "target tokens",
    panel_title: str | None = None,
) -> Figure:
    """The heat map of `plot_attention` as a matplotlib figure that belongs to no window and to no pyplot state.

    Its colours go from 0 to 1, as in every other picture of attention.

    Args:
        weights: (T_target, T_source), not negative.
        source_tokens: T_source texts, the columns from left to right.
        target_tokens: T_target texts, the rows from top to bottom.
        title: above the picture, in two lines at most; of a longer one the middle is left out. None: no title.
        source_label: what the columns are.
        target_label: what the rows are.
        panel_title: a line between title and heat map, such as which head it is. None: no such line.

    Returns:
        The figure; its first axes hold the heat map, its second the colour bar.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: shapes that do not fit together, or weights that are negative or not finite.
    """
    cells = _checked_weights(weights, source_tokens, target_tokens)
    rows, columns = cells.shape
    cell_inches = min(CELL_INCHES, MAX_HEAT_MAP_INCHES / max(rows, columns))
    font_points = min(MAX_FONT_POINTS, max(MIN_FONT_POINTS, cell_inches * 72 * 0.6))
    source_labels = [_visible(token) for token in source_tokens]
    target_labels = [_visible(token) for token in target_tokens]
    # Room for labels and colour bar beside the cells, which constrained layout shares out.
    letter_inches = LETTER_WIDTH * font_points / 72
    longest_source, longest_target = (max(map(len, labels)) for labels in (source_labels, target_labels))
    width = max(columns * cell_inches, 1.0) + longest_target * letter_inches + 1.6
    height = max(rows * cell_inches, 1.0) + longest_source * letter_inches + 1.0
    if title is not None:
        width = max(width, min(len(title) * LETTER_WIDTH * MAX_FONT_POINTS / 72 + 0.4, MAX_TITLE_INCHES))
    height += 0.25 * (panel_title is not None)
    figure = _new_figure(width, height)
    axes = figure.add_subplot()
    highest = max(1.0, float(cells.max()))  # numbers that are no attention may be larger
    image = axes.imshow(cells, cmap="viridis", vmin=0.0, vmax=highest, aspect="equal", interpolation="nearest")
    if panel_title is not None:
        axes.set_title(panel_title, fontsize=MAX_FONT_POINTS, parse_math=False)
    # A token may hold "$", which matplotlib would otherwise read as the beginning of a formula.
    axes.set_xticks(*_ticks(source_labels, cell_inches), rotation=90, fontsize=font_points, parse_math=False)
    axes.set_yticks(*_ticks(target_labels, cell_inches), fontsize=font_points, parse_math=False)
    axes.tick_params(length=2, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.set_xlabel(source_label)
    axes.xaxis.set_label_position("top")
    axes.set_ylabel(target_label)
    _set_title(figure, title)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=min(1.0, 3.0 / height))
    _warn_of_small_cells(max(rows, columns), cell_inches)
    return figure


def _set_title(figure: Figure, title: str | None) -> None:
    """A title that fits the figure: in two lines at most, with an ellipsis for the middle of a longer one."""
    if title is None:
        return
    text = _escaped(title)
    letters = max(8, int((figure.get_figwidth() - 0.2) * 72 / (LETTER_WIDTH * MAX_FONT_POINTS)))
    if len(text) > letters:
        lines = textwrap.wrap(text, letters)
        if len(lines) > MOST_TITLE_LINES:
            lines = [f"{text[: letters - 2].rstrip()} \u2026", f"\u2026 {text[2 - letters :].lstrip()}"]
        text = "\n".join(lines)
        figure.set_figheight(figure.get_figheight() + 1.5 * MAX_FONT_POINTS / 72)
    figure.suptitle(text, fontsize=MAX_FONT_POINTS, parse_math=False)


def _warn_of_small_cells(count: int, cell_inches: float) -> None:
    if cell_inches < MIN_FONT_POINTS / 72:
        logger.warning(
            "%d tokens are too many for this picture to label each of them; an .html page, or one head, suits better",
            count,
        )


def _new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, that belongs to no window and to no pyplot state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f'drawing needs matplotlib ({error}); install it with pip install "vanilla-transformer[demo]"'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def attentions_figure(
    attentions: Attentions,
    *,
    kind: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    title: str | None = None,
) -> Figure:
    """Every attention of a translation as one figure: a row a layer, a column a head, colours from 0 to 1.

    With kind, layer and head given it is one heat map, as of `attention_figure`.

    Args:
        attentions: what `all_attentions_of` returned.
        kind: "encoder", "decoder" or "cross". None: all three, one below the other.
        layer: number of the layer; negative ones count from the last. None: all.
        head: number of the head. None: all.
        title: a line above the picture. None: no title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no such kind, layer or head.
    """
    kinds = list(attentions.weights) if kind is None else [kind]
    panels: list[tuple[str, int, list[int]]] = []
    for each in kinds:
        if layer is not None:
            attentions.of(each, layer, head)  # says what is wrong
        depth = len(attentions.weights[each]) if each in attentions.weights else 0
        chosen = range(depth) if layer is None else [layer % depth]
        for number in chosen:
            if head is not None:
                attentions.of(each, number, head)
            panels.append((each, number, attentions.heads[each][number] if head is None else [head]))
    if not panels:
        attentions.of(str(kind), 0)
    if len(panels) == 1 and len(panels[0][2]) == 1:
        (each, number, (only,)) = panels[0]
        rows, columns = attentions.tokens(each)
        target_label, source_label = KINDS[each]
        labels = {"source_label": source_label, "target_label": target_label}
        panel_title = f"{each} attention, layer {number}, head {only}"
        return attention_figure(
            attentions.of(each, number, only), columns, rows, title, **labels, panel_title=panel_title
        )

    heads = sorted({number for _, _, numbers in panels for number in numbers})
    longest = max(len(tokens) for each in kinds for tokens in attentions.tokens(each))
    panel_inches = min(max(1.4, longest * 0.085), 3.6)
    sizes = [tuple(map(len, attentions.tokens(each))) for each, _, _ in panels]
    # A panel has square cells; the room for its labels and its title comes on top.
    heights = [max(0.3, panel_inches * min(1.0, rows / columns)) for rows, columns in sizes]
    texts = {each: tuple([_visible(token) for token in side] for side in attentions.tokens(each)) for each in kinds}
    longest_row, longest_column = (max(len(text) for each in kinds for text in texts[each][side]) for side in (0, 1))
    font_points = min(7.0, max(MIN_FONT_POINTS, panel_inches * 72 / longest * 0.8))
    letter_inches = LETTER_WIDTH * font_points / 72
    width = 1.4 + panel_inches * len(heads) + max(0.0, longest_row * letter_inches - 0.4)
    height = 0.6 + sum(heights) + (0.35 + longest_column * letter_inches) * len(panels)
    shrink = min(1.0, MAX_HEAT_MAP_INCHES / max(width, height))
    figure = _new_figure(width * shrink, height * shrink)
    font_points = max(2.5, font_points * shrink)
    grid = figure.subplots(len(panels), len(heads), squeeze=False, gridspec_kw={"height_ratios": heights})
    images = []
    smallest = CELL_INCHES
    for across, (each, number, numbers), size in zip(grid, panels, sizes, strict=True):
        rows, columns = texts[each]
        cell_inches = panel_inches * shrink / max(size)
        smallest = min(smallest, cell_inches)
        for place, axes in enumerate(across):
            if heads[place] not in numbers:
                axes.set_axis_off()
                continue
            weights = attentions.of(each, number, heads[place])
            images.append(axes.imshow(weights, cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest"))
            axes.set_title(f"{each} {number}, head {heads[place]}", fontsize=max(4.0, 7.0 * shrink))
            axes.tick_params(length=0, pad=1)
            axes.set_xticks(*_ticks(columns, cell_inches), rotation=90, fontsize=font_points, parse_math=False)
            axes.set_yticks([])
            if place == 0:
                axes.set_yticks(*_ticks(rows, cell_inches), fontsize=font_points, parse_math=False)
    figure.colorbar(images[0], ax=grid, label="attention weight", shrink=min(1.0, 3.0 / (height * shrink)), pad=0.01)
    _set_title(figure, title)
    _warn_of_small_cells(longest, smallest)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def attention_page(
    sentences: Sequence[Attentions],
    *,
    title: str = "Attention",
    kind: str = "cross",
    layer: int = -1,
    head: int | None = None,
) -> str:
    """Every attention of one translation or of several as an HTML page that explores them.

    The page is whole in itself: it loads nothing, and its content security policy allows only the script and the style
    that it was made with. Whatever the tokens hold, they are text there.

    Args:
        sentences: what `all_attentions_of` returned; each has a place in the page's list.
        title: of the page.
        kind: what is shown at first, "encoder", "decoder" or "cross".
        layer: the same; negative ones count from the last.
        head: the same; None means the mean of the layer's heads.

    Returns:
        The HTML, to be written as UTF-8. Its weights have five decimals.

    Raises:
        ValueError: no sentence, no such kind, layer or head, or more weights than a browser bears.
    """
    if not sentences:
        raise ValueError("the page needs at least one sentence, got none")
    sentences[0].of(kind, layer, head)
    count = sum(weights.size for each in sentences for layers in each.weights.values() for weights in layers)
    if count > MOST_WEIGHTS_OF_A_PAGE:
        raise ValueError(
            f"the page would have {count:,} weights, more than the {MOST_WEIGHTS_OF_A_PAGE:,} that a browser bears; "
            "give fewer or shorter sentences"
        )
    data = {
        "start": {"kind": kind, "layer": layer % len(sentences[0].weights[kind]), "head": head},
        "sentences": [
            {
                "source": each.source_text,
                "target": each.target_text,
                "tokens": {
                    name: [_visible(token, keep=JOINERS) for token in tokens]
                    for name, tokens in (
                        ("source", each.source_tokens),
                        ("target", each.target_tokens),
                        ("read", each.read_tokens),
                    )
                },
                "attention": {
                    name: [
                        {"heads": heads, "weights": weights.astype(np.float64).round(5).tolist()}
                        for heads, weights in zip(each.heads[name], layers, strict=True)
                    ]
                    for name, layers in each.weights.items()
                },
            }
            for each in sentences
        ],
    }
    text = (Path(__file__).parent / PAGE).read_text(encoding="utf-8")
    parts = {
        "TITLE": html.escape(title),
        "POLICY": _content_security_policy(text),
        "DATA": _json_for_html(data),
    }
    return re.sub("@(TITLE|POLICY|DATA)@", lambda match: parts[match.group(1)], text)


def _json_for_html(data: Any) -> str:
    """JSON without a character that means something to HTML, and in ASCII, so that a lone surrogate does no harm."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_security_policy(page: str) -> str:
    """Only this page's own script and style: nothing else runs, and nothing is loaded."""

    def digest(pattern: str) -> str:
        found = re.findall(pattern, page, flags=re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in found
        )

    scripts, styles = digest("<script>(.*?)</script>"), digest("<style>(.*?)</style>")
    return f"default-src 'none'; img-src data:; script-src {scripts}; style-src {styles}; base-uri 'none'"


# ---------------------------------------------------------------------------------------------------------------------
# Positions, importance of heads, curves of a training
# ---------------------------------------------------------------------------------------------------------------------


def positions_figure(encodings: Mapping[str, np.ndarray | torch.Tensor]) -> Figure:
    """What is added to the embedding of each position, as a heat map of positions (down) and dimensions (across).

    Args:
        encodings: by title, arrays of shape (positions, d_model), for example {"sinusoids": sinusoidal_encoding(...)}.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: none, or one that is no matrix of finite numbers.
    """
    matrices = {}
    for title, values in encodings.items():
        if isinstance(values, torch.Tensor):
            values = values.detach().float().cpu().numpy()
        matrix = np.asarray(values, dtype=np.float32)
        if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
            raise ValueError(f"encodings must be finite, of the shape (positions, d_model), got {matrix.shape}")
        matrices[title] = matrix
    if not matrices:
        raise ValueError("there must be at least one matrix of encodings, got none")
    figure = _new_figure(7.5, 5.0 * len(matrices))
    for axes, (title, matrix) in zip(
        figure.subplots(len(matrices), squeeze=False)[:, 0], matrices.items(), strict=True
    ):
        limit = float(np.abs(matrix).max()) or 1.0
        image = axes.imshow(matrix, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        axes.set_title(_escaped(title), fontsize=MAX_FONT_POINTS, parse_math=False)
        axes.set_xlabel("dimension")
        axes.set_ylabel("position")
        figure.colorbar(image, ax=axes)
    return figure


def importance_figure(
    heads: Sequence[tuple[str, int, int, float]], taken_out: Collection[tuple[str, int, int]] = ()
) -> Figure:
    """The importance of each head as a heat map: a row an attention, a column a head; pruned heads stay blank.

    Args:
        heads: kind, layer, head and importance of each, as of `vanilla_transformer.pruning.Head`.
        taken_out: kind, layer and head of those to cross out, with a line below that says what the crosses mean.

    Raises:
        ImportError: matplotlib is not installed.
    """
    attentions = list(dict.fromkeys((kind, layer) for kind, layer, _, _ in heads))
    columns = max(head for _, _, head, _ in heads) + 1
    cells = np.full((len(attentions), columns), np.nan)
    for kind, layer, head, importance in heads:
        cells[attentions.index((kind, layer)), head] = importance
    figure = _new_figure(2.6 + 0.75 * columns, 1.2 + 0.35 * len(attentions))
    axes = figure.add_subplot()
    highest = float(np.nanmax(cells)) or 1.0
    image = axes.imshow(cells, cmap="viridis", vmin=0.0, vmax=highest, aspect="auto")
    for (row, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            shade = "black" if value > 0.6 * highest else "white"
            axes.text(column, row, f"{value:.4f}", ha="center", va="center", fontsize=7, color=shade)
    axes.set_xticks(range(columns))
    axes.set_yticks(range(len(attentions)), [f"{kind} {layer}" for kind, layer in attentions])
    for kind, layer, head in taken_out:
        row = attentions.index((kind, layer))
        for slope in (-0.5, 0.5):
            axes.plot([head - 0.5, head + 0.5], [row - slope, row + slope], color="tab:red", linewidth=1.5)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(len(attentions) - 0.5, -0.5)
    axes.set_xlabel("head" + ("\ncrossed: taken out; each attention keeps at least one" if taken_out else ""))
    figure.colorbar(image, ax=axes, label="importance, nats a target token")
    return figure


def training_history(run_dir: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """What a training logged: for each quantity the update and the value, in order.

    Taken from the `trainer_state.json` that knows of most updates: in the folder itself, where a finished run leaves
    it, or in one of its checkpoints; it tells of the whole run, also of one that was resumed. Where there is none, as
    before the first checkpoint, from the TensorBoard events in `runs/`.

    Args:
        run_dir: the `output_dir` of a training, or a checkpoint.

    Returns:
        For example {"loss": [(20, 6.9), ...], "learning_rate": ..., "eval_loss": ..., "eval_bleu": ...}.

    Raises:
        NotADirectoryError: `run_dir` is no folder.
        ValueError: nothing was logged there.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise NotADirectoryError(f"expected the folder of a training, got {str(folder)!r}")
    history: dict[str, dict[int, float]] = {}
    furthest = -1
    for path in (folder / "trainer_state.json", *sorted(folder.glob("checkpoint-*/trainer_state.json"))):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            step, entries = int(state["global_step"]), state["log_history"]
            found: dict[str, dict[int, float]] = {}
            for entry in entries:
                for name, value in entry.items():
                    if name not in ("step", "epoch") and isinstance(value, (int, float)):
                        found.setdefault(name, {})[int(entry["step"])] = float(value)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("stepped over %s, which is not whole: %s", path, error)
            continue
        if step > furthest:
            history, furthest = found, step
    if not history:
        history = _tensorboard_history(folder)
    if not history:
        raise ValueError(
            f"{folder} holds no log of a training: neither trainer_state.json, in it or in a checkpoint, nor "
            "TensorBoard events in runs/"
        )
    return {name: sorted(values.items()) for name, values in history.items()}


def _tensorboard_history(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars of all events of a run under the names that the trainer's log has."""
    files = sorted(folder.glob("runs/**/events.out.tfevents.*"))
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            group, _, name = tag.rpartition("/")
            name = f"eval_{name}" if group == "eval" else name
            history.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return history


def curves_figure(history: Mapping[str, Sequence[tuple[int, float]]], title: str | None = None) -> Figure:
    """Loss, learning rate and BLEU of a training over its updates, each where it was logged.

    Args:
        history: what `training_history` returned.
        title: a line above the picture. None: no title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing of these was logged.
    """
    panels: dict[str, dict[str, str | None]] = {
        "loss, nats a token": {"loss": "training (label-smoothed)", "eval_loss": "validation"},
        "learning rate": {"learning_rate": None},
        "BLEU": {"eval_bleu": "validation"},
    }
    shown = {label: lines for label, lines in panels.items() if any(history.get(name) for name in lines)}
    if not shown:
        raise ValueError(
            f"expected loss, learning_rate or eval_bleu in the log, got {', '.join(history) or 'nothing'}"
        )
    figure = _new_figure(7.5, 0.4 + 2.4 * len(shown))
    grid = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, (label, lines) in zip(grid, shown.items(), strict=True):
        for name, line in lines.items():
            points = history.get(name)
            if points:
                marker = "o" if name.startswith("eval") or len(points) == 1 else None
                axes.plot(*zip(*points, strict=True), label=line, marker=marker, markersize=3, linewidth=1.2)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8)
    grid[-1].set_xlabel("update")
    _set_title(figure, title)
    return figure


def _checked_weights(weights: Any, source_tokens: Sequence[str], target_tokens: Sequence[str]) -> np.ndarray:
    """The weights as a float32 matrix that fits the tokens."""
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().float().cpu().numpy()
    cells = np.asarray(weights, dtype=np.float32)
    expected = (len(target_tokens), len(source_tokens))
    if 0 in expected:
        raise ValueError(
            f"there must be at least one source and one target token, got {expected[1]} and {expected[0]}"
        )
    if cells.shape != expected:
        raise ValueError(
            f"weights must have the shape (target tokens, source tokens) = {expected}, got {cells.shape}"
            + ("; choose a layer and a head, or take the mean over heads" if cells.ndim > 2 else "")
        )
    if not np.isfinite(cells).all() or (cells < 0).any():
        raise ValueError(f"weights must be finite and not negative, got values from {cells.min()} to {cells.max()}")
    return cells


def _ticks(labels: list[str], cell_inches: float) -> tuple[list[int], list[str]]:
    """Positions and texts of the labels; only every nth where the cells are smaller than the smallest letters."""
    step = max(1, int(np.ceil(MIN_FONT_POINTS / 72 / cell_inches)))
    return list(range(0, len(labels), step)), labels[::step]


def _visible(token: str, keep: str = "") -> str:
    """A token as a label: spaces and everything else that cannot be seen become visible, but for what `keep` holds."""
    return _escaped(token, keep if token.strip(keep) else "").replace(" ", VISIBLE_SPACE) or "(empty)"


def _escaped(text: str, keep: str = "") -> str:
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies, mapped back to the byte.

    Visible Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on, in order.
    Source: the byte-level alphabet of GPT-2, which `tokenizers.pre_tokenizers.ByteLevel` shares.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    characters = {chr(byte): byte for byte in visible}
    characters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return characters


_BYTE_OF_CHARACTER = _byte_characters()


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off, then each module back as it was (a caller may have frozen some of them)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)

"""Which source tokens a model looks at while it writes each target token: cross-attention as numbers and as a picture.

Cross-attention is the "encoder-decoder attention" of Vaswani et al. 2017, section 3.2.3. The model arrives as an
argument: any encoder-decoder model of transformers with a fast tokenizer does.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = ["attention_figure", "cross_attention_of", "plot_attention", "token_texts"]

DOTS_PER_INCH = 150
CELL_INCHES = 0.28
# A picture of a long text gets smaller cells instead of more pixels than memory can hold.
MAX_HEAT_MAP_INCHES = 48.0
MIN_FONT_POINTS = 4.0
MAX_FONT_POINTS = 10.0
VISIBLE_SPACE = "\u2423"


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
    layers = getattr(outputs, "cross_attentions", None)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} returned no cross_attentions; expected an encoder-decoder model that returns "
            'them with output_attentions=True and attn_implementation="eager"'
        )
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
    that matplotlib's fonts lack are drawn as boxes, with a warning; `matplotlib.rcParams["font.family"]` names others.

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
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the folder {str(path)!r}; give a name inside it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of path must exist, got {str(path)!r}; make {str(path.parent)!r} first")
    figure = attention_figure(weights, source_tokens, target_tokens, title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
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
) -> Figure:
    """The heat map of `plot_attention` as a matplotlib figure that belongs to no window and to no pyplot state.

    Args:
        weights: (T_target, T_source), not negative.
        source_tokens: T_source texts, the columns from left to right.
        target_tokens: T_target texts, the rows from top to bottom.
        title: a line above the picture. None: no title.

    Returns:
        The figure; its first axes hold the heat map, its second the colour bar.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: shapes that do not fit together, or weights that are negative or not finite.
    """
    cells = _checked_weights(weights, source_tokens, target_tokens)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f'drawing attention needs matplotlib ({error}); install it with pip install "vanilla-transformer[demo]"'
        ) from error

    rows, columns = cells.shape
    cell_inches = min(CELL_INCHES, MAX_HEAT_MAP_INCHES / max(rows, columns))
    font_points = min(MAX_FONT_POINTS, max(MIN_FONT_POINTS, cell_inches * 72 * 0.6))
    source_labels = [_visible(token) for token in source_tokens]
    target_labels = [_visible(token) for token in target_tokens]
    # Room for labels and colour bar beside the cells, which constrained layout shares out. A letter is about 0.62 of
    # the font size wide.
    letter_inches = 0.62 * font_points / 72
    longest_source, longest_target = (max(map(len, labels)) for labels in (source_labels, target_labels))
    width = max(columns * cell_inches, 1.0) + longest_target * letter_inches + 1.6
    height = max(rows * cell_inches, 1.0) + longest_source * letter_inches + 1.0
    if title is not None:
        width = max(width, len(title) * 0.62 * MAX_FONT_POINTS / 72 + 0.4)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        cells, cmap="viridis", vmin=0.0, vmax=float(cells.max()) or 1.0, aspect="equal", interpolation="nearest"
    )
    # A token may hold "$", which matplotlib would otherwise read as the beginning of a formula.
    axes.set_xticks(*_ticks(source_labels, cell_inches), rotation=90, fontsize=font_points, parse_math=False)
    axes.set_yticks(*_ticks(target_labels, cell_inches), fontsize=font_points, parse_math=False)
    axes.tick_params(length=2, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.set_xlabel("source tokens")
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("target tokens")
    if title is not None:
        figure.suptitle(_escaped(title), fontsize=MAX_FONT_POINTS, parse_math=False)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=min(1.0, 3.0 / height))
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


def _visible(token: str) -> str:
    """A token as a label: spaces and everything else that cannot be seen become visible."""
    return _escaped(token).replace(" ", VISIBLE_SPACE) or "(empty)"


def _escaped(text: str) -> str:
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
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

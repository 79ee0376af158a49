"""A page in the browser to try models on: text or a file in, translations with their scores and attention out.

The page is made with Gradio (extra `[serve]`), which is imported only when a page is built. It listens where it is
told to, fetches nothing from other machines and reports to none. Each model is run by one thread at a time.
"""

import contextlib
import html
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.data import read_lines
from vanilla_transformer.translation import (
    Hypothesis,
    encode_lines,
    load_translator,
    position_limit,
    token_limit,
    translate_lines,
)
from vanilla_transformer.visualization import all_attentions_of, attention_page


__all__ = ["ServedModel", "open_page", "open_served_model", "serve", "translation_page"]

logger = logging.getLogger(__name__)

# What the text box takes; more belongs into a file.
MOST_LINES = 200
MOST_CHARACTERS = 20_000
MOST_BEAMS = 16
LARGEST_FILE = "50mb"
# A model that someone's file keeps busy is free for others after so many lines.
LINES_AT_ONCE = 64
USERS_AT_ONCE = 4
SECONDS_FILES_ARE_KEPT = 3600
ATTENTION_PIXELS = 760

COLUMNS = ["line", "rank", "score", "log-probability", "tokens", "translation"]
MEANINGS = (
    "*log-probability*: natural logarithm of the translation's probability, its end included, 0 at most; *score*: "
    "that divided by the length penalty, by which the translations of a line are ranked; *tokens*: words and pieces "
    "of words, the end of sentence counted."
)
CSS = "#table td, #table td * { overflow-wrap: anywhere; font-family: inherit; }"

# By the source language that a model's record names.
EXAMPLES = {
    "en": [
        "A man in a blue shirt is standing on a ladder.",
        "Two dogs are playing in the snow.",
        "The train leaves at 7:45 PM.",
    ],
    "de": [
        "Ein Mann in einem blauen Hemd steht auf einer Leiter.",
        "Zwei Hunde spielen im Schnee.",
        "Der Zug fährt um 19:45 Uhr ab.",
    ],
    "fr": [
        "Un homme en chemise bleue est debout sur une échelle.",
        "Deux chiens jouent dans la neige.",
        "Le train part à 19 h 45.",
    ],
}


@dataclass
class ServedModel:
    """A model that a page offers.

    Args:
        name: What the page calls it.
        model: A sequence-to-sequence model of transformers.
        tokenizer: Its tokenizer.
        languages: What it translates, such as "en to de"; "" where that is not known.
        examples: Texts for the page to offer.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    languages: str = ""
    examples: Sequence[str] = ()
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def num_beams(self) -> int:
        """Beams of the model's own settings."""
        settings: Any = self.model.generation_config
        return min(int(settings.num_beams or 1), MOST_BEAMS)

    @property
    def limit(self) -> int | None:
        """Most tokens of a line, end of sentence included; None where there is no limit."""
        limits = [each for each in (token_limit(self.tokenizer), position_limit(self.model)) if each is not None]
        return min(limits, default=None)


def open_served_model(name: str, **options: Any) -> ServedModel:
    """Opens a model for the page, with languages and examples by the record of its training where it has one.

    Args:
        name: A folder, or a name on the Hub.
        options: Arguments of `translation.load_translator`.

    Raises:
        OSError, ValueError: See `load_translator`.
    """
    model, tokenizer = load_translator(name, **options)
    record: dict[str, Any] = {}
    path = Path(name) / "training_run.json"
    if path.is_file():
        with contextlib.suppress(ValueError):  # it is for readers; without it the model works as well
            record = json.loads(path.read_text(encoding="utf-8"))
    source, target = record.get("source_lang"), record.get("target_lang")
    label = os.path.basename(os.path.abspath(name)) if os.path.isdir(name) else name
    languages = f"{source} to {target}" if source and target else ""
    return ServedModel(label, model, tokenizer, languages, EXAMPLES.get(str(source), ()))


# ---------------------------------------------------------------------------------------------------------------------
# What the page does, without a page
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Translated:
    """One hypothesis of one line of the text box.

    Attributes:
        line: Number of the line, from 1.
        rank: 1 for the best of the line.
        source: The line.
        hypothesis: Its translation, with scores.
    """

    line: int
    rank: int
    source: str
    hypothesis: Hypothesis

    def row(self) -> list[Any]:
        """The table's row; see `COLUMNS`."""
        found = self.hypothesis
        numbers = [None if each is None else round(each, 3) for each in (found.score, found.log_prob)]
        return [self.line, self.rank, *numbers, len(found.token_ids), found.text]

    def label(self, longest: int = 90) -> str:
        """What the list of translations to look at calls it."""
        text = self.hypothesis.text
        text = text if len(text) <= longest else f"{text[:longest]} ..."
        return f"line {self.line}, rank {self.rank}: {text}"


def lines_of(text: str) -> list[str]:
    r"""The lines of a text box: a line ends at ``\n``, and the last one without it."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def translate_text(served: ServedModel, text: str, num_beams: int, n_best: int) -> list[list[Translated]]:
    """Translates what was typed; item i of the result belongs to line i.

    Args:
        served: The model.
        text: Any number of lines up to `MOST_LINES`.
        num_beams: Beams of the search; 1 is greedy.
        n_best: Hypotheses of each line.

    Returns:
        One list a line, best hypothesis first; one that is empty for a blank line.

    Raises:
        ValueError: No text, more of it than the page takes, a line of more tokens than the model takes, fewer beams
            than hypotheses, or what `translate_lines` raises.
    """
    if not text.strip():
        raise ValueError("There is nothing to translate: type a sentence, or several, one on each line.")
    lines = lines_of(text)
    if len(lines) > MOST_LINES or len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"The text has {counted(len(lines), 'line')} and {len(text):,} characters; at most {MOST_LINES:,} lines "
            f"and {MOST_CHARACTERS:,} characters are translated here. More lines go through the tab File; a line that "
            "is longer than the model takes is to be broken into sentences, one on each line."
        )
    check_beams(num_beams)
    if n_best > num_beams:
        raise ValueError(f"{n_best} translations of a line need as many beams, but there are {num_beams}.")
    for number, tokens in too_long(served, lines, 1):
        raise ValueError(
            f"Line {number} has {tokens:,} tokens, more than the {served.limit:,} that this model takes: break it "
            "into sentences, one on each line."
        )
    results: list[list[Translated]] = []
    answers = translated(served, lines, "the text", num_beams, num_return_sequences=n_best, scores=True)
    for number, (source, hypotheses) in enumerate(zip(lines, answers, strict=True), 1):
        ranked = enumerate(hypotheses if source.strip() else [], 1)
        results.append([Translated(number, rank, source, hypothesis) for rank, hypothesis in ranked])
    return results


def counted(number: int, what: str) -> str:
    """A number of things in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def whole(value: Any, what: str) -> int:
    """A number of the page's, which its sliders let one type as a fraction.

    Raises:
        ValueError: It is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError(f"The {what} must be a whole number, got {value!r}.")
    return int(value)


def check_beams(num_beams: int) -> None:
    """Refuses what the page's slider does not give, and who asks without the page could."""
    if not 1 <= num_beams <= MOST_BEAMS:
        raise ValueError(f"There are from 1 to {MOST_BEAMS} beams here, got {num_beams}.")


def translated(
    served: ServedModel, lines: Sequence[str], name: str, num_beams: int, **options: Any
) -> Iterator[list[Hypothesis]]:
    """`translate_lines`, in parts between which others may use the model."""
    for start in range(0, len(lines), LINES_AT_ONCE):
        part = lines[start : start + LINES_AT_ONCE]
        with served.lock:
            answers = list(
                translate_lines(
                    served.model,
                    served.tokenizer,
                    part,
                    first_line=start + 1,
                    name=name,
                    num_beams=num_beams,
                    **options,
                )
            )
        yield from answers


def too_long(served: ServedModel, lines: Sequence[str], first_line: int) -> Iterator[tuple[int, int]]:
    """Number and tokens of each line that the model would cut."""
    visible = [(number, line) for number, line in enumerate(lines, first_line) if line.strip()]
    numbers, texts = [number for number, _ in visible], [line for _, line in visible]
    rows = encode_lines(served.tokenizer, texts, numbers, name="the text", cut=False)
    if served.limit is not None:
        yield from ((number, len(row)) for number, row in zip(numbers, rows, strict=True) if len(row) > served.limit)


def translate_file(
    served: ServedModel, path: str, output: str, num_beams: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Translates a file into another; line i of the one belongs to line i of the other.

    Args:
        served: The model.
        path: UTF-8 text.
        output: The file to write.
        num_beams: Beams of the search.

    Returns:
        An iterator that does the work and tells of it: lines done, lines in all, and the numbers of those that were
        longer than the model takes and were cut. `output` is whole when it ends.

    Raises:
        ValueError: The file is compressed, has nothing to translate, or has bytes that are not UTF-8 (its name and the
            line are named).
    """
    check_beams(num_beams)
    name = os.path.basename(path)
    if name.lower().endswith(".gz"):
        raise ValueError(f"{name} is compressed: unpack it first, this page takes plain text.")
    try:
        lines = list(read_lines(path))  # all of it first, so that what is wrong in it is known before any work
    except ValueError as error:
        raise ValueError(str(error).replace(path, name)) from None
    if not any(line.strip() for line in lines):
        raise ValueError(f"{name} has nothing to translate: expected text, one sentence on each line.")
    cut: list[int] = []
    answers = translated(served, lines, name, num_beams)
    with open(output, "w", encoding="utf-8", newline="\n") as file:
        for start in range(0, len(lines), LINES_AT_ONCE):
            part = lines[start : start + LINES_AT_ONCE]
            yield start, len(lines), cut
            cut.extend(number for number, _ in too_long(served, part, start + 1))
            file.writelines(f"{next(answers)[0].text}\n" for _ in part)
    yield len(lines), len(lines), cut


def attention_html(served: ServedModel, source: str, target: str) -> str:
    """What a translation looked at, as HTML to stand in the page.

    It is a frame of its own, which can reach nothing of the page around it; whatever the texts hold stays text.

    Args:
        served: The model.
        source: The sentence.
        target: The translation.

    Raises:
        ValueError: See `visualization.all_attentions_of` and `attention_page`.
    """
    with served.lock:
        attentions = all_attentions_of(served.model, served.tokenizer, source, target)
    page = attention_page([attentions])
    # As an attribute, and without what templates of the page would read.
    escaped = html.escape(page)
    for character in "$`{}\\":
        escaped = escaped.replace(character, f"&#{ord(character)};")
    return (
        # Lazy, so that it is made where it has its size already, which it draws by.
        '<iframe title="attention" loading="lazy" sandbox="allow-scripts" '
        f'style="width:100%;height:{ATTENTION_PIXELS}px;border:0" srcdoc="{escaped}"></iframe>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def import_gradio() -> ModuleType:
    """Gradio, which reports to nobody.

    Raises:
        ImportError: It is not installed; the message names the extra.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise ImportError(
            f'the page needs gradio ({error}); install it with pip install "vanilla-transformer[serve]"'
        ) from error
    return gradio


@contextlib.contextmanager
def told_on_the_page(gradio: ModuleType) -> Iterator[None]:
    """Turns errors into a message on the page, as text."""
    try:
        yield
    except gradio.Error:
        raise
    except Exception as error:
        expected = isinstance(error, (ValueError, OSError, ImportError, MemoryError))
        if not expected:
            logger.exception("an error while answering the page")
        message = str(error) if expected else "Something went wrong in the program; its log tells more."
        # The box shows HTML.
        text = html.escape(message or type(error).__name__)
        raise gradio.Error(text, duration=60, print_exception=False) from error


def translation_page(models: Sequence[ServedModel]) -> Any:
    """Builds the page.

    Args:
        models: At least one, each with a name of its own; the first one is chosen at first.

    Returns:
        A `gradio.Blocks`, for `open_page`.

    Raises:
        ImportError: Gradio is not installed.
        ValueError: No model, or two of the same name.
    """
    gr: Any = import_gradio()
    by_name = {served.name: served for served in models}
    if not models:
        raise ValueError("the page needs at least one model, got none.")
    if len(by_name) < len(models):
        raise ValueError(f"each model needs a name of its own, got {', '.join(each.name for each in models)}.")
    first = models[0]
    progress_bar = gr.Progress()  # the default of an argument, by which Gradio knows whose it is

    def served_by(name: str) -> ServedModel:
        if name not in by_name:
            raise ValueError(f"There is no model {name!r} here; choose one of {', '.join(by_name)}.")
        return by_name[name]

    def on_model(name: str) -> Any:
        with told_on_the_page(gr):
            return served_by(name).num_beams

    def on_translate(name: str, text: str, num_beams: float, n_best: float) -> tuple[Any, ...]:
        with told_on_the_page(gr):
            numbers = whole(num_beams, "beams"), whole(n_best, "translations of each line")
            results = translate_text(served_by(name), text or "", *numbers)
            best = "\n".join(ranked[0].hypothesis.text if ranked else "" for ranked in results)
            shown = [each for ranked in results for each in ranked]
            choices = [(each.label(), index) for index, each in enumerate(shown)]
            held = (name, [(each.source, each.hypothesis.text) for each in shown])
            return best, [each.row() for each in shown], gr.Dropdown(choices=choices, value=0, interactive=True), held

    def cleared() -> tuple[Any, ...]:
        """What stands there before a translation, so that none of an earlier text stays beside an error."""
        return "", None, gr.Dropdown(choices=[], value=None, interactive=False), None, ""

    def on_attention(held: tuple[str, list[tuple[str, str]]] | None, index: int | None) -> str:
        with told_on_the_page(gr):
            if held is None or index is None:
                return ""
            name, pairs = held
            source, target = pairs[int(index)]
            if not target.strip():
                return "<p>The translation is empty: there is no attention to show.</p>"
            return attention_html(served_by(name), source, target)

    def on_file(name: str, path: str | None, num_beams: float, progress: Any = progress_bar) -> Iterator[Any]:
        with told_on_the_page(gr):
            if not path:
                raise ValueError("There is no file: choose one, of UTF-8 text, one sentence on each line.")
            stem = os.path.splitext(os.path.basename(path))[0]
            started = time.monotonic()
            total = 0
            cut: list[int] = []
            with tempfile.TemporaryDirectory(prefix="translation_") as folder:
                output = os.path.join(folder, f"{stem}.translated.txt")
                steps = translate_file(served_by(name), path, output, whole(num_beams, "beams"))
                for done, total, cut in steps:  # noqa: B007
                    progress((done, total), unit="lines")
                    yield None, f"{done:,} of {total:,} lines"
                told = f"{counted(total, 'line')} in {time.monotonic() - started:.1f} s"
                if cut:
                    told += f"; cut, being longer than the model takes: {numbered(cut)}"
                yield output, told  # of which the page takes a copy

    with gr.Blocks(
        title="vanilla-transformer", analytics_enabled=False, delete_cache=(600, SECONDS_FILES_ARE_KEPT)
    ) as page:
        gr.Markdown("# Translate")
        with gr.Row():
            model = gr.Dropdown(
                [(f"{each.name} ({each.languages})" if each.languages else each.name, each.name) for each in models],
                value=first.name,
                label="model",
                elem_id="model",
                interactive=len(models) > 1,
            )
            num_beams = gr.Slider(1, MOST_BEAMS, first.num_beams, step=1, label="beams", elem_id="num_beams")
            n_best = gr.Slider(1, MOST_BEAMS, 1, step=1, label="translations of each line", elem_id="n_best")
        held = gr.State(None)
        with gr.Tab("Text"):
            with gr.Row():
                source = gr.Textbox(
                    label="text, one sentence on each line", lines=6, max_lines=16, elem_id="source", autofocus=True
                )
                target = gr.Textbox(
                    label="translation, line by line",
                    lines=6,
                    max_lines=16,
                    elem_id="target",
                    interactive=False,
                    buttons=["copy"],
                )
            button = gr.Button("Translate", variant="primary", elem_id="translate")
            examples = list(dict.fromkeys(text for each in models for text in each.examples))
            if examples:
                offered = gr.Examples(
                    examples, source, label="examples", cache_examples=False, api_visibility="private"
                )
            table = gr.Dataframe(
                headers=COLUMNS,
                datatype=["number", "number", "number", "number", "number", "str"],
                label="translations and scores",
                interactive=False,
                wrap=True,
                column_widths=["6%", "6%", "9%", "14%", "8%", "57%"],
                elem_id="table",
            )
            gr.Markdown(MEANINGS)
            line = gr.Dropdown([], label="attention of", elem_id="line", interactive=False)
            attention = gr.HTML("", elem_id="attention")
        with gr.Tab("File"):
            gr.Markdown("Of each line the best translation is written; blank lines stay blank.")
            given = gr.File(label="UTF-8 text, one sentence on each line", elem_id="given", type="filepath")
            with gr.Row():
                file_button = gr.Button("Translate the file", variant="primary", elem_id="translate_file")
                stop = gr.Button("Stop", elem_id="stop")
            state = gr.Textbox(label="progress", interactive=False, elem_id="state")
            result = gr.File(label="translation", interactive=False, elem_id="result")

        model.input(on_model, model, num_beams, api_visibility="private")
        inputs, outputs = [model, source, num_beams, n_best], [target, table, line, held]
        emptied: dict[str, Any] = {"fn": cleared, "outputs": [*outputs, attention], "api_visibility": "private"}
        if examples:
            offered.dataset.click(**emptied)
        clearing = button.click(**emptied, queue=False)
        translating = clearing.then(
            on_translate, inputs, outputs, concurrency_limit=USERS_AT_ONCE, api_name="translate"
        )
        look: dict[str, Any] = {
            "fn": on_attention,
            "inputs": [held, line],
            "outputs": attention,
            "concurrency_limit": USERS_AT_ONCE,
            "api_visibility": "private",
        }
        translating.success(**look)
        line.input(**look)
        working = file_button.click(
            on_file,
            [model, given, num_beams],
            [result, state],
            concurrency_limit=USERS_AT_ONCE,
            api_visibility="private",
        )
        stop.click(lambda: "stopped", None, state, cancels=[working], api_visibility="private")
        # Another file ends the work on the one before, and takes away what was said of it.
        given.change(lambda: (None, ""), None, [result, state], cancels=[working], api_visibility="private")
    return page


def numbered(lines: Sequence[int], most: int = 10) -> str:
    """Numbers of lines in words, the first of many."""
    more = f" and {len(lines) - most:,} more" if len(lines) > most else ""
    word = "line" if len(lines) == 1 else "lines"
    return f"{word} {', '.join(f'{number:,}' for number in lines[:most])}{more}"


def open_page(page: Any, *, host: str = "127.0.0.1", port: int = 7860) -> str:
    """Lets a page of `translation_page` listen, and returns at once; `page.close()` ends it.

    Args:
        page: The page.
        host: Address to listen at; the default is this machine alone.
        port: From 1 to 65535.

    Returns:
        The address to open in a browser.

    Raises:
        OSError: The address is in use, or none of this machine's.
    """
    gr: Any = import_gradio()
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen at {host}, port {port}: {reason}; choose another port or host.") from None
    page.queue(max_size=64)
    page.launch(
        server_name=host,
        server_port=port,
        share=False,
        inbrowser=False,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        max_file_size=LARGEST_FILE,
        footer_links=[],
        css=CSS,
        # Letters of the reader's own machine.
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )
    return f"http://{host}:{port}/"


def serve(
    models: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    **options: Any,
) -> None:
    """Opens models and serves the page until the process is told to end.

    Args:
        models: Folders, or names on the Hub.
        names: What the page calls them; None means by their folders.
        host: Address to listen at; the default is this machine alone.
        port: From 1 to 65535.
        options: Arguments of `translation.load_translator`, for each model.

    Raises:
        ImportError: Gradio is not installed.
        OSError, ValueError: See `load_translator` and `open_page`.
    """
    import_gradio()  # before models are opened, which takes longer
    served = [open_served_model(name, **options) for name in models]
    labels = [each.name for each in served]
    for each, name in zip(served, names or models, strict=True):
        if names or labels.count(each.name) > 1:
            each.name = name
    page = translation_page(served)
    address = open_page(page, host=host, port=port)
    print(f"listening at {address} (Ctrl-C ends it)", flush=True)  # noqa: T201
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)

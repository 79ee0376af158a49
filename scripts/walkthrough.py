"""Follows one sentence from text to translation and writes a page with every tensor's shape, as they were met.

    python scripts/walkthrough.py --model runs/en-de --text "Two dogs are playing." --output walkthrough.md

Without --model, a small one is made on the way and learns a few sentences by heart, in seconds: docs/walkthrough.md is
of it, and comes from `python scripts/walkthrough.py --output docs/walkthrough.md`.
"""

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vanilla_transformer_cli import OneLineParser, exit_code_of, model_name, output_file, while_read


TEXT = "three blue hats"
COMMAND = "python scripts/walkthrough.py"
# Every sentence of the small model's language.
NUMBERS = [("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf")]
COLOURS = [("red", "rote"), ("blue", "blaue"), ("green", "grüne")]
THINGS = [("hats", "Hüte"), ("dogs", "Hunde"), ("chairs", "Stühle"), ("books", "Bücher")]
SMALL = {"d_model": 32, "d_ff": 64, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}


def small_translator(updates: int = 300) -> tuple[Any, Any]:
    """A model that knows the sentences above by heart, and its tokenizer."""
    import torch

    from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
    from vanilla_transformer.tokenization import train_tokenizer

    pairs = [
        tuple(" ".join(words) for words in zip(*choice, strict=True))
        for choice in itertools.product(NUMBERS, COLOURS, THINGS)
    ]
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    tokenizer = train_tokenizer(sources + targets, 330)
    torch.manual_seed(0)
    config = VanillaTransformerConfig(vocab_size=len(tokenizer), **SMALL)
    model = VanillaTransformerForConditionalGeneration(config)
    batch = tokenizer(sources, return_tensors="pt", padding=True)
    labels = tokenizer(targets, return_tensors="pt", padding=True)["input_ids"]
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / updates))
    for _ in range(updates):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Watching the model
# ---------------------------------------------------------------------------------------------------------------------


class Shapes:
    """Shapes of what went into and came out of each module, and of each attention, in a forward pass."""

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.attentions: list[dict[str, tuple[int, ...]]] = []

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Writes down what happens inside; the model and its module are afterwards as they were."""
        import torch

        module = sys.modules[type(model).__module__]
        attention = module.scaled_dot_product_attention  # type: ignore[attr-defined]

        def watched(query: Any, key: Any, value: Any, mask: Any, dropout_p: float = 0.0) -> Any:
            heads, weights = attention(query, key, value, mask, dropout_p)
            named = {"Q": query, "K": key, "V": value, "Q K^T": query @ key.mT, "weights": weights, "heads": heads}
            self.attentions.append({name: tuple(tensor.shape) for name, tensor in named.items()})
            self.attentions[-1]["mask"] = () if mask is None else tuple(mask.shape)
            return heads, weights

        def hook(name: str) -> Any:
            def write(_: Any, inputs: Any, output: Any) -> None:
                found = output[0] if isinstance(output, tuple) else output
                for table, tensor in ((self.inputs, inputs[0] if inputs else None), (self.outputs, found)):
                    if isinstance(tensor, torch.Tensor):
                        table[name] = tuple(tensor.shape)

            return write

        handles = [part.register_forward_hook(hook(name)) for name, part in model.named_modules()]
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        module.scaled_dot_product_attention = watched  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
            model.set_attn_implementation(before)
            for handle in handles:
                handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def shape(sizes: Sequence[int]) -> str:
    """A shape as PyTorch prints it."""
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str) -> str:
    """Any text as code in a table's cell."""
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    fence = "`" * (1 + max((len(each) for each in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def attention_rows(found: dict[str, tuple[int, ...]], asks: str, answers: str) -> list[list[str]]:
    """Rows of one attention, from its heads to its weights."""
    return [
        ["Q, in heads", shape(found["Q"]), f"batch, heads, {asks}, d_k"],
        ["K, in heads", shape(found["K"]), f"batch, heads, {answers}, d_k"],
        ["V, in heads", shape(found["V"]), f"batch, heads, {answers}, d_v"],
        ["Q K^T / sqrt(d_k)", shape(found["Q K^T"]), f"batch, heads, {asks}, {answers}"],
        ["the mask", shape(found["mask"]) if found["mask"] else "none", "stretched over the scores"],
        ["softmax of them: the weights", shape(found["weights"]), f"batch, heads, {asks}, {answers}; a row sums to 1"],
        ["weights times V", shape(found["heads"]), f"batch, heads, {asks}, d_v"],
    ]


def page(model: Any, tokenizer: Any, text: str, command: str) -> str:
    """The page for one sentence.

    Args:
        model: A model of this package.
        tokenizer: Its tokenizer.
        text: What to translate.
        command: What the page names as its origin.

    Raises:
        ValueError: The text is blank, or the model is of another family, or has pruned heads.
    """
    import torch

    from vanilla_transformer.visualization import token_texts

    config = model.config
    if config.model_type != "vanilla_transformer":
        raise ValueError(f"expected a model of this package, got one of type {config.model_type!r}")
    if config.pruned_heads:
        raise ValueError("heads were taken out of this model, so that its layers differ; the page is of like layers")
    if not text.strip():
        raise ValueError("the text is blank; give --text a sentence")
    encoded = tokenizer(text, return_tensors="pt", truncation=True)
    source_ids = encoded["input_ids"]
    sequence = model.generate(**encoded)[0]  # by the model's own settings, beams and all
    translation = tokenizer.decode(sequence, skip_special_tokens=True)
    labels = sequence[1:]
    seen = Shapes()
    with torch.no_grad(), seen.watching(model):
        logits = model(input_ids=source_ids, decoder_input_ids=sequence[None, :-1], use_cache=False).logits
    probabilities = logits[0].softmax(-1).gather(1, labels[:, None])[:, 0].tolist()
    cached = model.model.decoder(
        sequence[None, :1], encoder_hidden_states=model.model.encoder(source_ids).last_hidden_state, use_cache=True
    )
    cache = getattr(cached, "cache", None) or cached.past_key_values
    keys = cache.self_attention_cache.layers[0].keys, cache.cross_attention_cache.layers[0].keys

    out, into = seen.outputs, seen.inputs
    layers = config.encoder_layers
    encoder_attention, decoder_attentions = seen.attentions[0], seen.attentions[layers:]
    d_k, d_v = config.head_dimensions
    target = len(labels)
    alike = len({str(each) for each in seen.attentions[:layers]}) == 1
    normalised = "plus x" if config.norm_first else "plus x, normalised"
    width = f"batch, source, d_model = {config.d_model}"
    target_width = f"batch, target, d_model = {config.d_model}"

    def feed_forward(name: str, length: str) -> list[list[str]]:
        first, second = (f"{name}.feed_forward.{part}" for part in FEED_FORWARD)
        return [
            ["max(0, x W_1 + b_1), equation (2)", shape(out[first]), f"batch, {length}, d_ff = {config.d_ff}"],
            ["that times W_2, plus b_2", shape(out[second]), f"batch, {length}, d_model"],
            [normalised, shape(out[f"{name}.feed_forward_norm"]), f"batch, {length}, d_model"],
        ]

    def sublayer(name: str, found: dict[str, tuple[int, ...]], asks: str, answers: str) -> list[list[str]]:
        return [
            *(
                [f"{letter} = x W^{letter}" if asks == answers else f"{letter} = {what} W^{letter}"]
                + [shape(out[f"{name}.{part}_proj"]), f"batch, {length}, heads x {size}"]
                for letter, part, length, size, what in (
                    ("Q", "q", asks, f"d_k = {config.num_heads * d_k}", "x"),
                    ("K", "k", answers, f"d_k = {config.num_heads * d_k}", "memory"),
                    ("V", "v", answers, f"d_v = {config.num_heads * d_v}", "memory"),
                )
            ),
            *attention_rows(found, asks, answers),
            ["heads side by side", shape(into[f"{name}.out_proj"]), f"batch, {asks}, heads x d_v"],
            ["times W^O", shape(out[f"{name}.out_proj"]), f"batch, {asks}, d_model"],
            [normalised, shape(out[f"{name}_norm"]), f"batch, {asks}, d_model"],
        ]

    head = ("tensor", "shape", "what its sizes are")
    encoder, decoder = "model.encoder", "model.decoder"
    first_encoder, first_decoder = f"{encoder}.layers.0", f"{decoder}.layers.0"
    rows_of_steps = [
        [str(step + 1), code(before), code(after), f"{probability:.3f}"]
        for step, (before, after, probability) in enumerate(
            zip(token_texts(tokenizer, sequence[:-1]), token_texts(tokenizer, labels), probabilities, strict=True)
        )
    ]
    parts = [
        "# One sentence from text to translation",
        f"Written by `{command}`, from the model at work: every shape below was met on the way. The sections are the "
        "paper's (Vaswani et al. 2017); the code is `src/vanilla_transformer/modeling_vanilla_transformer.py`, in the "
        "same order.",
        f"The model: {config.encoder_layers} encoder and {config.decoder_layers} decoder layers, d_model "
        f"{config.d_model}, d_ff {config.d_ff}, {config.num_heads} heads of d_k {d_k} and d_v {d_v}, "
        f"{config.vocab_size:,} words, {model.num_parameters():,} parameters. Nothing is padded, for there is one "
        "sentence; with more of them, batch is their number, and source and target are the longest one's tokens.",
        "## 1. Text to tokens (section 5.1)",
        f"{code(text)} is cut into pieces of the vocabulary that both languages share; the end of sentence, "
        f"{code(str(tokenizer.eos_token))}, closes it. A space belongs to the word after it.",
        table(
            ("position", "token", "id"),
            (
                [str(place), code(piece), str(int(number))]
                for place, (piece, number) in enumerate(
                    zip(token_texts(tokenizer, source_ids[0]), source_ids[0], strict=True)
                )
            ),
        ),
        f"`input_ids` has the shape {shape(source_ids.shape)}: batch, source.",
        "## 2. Tokens to vectors (sections 3.4 and 3.5)",
        table(
            head,
            [
                ["the embedding matrix", shape(model.model.encoder.embed_tokens.weight.shape), "vocabulary, d_model"],
                ["a row for each token", shape(out[f"{encoder}.embed_tokens"]), width],
                ["times sqrt(d_model)", shape(out[f"{encoder}.embed_tokens"]), "the same"],
                ["positions", shape(out[f"{encoder}.positions"]), "one row for each position, added"],
                ["x, the encoder's input", shape(into[first_encoder]), width],
            ],
        ),
        "## 3. The encoder (sections 3.1 to 3.3)",
        f"{'Each' if alike else 'The first'} of the {layers} layers has these shapes; each takes what the one before "
        f"gave.{norm_first_in_words(config)} First attention of each "
        "source token to all of them, equation (1), then the feed-forward network for each token by itself.",
        table(
            head,
            [
                *sublayer(f"{first_encoder}.self_attention", encoder_attention, "source", "source"),
                *feed_forward(first_encoder, "source"),
            ],
        ),
        f"What the last layer gives, {shape(out[f'{encoder}.norm'])}, is the memory: the decoder looks at it at every "
        "step, and it is computed once.",
        "## 4. The decoder (sections 3.1 to 3.3)",
        f"It reads the start token and the {target - 1} target tokens written so far, and says at each place what "
        f"comes next: {shape(sequence[None, :-1].shape)}, batch and target. Here all steps are computed at once, as "
        "in training; the mask hides what is later. Attention of the target to itself:",
        table(
            head,
            [
                ["x, the decoder's input", shape(into[first_decoder]), target_width],
                *sublayer(f"{first_decoder}.self_attention", decoder_attentions[0], "target", "target"),
            ],
        ),
        "The mask has True where a token may look: row i, its own place and those before it.",
        "```text\n"
        + "\n".join(" ".join("1" if column <= row else "." for column in range(target)) for row in range(target))
        + "\n```",
        "Then attention of the target to the memory, section 3.2.3, where the sentence comes in, and the feed-forward "
        "network:",
        table(
            head,
            [
                *sublayer(f"{first_decoder}.cross_attention", decoder_attentions[1], "target", "source"),
                *feed_forward(first_decoder, "target"),
            ],
        ),
        "## 5. Vectors to words (section 3.4)",
        "The matrix is that of the embeddings"
        + (":" if config.tie_word_embeddings else ", in the paper; here it is one of its own:"),
        table(
            head,
            [
                ["the decoder's output", shape(into["lm_head"]), target_width],
                ["times the matrix: logits", shape(out["lm_head"]), "batch, target, vocabulary"],
                ["softmax: probabilities", shape(logits.shape), "the same; a row sums to 1"],
            ],
        ),
        "What the decoder had read last, what it wrote next, and how probable that was to it:",
        table(("step", "read", "written", "probability"), rows_of_steps),
        *(
            [f"Label smoothing of {config.label_smoothing:g} in training keeps that away from 1."]
            if config.label_smoothing
            else []
        ),
        "## 6. One token at a time (section 6.1)",
        "`generate()` does not know the translation beforehand. It calls the decoder once for each token, with the "
        f"newest token alone, and keeps keys and values: after the first step {shape(keys[0].shape)} of the target in "
        "each layer (batch, heads, target so far, d_k), which grow by one a step and hypothesis, and "
        f"{shape(keys[1].shape)} of the memory, which stay. "
        f"{beams_in_words(model.generation_config)} It ends at {code(str(tokenizer.eos_token))}, and the ids become "
        "text:",
        f"> {code(translation)}",
    ]
    return "\n\n".join(parts) + "\n"


def norm_first_in_words(config: Any) -> str:
    """Where a model departs from the paper in the order of things."""
    return " This model normalises x before each sub-layer, unlike the paper." if config.norm_first else ""


def beams_in_words(settings: Any) -> str:
    """How the search goes."""
    beams = settings.num_beams or 1
    if beams == 1:
        return "Of each step's words it takes the most probable."
    return (
        f"It follows {beams} translations at a time, the beams, and takes the one of the highest score: "
        "log-probability divided by the length penalty."
    )


FEED_FORWARD = ("fc1", "fc2")


def main(argv: list[str] | None = None) -> int:
    """Runs the script; the exit code is 2 for a user's mistake, told on one line."""
    parser = OneLineParser(prog="walkthrough.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=model_name, metavar="M", default=argparse.SUPPRESS, help="folder, or name on the Hub"
    )
    parser.add_argument("--text", metavar="TEXT", default=TEXT, help="the sentence")
    parser.add_argument("--output", required=True, type=output_file, metavar="F", help="- is standard output")
    return exit_code_of(parser.prog, functools.partial(run, vars(parser.parse_args(argv))))


def run(given: dict[str, Any]) -> None:
    """Writes the page."""
    from vanilla_transformer.translation import load_translator, open_output

    model, tokenizer = load_translator(given["model"], device="cpu") if "model" in given else small_translator()
    written = page(model, tokenizer, given["text"], COMMAND)
    with open_output(given["output"]) as file:
        file.write(written)
    if given["output"] != "-":
        print(f"saved to {given['output']}")


if __name__ == "__main__":
    sys.exit(while_read(main))

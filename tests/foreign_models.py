"""Translation models as other toolkits write them, in plain PyTorch, and plain searches over any of them.

Each model is written from the description of that toolkit's architecture and carries its names of weights. It sees one
unpadded sentence at a time: `model(source, target)` takes two lists of ids in the toolkit's own vocabularies and gives
the logits after each target word, shape `(len(target), words of the target)`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vanilla_transformer_cli as cli
from small_models import padded, randomise
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


SPECIAL = ["<unk>", "<pad>", "<bos>", "<eos>"]
SOURCE_WORDS = [*SPECIAL, "the", "red", "train", "leaves", "at", "seven", "in", "rain", "12", "Haus", "im"]
TARGET_WORDS = [
    *SPECIAL,
    "im",
    "Haus",
    "rote",
    "Zug",
    "fährt",
    "um",
    "sieben",
    "ab",
    "12",
    "Regen",
    "der",
    "die",
    "das",
]
TARGET_WORDS += ["und", "nicht"]


def paper_table(length: int, d_model: int) -> torch.Tensor:
    """The paper's sinusoids (section 3.5) in single precision, as courses write them."""
    wavelengths = torch.exp(-torch.arange(0, d_model, 2) * math.log(10000) / d_model)
    angles = torch.arange(length).reshape(-1, 1) * wavelengths
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class AroundTorch(nn.Module):
    """Embeddings, `torch.nn.Transformer` and a linear layer."""

    def __init__(
        self,
        source_words: int = len(SOURCE_WORDS),
        target_words: int = len(TARGET_WORDS),
        d_model: int = 16,
        *,
        positions: str = "buffer",
        scale: float | None = None,
        shared: bool = False,
        tied: bool = False,
        final_norm: bool = True,
        output_bias: bool = True,
        seed: int = 0,
        **options,
    ):
        super().__init__()
        self.transformer = nn.Transformer(
            d_model, 4, 2, 3, dim_feedforward=24, dropout=0.1, batch_first=True, **options
        )
        if not final_norm:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.source = nn.Embedding(source_words, d_model)
        self.target = self.source if shared else nn.Embedding(target_words, d_model)
        self.out = nn.Linear(d_model, target_words, bias=output_bias)
        if tied:
            self.out.weight = self.target.weight
        self.scale = math.sqrt(d_model) if scale is None else scale
        if positions == "learned":
            self.source_table = nn.Parameter(torch.zeros(40, d_model))
            self.target_table = nn.Parameter(torch.zeros(1, 30, d_model))
        elif positions == "buffer":
            self.register_buffer("table", paper_table(50, d_model).unsqueeze(1))
        self.positions = positions
        self.eval()
        randomise(self, seed=seed)
        let_vary(self, "multihead_attn.out_proj", ("out_proj", "linear2"), ("source.weight", "target.weight"))
        if output_bias:
            with torch.no_grad():
                self.out.bias[SPECIAL.index("<eos>")] += 2

    def embed(self, ids: Sequence[int], embedding: nn.Embedding, side: str) -> torch.Tensor:
        if self.positions == "learned":
            table = getattr(self, f"{side}_table").reshape(-1, embedding.embedding_dim)
        else:
            table = paper_table(50, embedding.embedding_dim)
        x = embedding(torch.tensor([ids])) * self.scale
        return x + table[: len(ids)].to(x.dtype)

    def forward(self, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
        causal = torch.ones(len(target), len(target), dtype=torch.bool).triu(1)
        states = self.transformer(
            self.embed(source, self.source, "source"), self.embed(target, self.target, "target"), tgt_mask=causal
        )
        return self.out(states)[0]


def let_vary(model: nn.Module, cross: str, inner: tuple[str, ...], embeddings: tuple[str, ...]) -> None:
    """Scales random weights so that translations depend on the source and end at different lengths.

    Args:
        model: Any, with random weights.
        cross: What the names of the output matrices of attention to the encoder have in them.
        inner: What those of the other sub-layers' output matrices have in them.
        embeddings: Names of the word embeddings.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "b_2")):
                parameter *= 0.1
            elif cross in name:
                parameter *= 4
            elif any(part in name for part in inner):
                parameter *= 0.3
            elif name in embeddings:
                parameter *= 3


# --- Searches -------------------------------------------------------------------------------------------------------

NextLogProbs = Callable[[list[int]], list[float]]


def log_probs_after(model: nn.Module, source: Sequence[int]) -> NextLogProbs:
    """log P(word | source, prefix) for each word, computed anew for each prefix."""

    def after(prefix: list[int]) -> list[float]:
        with torch.no_grad():
            return torch.log_softmax(model(source, prefix)[-1].double(), dim=-1).tolist()

    return after


@dataclass(frozen=True)
class Rules:
    """What a search may choose: words of the original by id.

    Attributes:
        start, end: First input, and end of sentence.
        limit: Most words, the end of sentence counted.
        never: Words that are never chosen.
        at_once: Whether the first word may be the end of sentence.
    """

    start: int
    end: int
    limit: int = 8
    never: Sequence[int] = ()
    at_once: bool = True

    def allows(self, word: int, step: int) -> bool:
        """Whether a word may stand at a step, counted from 0."""
        return word not in self.never and (self.at_once or step > 0 or word != self.end)


def greedy(after: NextLogProbs, rules: Rules) -> list[int]:
    """The likeliest word each time, up to the end of sentence or the limit."""
    words = [rules.start]
    for step in range(rules.limit):
        known = after(words)
        words.append(max((word for word in range(len(known)) if rules.allows(word, step)), key=known.__getitem__))
        if words[-1] == rules.end:
            break
    return words[1:]


def beam(after: NextLogProbs, rules: Rules, beams: int = 4) -> list[int]:
    """Beam search that ranks by log-probability alone, to the last step, without stopping early."""
    running: list[tuple[float, list[int]]] = [(0.0, [rules.start])]
    finished: list[tuple[float, list[int]]] = []
    for step in range(rules.limit):
        candidates = [
            (score + log_prob, [*words, word])
            for score, words in running
            for word, log_prob in enumerate(after(words))
            if rules.allows(word, step)
        ]
        best = sorted(candidates, reverse=True)[: 2 * beams]
        finished += [each for each in best[:beams] if each[1][-1] == rules.end]
        running = [each for each in best if each[1][-1] != rules.end][:beams]
    return max(finished + running)[1][1:]


# --- Comparisons ----------------------------------------------------------------------------------------------------


def assert_equal_logits(
    theirs: nn.Module,
    ours: VanillaTransformerForConditionalGeneration,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    sources: list[list[int]],
    targets: list[list[int]],
    tolerance: float = 1e-5,
) -> None:
    """Equal logits for the target's words in one padded batch, and no probability for other words.

    Args:
        theirs: The original.
        ours: Its conversion.
        source_ids: Our id of each of its source words.
        target_ids: Our id of each of its target words.
        sources: Rows of its ids.
        targets: Rows of its ids, which begin with its start and are equally long.
        tolerance: Of the largest logit.
    """
    input_ids, mask = padded([[source_ids[word] for word in row] for row in sources], pad=ours.config.pad_token_id)
    decoder_input_ids = torch.tensor([[target_ids[word] for word in row] for row in targets])
    with torch.no_grad():
        found = ours(input_ids, attention_mask=mask, decoder_input_ids=decoder_input_ids).logits
        expected = torch.stack([theirs(*pair) for pair in zip(sources, targets, strict=True)])
    assert expected.std() > 0.5
    torch.testing.assert_close(
        found[..., list(target_ids)], expected, rtol=0, atol=tolerance * expected.abs().max().item()
    )
    others = sorted(set(range(found.shape[-1])) - set(target_ids))
    assert torch.softmax(found, dim=-1)[..., others].sum() == 0


def assert_equal_searches(
    theirs: nn.Module,
    ours: VanillaTransformerForConditionalGeneration,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    sources: list[list[int]],
    rules: Rules,
) -> None:
    """Equal greedy translations, and equal ones with four beams and no length penalty, in one padded batch.

    What the rules forbid, our model's own settings of generation must forbid.
    """
    input_ids, mask = padded([[source_ids[word] for word in row] for row in sources], pad=ours.config.pad_token_id)
    outcomes = []
    for beams in (1, 4):
        settings: dict[str, Any] = {"num_beams": beams, "max_new_tokens": rules.limit, "length_penalty_type": "hub"}
        settings["length_penalty"] = 1.0 if beams == 1 else 0.0
        settings["early_stopping"] = False if beams == 1 else "never"
        found = ours.generate(input_ids, attention_mask=mask, **settings).tolist()
        for source, row in zip(sources, found, strict=True):
            after = log_probs_after(theirs, source)
            words = greedy(after, rules) if beams == 1 else beam(after, rules)
            expected = [target_ids[word] for word in words]
            assert row[1 : 1 + len(expected)] == expected, beams
            assert set(row[1 + len(expected) :]) <= {ours.config.pad_token_id}
            outcomes.append(tuple(expected))
    assert len(set(outcomes)) > len(sources) // 2  # they do depend on the source
    assert len({len(row) for row in outcomes}) > 1  # and end at different lengths


def random_rows(
    lengths: Sequence[int],
    lowest: int,
    highest: int,
    *,
    first: Sequence[int] = (),
    last: Sequence[int] = (),
    seed: int = 1,
):
    """Rows of random ids in [lowest, highest), framed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [*first, *torch.randint(lowest, highest, (length,), generator=generator).tolist(), *last] for length in lengths
    ]


# --- Mistakes -------------------------------------------------------------------------------------------------------


def assert_refused(capsys: pytest.CaptureFixture, format: str, model: Path, output: Path, reason: str) -> None:
    """The command ends with code 2 and one line on stderr that has the reason, and leaves nothing behind."""
    before = sorted(output.parent.iterdir())
    capsys.readouterr()
    code = cli.main(["convert", "--from", format, "--model", str(model), "--output_dir", str(output)])
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith("vanilla-transformer convert: error: ")
    assert reason in err, err
    assert "weights_only" not in err  # torch's own advice is to open the file with its code
    assert sorted(output.parent.iterdir()) == before


class Planted:
    """An object whose pickle makes a file when it is unpickled by other means than weights_only."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


def assert_hostile_files_are_refused(
    capsys: pytest.CaptureFixture, format: str, folder: Path, weights: str, save: Callable[[Any, Path], None]
) -> None:
    """A truncated file, one of other bytes, one with code, and what is no dictionary: one line each, and no trace.

    Args:
        capsys: Of the test.
        format: The format's name.
        folder: A model that can be converted.
        weights: Its file of weights, which torch.save wrote.
        save: Writes the model's file with an object planted in it.
    """
    path, output = folder / weights, folder.parent / "new"
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[: len(whole) // 2], whole[:-30], b"\x80\x02." + whole[:100], b"text"):
        path.write_bytes(content)
        assert_refused(capsys, format, folder, output, f"{weights} cannot be used")
    planted = folder.parent / "planted"
    save(Planted(planted), path)
    assert_refused(capsys, format, folder, output, "nothing in a checkpoint is run")
    assert not planted.exists()
    torch.load(path, weights_only=False)
    assert planted.exists()  # so the file would have done it
    planted.unlink()
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(path)
    assert_refused(capsys, format, folder, output, "it is a TorchScript archive")
    for nothing in ([], {}, torch.zeros(3), 7):
        torch.save(nothing, path)
        assert_refused(capsys, format, folder, output, weights)
    path.write_bytes(whole)


def write_json(path: Path, content: Any) -> None:
    """A JSON file."""
    path.write_text(json.dumps(content), encoding="utf-8")


# --- fairseq --------------------------------------------------------------------------------------------------------


class FairseqAttention(nn.Module):
    """Attention as fairseq has it: the query is scaled after its projection."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(d_model, d_model))

    def forward(self, query: torch.Tensor, states: torch.Tensor, causal: bool = False) -> torch.Tensor:
        width = query.shape[-1] // self.num_heads
        heads = []
        q, k, v = self.q_proj(query) * width**-0.5, self.k_proj(states), self.v_proj(states)
        for head in range(self.num_heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T
            if causal:
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
            heads.append(scores.softmax(dim=-1) @ v[:, part])
        return self.out_proj(torch.cat(heads, dim=-1))


class FairseqLayer(nn.Module):
    """An encoder layer, or a decoder layer."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, activation: Callable, pre_norm: bool, decoder: bool):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = FairseqAttention(d_model, num_heads), nn.LayerNorm(d_model)
        if decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = (
                FairseqAttention(d_model, num_heads),
                nn.LayerNorm(d_model),
            )
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)
        self.activation, self.pre_norm, self.decoder = activation, pre_norm, decoder

    def around(self, x: torch.Tensor, norm: nn.LayerNorm, sub_layer: Callable) -> torch.Tensor:
        return x + sub_layer(norm(x)) if self.pre_norm else norm(x + sub_layer(x))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = self.around(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, causal=self.decoder))
        if memory is not None:
            x = self.around(x, self.encoder_attn_layer_norm, lambda y: self.encoder_attn(y, memory))
        return self.around(x, self.final_layer_norm, lambda y: self.fc2(self.activation(self.fc1(y))))


class FairseqStack(nn.Module):
    """A stack with its embeddings; positions are counted from the padding's id 1, so the first token has 2."""

    def __init__(self, words: int, d_model: int, number: int, scale: float, learned: int, final: bool, **layer):
        super().__init__()
        self.embed_tokens = nn.Embedding(words, d_model)
        self.embed_positions = nn.Embedding(learned + 2, d_model) if learned else nn.Identity()
        self.layers = nn.ModuleList([FairseqLayer(d_model, **layer) for _ in range(number)])
        if final:
            self.layer_norm = nn.LayerNorm(d_model)
        self.scale, self.learned, self.final = scale, learned, final

    def forward(self, ids: Sequence[int], memory: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed_tokens(torch.tensor(ids)) * self.scale
        if self.learned:
            x = x + self.embed_positions(torch.arange(2, len(ids) + 2))
        else:
            x = x + torch.tensor([fairseq_position(place + 2, x.shape[1]) for place in range(len(ids))]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, memory)
        return self.layer_norm(x) if self.final else x


def fairseq_position(position: int, d_model: int) -> list[float]:
    """The encoding of a position by fairseq's formula, in double precision: sines, cosines, and a zero if odd."""
    half = d_model // 2
    angles = [position / 10000 ** (place / (half - 1)) for place in range(half)]
    return [*map(math.sin, angles), *map(math.cos, angles), *[0.0] * (d_model % 2)]


class Fairseq(nn.Module):
    """The `transformer` of fairseq."""

    def __init__(
        self,
        source_words: int,
        target_words: int,
        *,
        d_model: int = 16,
        num_heads: int = 4,
        activation: Callable = torch.relu,
        pre_norm: bool = False,
        final: bool | None = None,
        scaled: bool = True,
        learned: tuple[int, int] = (0, 0),
        tied: str = "",
        seed: int = 0,
    ):
        super().__init__()
        scale = math.sqrt(d_model) if scaled else 1.0
        layer = {"d_ff": 24, "num_heads": num_heads, "activation": activation, "pre_norm": pre_norm}
        final = pre_norm if final is None else final
        self.encoder = FairseqStack(source_words, d_model, 2, scale, learned[0], final, decoder=False, **layer)
        self.decoder = FairseqStack(target_words, d_model, 3, scale, learned[1], final, decoder=True, **layer)
        self.decoder.output_projection = nn.Linear(d_model, target_words, bias=False)
        if tied in ("target", "all"):
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        if tied == "all":
            self.encoder.embed_tokens.weight = self.decoder.embed_tokens.weight
        self.eval()
        randomise(self, seed=seed)
        let_vary(self, "encoder_attn.out_proj", ("out_proj", "fc2"), tuple(f"{s}.embed_tokens.weight" for s in STACKS))

    def forward(self, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
        return self.decoder.output_projection(self.decoder(target, self.encoder(source)))


STACKS = ("encoder", "decoder")


# --- The Annotated Transformer --------------------------------------------------------------------------------------


class AnnotatedNorm(nn.Module):
    """a (x - mean) / (std + eps) + b, the standard deviation over one number less than there are."""

    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in x:
            mean = row.sum() / len(row)
            deviation = ((row - mean).pow(2).sum() / (len(row) - 1)).sqrt()
            rows.append(self.a_2 * (row - mean) / (deviation + self.eps) + self.b_2)
        return torch.stack(rows)


class AnnotatedAttention(nn.Module):
    """Four matrices in a list: query, key, value, output."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query: torch.Tensor, states: torch.Tensor, causal: bool = False) -> torch.Tensor:
        split = [
            linear(x).reshape(len(x), self.num_heads, -1).transpose(0, 1)
            for linear, x in zip(self.linears, (query, states, states), strict=False)
        ]
        scores = split[0] @ split[1].transpose(1, 2) / math.sqrt(split[0].shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -1e9)
        return self.linears[3]((scores.softmax(dim=-1) @ split[2]).transpose(0, 1).reshape(len(query), -1))


class AnnotatedFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)


class AnnotatedSublayer(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm


class AnnotatedLayer(nn.Module):
    """x + sublayer(norm(x)), two or three times."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, norm: Callable, decoder: bool):
        super().__init__()
        self.self_attn = AnnotatedAttention(d_model, num_heads)
        if decoder:
            self.src_attn = AnnotatedAttention(d_model, num_heads)
        self.feed_forward = AnnotatedFeedForward(d_model, d_ff)
        self.sublayer = nn.ModuleList([AnnotatedSublayer(norm()) for _ in range(3 if decoder else 2)])
        self.decoder = decoder

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.sublayer[0].norm(x)
        x = x + self.self_attn(normed, normed, causal=self.decoder)
        if memory is not None:
            x = x + self.src_attn(self.sublayer[1].norm(x), memory)
        inner = self.feed_forward.w_1(self.sublayer[-1].norm(x)).relu()
        return x + self.feed_forward.w_2(inner)


class AnnotatedStack(nn.Module):
    def __init__(self, layers: list[nn.Module], norm: nn.Module):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class AnnotatedEmbedding(nn.Module):
    def __init__(self, words: int, d_model: int):
        super().__init__()
        self.lut = nn.Embedding(words, d_model)


class AnnotatedPositions(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.register_buffer("pe", paper_table(50, d_model).unsqueeze(0))


class AnnotatedGenerator(nn.Module):
    def __init__(self, d_model: int, words: int):
        super().__init__()
        self.proj = nn.Linear(d_model, words)


class Annotated(nn.Module):
    """The model of "The Annotated Transformer", with its layer norm or that of torch."""

    def __init__(
        self,
        source_words: int,
        target_words: int,
        *,
        d_model: int = 16,
        eps: float = 1e-6,
        own: bool = True,
        seed: int = 0,
    ):
        super().__init__()

        def norm() -> nn.Module:
            return AnnotatedNorm(d_model, eps) if own else nn.LayerNorm(d_model, eps=eps)

        for stack, number in (("encoder", 2), ("decoder", 3)):
            layers: list[nn.Module] = [AnnotatedLayer(d_model, 24, 4, norm, stack == "decoder") for _ in range(number)]
            setattr(self, stack, AnnotatedStack(layers, norm()))
        self.src_embed = nn.Sequential(AnnotatedEmbedding(source_words, d_model), AnnotatedPositions(d_model))
        self.tgt_embed = nn.Sequential(AnnotatedEmbedding(target_words, d_model), AnnotatedPositions(d_model))
        self.generator = AnnotatedGenerator(d_model, target_words)
        self.eval()
        randomise(self, seed=seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("a_2"):
                    parameter.mul_(0.4).add_(1)
        let_vary(
            self, "src_attn.linears.3", ("linears.3", "w_2"), ("src_embed.0.lut.weight", "tgt_embed.0.lut.weight")
        )

    def embed(self, ids: Sequence[int], side: nn.Sequential) -> torch.Tensor:
        x = side[0].lut(torch.tensor(ids))
        return x * math.sqrt(x.shape[1]) + paper_table(50, x.shape[1])[: len(ids)].to(x.dtype)

    def forward(self, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
        memory = self.encoder(self.embed(source, self.src_embed))
        return self.generator.proj(self.decoder(self.embed(target, self.tgt_embed), memory))


# --- JoeyNMT --------------------------------------------------------------------------------------------------------


class JoeyAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        for name in ("k_layer", "v_layer", "q_layer", "output_layer"):
            setattr(self, name, nn.Linear(d_model, d_model))

    def forward(self, query: torch.Tensor, states: torch.Tensor, causal: bool = False) -> torch.Tensor:
        q, k, v = self.q_layer(query), self.k_layer(states), self.v_layer(states)
        q, k, v = (each.unflatten(1, (self.num_heads, -1)) for each in (q, k, v))
        scores = torch.einsum("qhd,khd->hqk", q / math.sqrt(q.shape[-1]), k)
        if causal:
            scores = scores.masked_fill(~torch.ones_like(scores[0]).tril().bool(), -math.inf)
        return self.output_layer(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).flatten(1))


class JoeyFeedForward(nn.Module):
    """Its own norm and residual are inside; the matrices are the places 0 and 3 of a sequence."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module):
        super().__init__()
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.pwff_layer = nn.Sequential(
            nn.Linear(d_model, d_ff), activation, nn.Identity(), nn.Linear(d_ff, d_model), nn.Identity()
        )


class JoeyLayer(nn.Module):
    def __init__(self, d_model: int, d_ff: int, num_heads: int, activation: nn.Module, pre: bool, decoder: bool):
        super().__init__()
        self.pre, self.decoder = pre, decoder
        if decoder:
            self.trg_trg_att, self.src_trg_att = JoeyAttention(d_model, num_heads), JoeyAttention(d_model, num_heads)
            self.x_layer_norm, self.dec_layer_norm = nn.LayerNorm(d_model, eps=1e-6), nn.LayerNorm(d_model, eps=1e-6)
        else:
            self.src_src_att, self.layer_norm = JoeyAttention(d_model, num_heads), nn.LayerNorm(d_model, eps=1e-6)
        self.feed_forward = JoeyFeedForward(d_model, d_ff, activation)

    def around(self, x: torch.Tensor, norm: nn.LayerNorm, sub_layer: Callable) -> torch.Tensor:
        return sub_layer(norm(x)) + x if self.pre else norm(sub_layer(x) + x)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        if memory is None:
            x = self.around(x, self.layer_norm, lambda y: self.src_src_att(y, y))
        else:
            x = self.around(x, self.x_layer_norm, lambda y: self.trg_trg_att(y, y, causal=True))
            x = self.around(x, self.dec_layer_norm, lambda y: self.src_trg_att(y, memory))
        return self.around(x, self.feed_forward.layer_norm, self.feed_forward.pwff_layer)


class JoeyPositions(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.register_buffer("pe", paper_table(50, d_model).unsqueeze(0))


class JoeyStack(nn.Module):
    def __init__(self, number: int, d_model: int, pre: bool, final: bool, **layer):
        super().__init__()
        self.layers = nn.ModuleList([JoeyLayer(d_model, pre=pre, **layer) for _ in range(number)])
        self.pe = JoeyPositions(d_model)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6) if final else None

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.pe.pe[0, : len(x)]
        for layer in self.layers:
            x = layer(x, memory)
        return x if self.layer_norm is None else self.layer_norm(x)


class JoeyEmbedding(nn.Module):
    def __init__(self, words: int, d_model: int):
        super().__init__()
        self.lut = nn.Embedding(words, d_model)


class Joey(nn.Module):
    """The Transformer of JoeyNMT."""

    def __init__(
        self,
        source_words: int,
        target_words: int,
        *,
        pre: bool = True,
        scales: tuple[bool, bool] = (True, True),
        tied_embeddings: bool = False,
        tied_softmax: bool = False,
        activation: nn.Module | None = None,
        seed: int = 0,
        d_model: int = 16,
    ):
        super().__init__()
        layer = {"d_ff": 24, "num_heads": 4, "activation": activation or nn.ReLU()}
        self.encoder = JoeyStack(2, d_model, pre, pre, decoder=False, **layer)
        self.decoder = JoeyStack(3, d_model, pre, pre, decoder=True, **layer)
        self.decoder.output_layer = nn.Linear(d_model, target_words, bias=False)
        self.src_embed = JoeyEmbedding(source_words, d_model)
        self.trg_embed = self.src_embed if tied_embeddings else JoeyEmbedding(target_words, d_model)
        if tied_softmax:
            self.decoder.output_layer.weight = self.trg_embed.lut.weight
        self.factors = [math.sqrt(d_model) if scale else 1.0 for scale in scales]
        self.eval()
        randomise(self, seed=seed)
        let_vary(
            self,
            "src_trg_att.output_layer",
            ("att.output_layer", "pwff_layer.3"),
            ("src_embed.lut.weight", "trg_embed.lut.weight"),
        )

    def forward(self, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
        sides = zip((self.src_embed, self.trg_embed), (source, target), self.factors, strict=True)
        source_states, target_states = (side.lut(torch.tensor(ids)) * factor for side, ids, factor in sides)
        return self.decoder.output_layer(self.decoder(target_states, self.encoder(source_states)))

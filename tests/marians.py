"""Small Marian models with SentencePiece tokenizers of their own, in folders as OPUS-MT models come."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from conftest import TINY_CORPUS
from small_models import randomise


def sentences(number: int, seed: int = 0, side: int = 0) -> list[str]:
    """Lines that look like text of users: words, numbers, marks, capitals, other alphabets, odd spaces, long lines."""
    draw = random.Random(seed)
    known = [word for pair in TINY_CORPUS for word in pair[side].split()]
    odd = [
        "Ärger",
        "naïve",
        "№ 7",
        "日本",
        "привет",
        "🙂",
        "e-mail@example.org",
        "3.14",
        "“so”",
        "it's",
        "--",
        "…",
        "</s>",
    ]
    odd += ["<pad>", "<unk>", ">>deu<<", "▁", "ﬁne", "a\u0301", "\u00a0"]
    lines = []
    for _ in range(number):
        words = [draw.choice(odd if draw.random() < 0.15 else known) for _ in range(draw.randint(1, 14))]
        line = draw.choice([" ", " ", " ", "  "]).join(words)
        lines.append(draw.choice([str, str, str, str.upper, str.capitalize])(line) + draw.choice(["", ".", "?", " !"]))
    return lines


def spm(texts: list[str], vocab_size: int) -> bytes:
    """A SentencePiece model of these texts."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def marian_tokenizer_files(folder: Path, *, separate: bool = False) -> tuple[int, int]:
    """Writes source.spm, target.spm, the vocabulary and the settings; returns the sizes of both vocabularies."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for side, name, size in ((0, "source.spm", 90), (1, "target.spm", 100)):
        content = spm(sentences(300, seed=side, side=side) + [pair[side] for pair in TINY_CORPUS], size)
        (folder / name).write_bytes(content)
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        pieces.append([processor.IdToPiece(index) for index in range(processor.GetPieceSize())])
    special = ["</s>", "<unk>"]
    if separate:
        sizes = []
        for names, file in zip(pieces, ("vocab.json", "target_vocab.json"), strict=True):
            words = [*special, "<pad>", *(piece for piece in names if piece not in (*special, "<s>"))]
            (folder / file).write_text(json.dumps({word: index for index, word in enumerate(words)}))
            sizes.append(len(words))
    else:
        inner = dict.fromkeys([*special, ">>deu<<", *pieces[0], *pieces[1]])
        inner.pop("<s>")
        words = [*inner, "<pad>"]  # the padding is the last word, as in OPUS-MT
        (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
        sizes = [len(words), len(words)]
    settings = {"source_lang": "eng", "target_lang": "deu", "tokenizer_class": "MarianTokenizer"}
    if separate:
        settings["separate_vocabs"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return sizes[0], sizes[1]


def small_marian(vocab_size: int = 29, *, seed: int = 0, std: float = 0.5, **overrides) -> MarianMTModel:
    """A Marian with large random weights, the output bias too, and the settings that OPUS-MT models have."""
    settings = {
        "vocab_size": vocab_size,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 256,
        "pad_token_id": vocab_size - 1,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "decoder_start_token_id": vocab_size - 1,
        "forced_eos_token_id": 0,
        "scale_embedding": True,
        "activation_function": "swish",
        "dropout": 0.1,
        **overrides,
    }
    config = MarianConfig(**settings)
    model = MarianMTModel(config).eval()
    positions = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed_positions" in name}
    randomise(model, std=std, seed=seed)
    model.load_state_dict(positions, strict=False)
    generator = torch.Generator().manual_seed(seed)
    model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator))
    model.generation_config = GenerationConfig(
        num_beams=4,
        max_length=20,
        bad_words_ids=[[config.pad_token_id]],
        forced_eos_token_id=0,
        bos_token_id=0,
        pad_token_id=config.pad_token_id,
        eos_token_id=0,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    return model


def let_vary(model: MarianMTModel) -> None:
    """Scales the weights so that translations differ from source to source and end at different lengths.

    Random weights of this architecture otherwise repeat one word for ever, whatever the source says.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter *= 0.1
            elif "encoder_attn.out_proj" in name:
                parameter *= 4
            elif "out_proj" in name or "v_proj" in name or "fc2" in name:
                parameter *= 0.5
        model.lm_head.weight *= 0.6
        model.final_logits_bias *= 0.3
        model.final_logits_bias[0, model.config.eos_token_id] += 2
    model.generation_config.max_length = 14
    model.generation_config.no_repeat_ngram_size = 2


def with_exact_positions(model: MarianMTModel) -> MarianMTModel:
    """The model with its formula of positions evaluated in its own precision; Marian rounds them to float32."""
    length, d_model = model.config.max_position_embeddings, model.config.d_model
    rows = [[position / 10000 ** (2 * (j // 2) / d_model) for j in range(d_model)] for position in range(length)]
    angles = torch.tensor(rows, dtype=torch.float64)
    table = torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=1)
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight.copy_(table)
    return model

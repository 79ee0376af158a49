"""Trains a small model on two text files, line i of one the translation of line i of the other, and translates a line.

python scripts/examples/train_on_your_files.py train.en train.de --output_dir runs/en-de --max_steps 3600
"""

import argparse

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data import load_pairs, tokenize_pairs
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from vanilla_transformer.translation import translate_lines


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", help="text of the source language")
parser.add_argument("target", help="its translation, line by line")
parser.add_argument("--output_dir", required=True)
parser.add_argument("--vocab_size", type=int, default=8000, help="words of the joint vocabulary")
parser.add_argument("--max_steps", type=int, default=3600, help="updates")
options = parser.parse_args()

pairs = load_pairs(source_files=options.source, target_files=options.target)
tokenizer = train_tokenizer([*pairs["source"], *pairs["target"]], options.vocab_size)
dataset, counts = tokenize_pairs(pairs, tokenizer)

config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer))
model = VanillaTransformerForConditionalGeneration(config)
arguments = VanillaTransformerTrainingArguments(
    options.output_dir, max_steps=options.max_steps, warmup_steps=1000, learning_rate=0.002, report_to="none"
)
trainer = VanillaTransformerTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
trainer.save_model()  # with tokenizer, code and model card

line = pairs[0]["source"]
print(line, "->", next(translate_lines(model, tokenizer, [line]))[0].text)

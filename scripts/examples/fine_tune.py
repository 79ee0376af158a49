"""Goes on training a model on text of another kind, and tells the perplexity of that text before and after.

python scripts/examples/fine_tune.py runs/en-de new.en new.de --output_dir runs/en-de-new --max_steps 300
"""

import argparse

from vanilla_transformer.data import load_pairs, tokenize_pairs
from vanilla_transformer.evaluation import perplexity
from vanilla_transformer.training import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from vanilla_transformer.translation import load_translator


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="folder, or name on the Hub")
parser.add_argument("source", help="text of the source language")
parser.add_argument("target", help="its translation, line by line")
parser.add_argument("--output_dir", required=True)
parser.add_argument("--max_steps", type=int, default=300, help="updates")
parser.add_argument("--learning_rate", type=float, default=0.0005, help="peak; lower than that of the first training")
options = parser.parse_args()

model, tokenizer = load_translator(options.model)
pairs = load_pairs(source_files=options.source, target_files=options.target)
dataset, _ = tokenize_pairs(pairs, tokenizer)  # with the words that the model knows
before = perplexity(model, tokenizer, pairs["source"], pairs["target"])

arguments = VanillaTransformerTrainingArguments(
    options.output_dir,
    max_steps=options.max_steps,
    learning_rate=options.learning_rate,
    warmup_steps=options.max_steps // 10,
    report_to="none",
)
trainer = VanillaTransformerTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
trainer.save_model()
after = perplexity(model, tokenizer, pairs["source"], pairs["target"])
print(f"perplexity per token of the new text: {before:.2f} before, {after:.2f} after")

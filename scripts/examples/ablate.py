"""Trains variants of one small model, each on the same text for the same number of updates, and compares their loss.

python scripts/examples/ablate.py train.en train.de --max_steps 500 num_heads=1 norm_first=true
"""

import argparse
import tempfile

import yaml
from transformers import set_seed

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.data import load_pairs, tokenize_pairs
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import VanillaTransformerTrainer, VanillaTransformerTrainingArguments


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", help="text of the source language")
parser.add_argument("target", help="its translation, line by line")
parser.add_argument("variants", nargs="+", metavar="FIELD=VALUE", help="a field of the configuration, changed alone")
parser.add_argument("--max_steps", type=int, default=500, help="updates of each")
options = parser.parse_args()
pairs = load_pairs(source_files=options.source, target_files=options.target)
tokenizer = train_tokenizer([*pairs["source"], *pairs["target"]], 2000)
held_out, text = pairs.select(range(len(pairs) // 10)), pairs.select(range(len(pairs) // 10, len(pairs)))
dataset, validation = (tokenize_pairs(part, tokenizer)[0] for part in (text, held_out))
settings = {"max_steps": options.max_steps, "warmup_steps": options.max_steps // 10, "learning_rate": 0.002}
settings |= {"predict_with_generate": False, "report_to": "none", "save_strategy": "no"}
for variant in ("the paper", *options.variants):
    field, _, value = variant.partition("=")
    set_seed(0)
    changed = {field: yaml.safe_load(value)} if value else {}
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), **changed)
    model = VanillaTransformerForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = VanillaTransformerTrainingArguments(folder, **settings)
        trainer = VanillaTransformerTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()
        print(f"{variant}: {trainer.evaluate(validation)['eval_loss']:.3f} nats a token", flush=True)

"""Writes a model as plain Marian of transformers and for CTranslate2, and translates one line with all three.

python scripts/examples/export.py runs/en-de --text "Two dogs are playing." --output_dir exported

Needs the extra [export].
"""

import argparse
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.convert import convert_to
from vanilla_transformer.convert.ctranslate2 import load_ctranslate2
from vanilla_transformer.translation import load_translator, translate_lines


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="folder, or name on the Hub")
parser.add_argument("--text", required=True, help="a line to translate")
parser.add_argument("--output_dir", type=Path, required=True, help="gets the folders marian and ctranslate2")
options = parser.parse_args()

marian, fast = options.output_dir / "marian", options.output_dir / "ctranslate2"
for format, folder in (("marian", marian), ("ctranslate2", fast)):
    for difference in convert_to(format, options.model, folder):
        print(f"{format}: {difference}")
translators = {
    "ours": load_translator(options.model),
    "marian": (AutoModelForSeq2SeqLM.from_pretrained(marian), AutoTokenizer.from_pretrained(marian)),
    "ctranslate2": load_ctranslate2(str(fast)),
}
for name, (model, tokenizer) in translators.items():
    print(f"{name}: {next(translate_lines(model, tokenizer, [options.text], num_beams=1))[0].text}")

"""What all tests share: no network, a cache of their own, fixed seeds, one thread, a small tokenizer."""

import atexit
import logging
import os
import random
import shutil
import tempfile
from pathlib import Path


# Read by the libraries when they are imported, hence set before anything else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests neither fill nor trust the user's cache.
_DATASETS_CACHE = tempfile.mkdtemp(prefix="vanilla_transformer_tests_")
os.environ["HF_DATASETS_CACHE"] = _DATASETS_CACHE
atexit.register(shutil.rmtree, _DATASETS_CACHE, ignore_errors=True)

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from vanilla_transformer.tokenization import train_tokenizer  # noqa: E402


# One thread: on tensors as small as the tests', a second one only costs waiting, and much of it on a busy machine.
torch.set_num_threads(1)

TINY_CORPUS = [
    ("The red train leaves at seven.", "Der rote Zug fährt um sieben ab."),
    ("The green bus leaves at nine.", "Der grüne Bus fährt um neun ab."),
    ("A small dog sleeps under the table.", "Ein kleiner Hund schläft unter dem Tisch."),
    ("A large cat sleeps on the chair.", "Eine große Katze schläft auf dem Stuhl."),
    ("We bought three apples and two pears.", "Wir haben drei Äpfel und zwei Birnen gekauft."),
    ("She reads a long book in the garden.", "Sie liest ein langes Buch im Garten."),
    ("He writes a short letter in the kitchen.", "Er schreibt einen kurzen Brief in der Küche."),
    ("Where is the old bridge over the river?", "Wo ist die alte Brücke über den Fluss?"),
    ("The children play in front of the house.", "Die Kinder spielen vor dem Haus."),
    ("It costs 12 euros, not 21!", "Es kostet 12 Euro, nicht 21!"),
]


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _process_as_it_was():
    """What commands and scripts run in the tests' process set for the whole of it is taken back: no file of tests
    depends on which ran before."""
    package, level = logging.getLogger("vanilla_transformer"), logging.getLogger("vanilla_transformer").level
    verbosity = transformers_logging.get_verbosity()
    bars, other_bars = datasets.are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    yield
    package.setLevel(level)
    transformers_logging.set_verbosity(verbosity)
    (datasets.disable_progress_bars if bars else datasets.enable_progress_bars)()
    (transformers_logging.enable_progress_bar if other_bars else transformers_logging.disable_progress_bar)()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A joint tokenizer of 400 tokens or fewer, trained on a few sentences of our own in English and German."""
    return train_tokenizer([text for pair in TINY_CORPUS for text in pair], 400)


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """The folder of Multi30k, ``{train,val,test_2016_flickr}.{en,de}.gz``; tests that want it are skipped without."""
    default = Path(__file__).resolve().parents[2] / "shared"
    shared = Path(os.environ.get("VANILLA_TRANSFORMER_SHARED", default))
    folder = shared / "data" / "multi30k"
    if not (folder / "train.en.gz").is_file():
        pytest.skip("Multi30k is not here; VANILLA_TRANSFORMER_SHARED names the folder that has data/multi30k in it")
    return folder

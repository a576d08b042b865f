"""Makes what the page needs without a network: a folder of transformers, and six boards with texts.

The folder has what a downloaded one has: a configuration, weights under the names of a masked
language model, and a tokenizer. Its weights are random.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, set_seed

HERE = Path(__file__).parent
LENGTH = 12
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROOMS = ("kitchen", "hall", "attic", "cellar", "garden", "bedroom")
REQUESTS = (
    ("switch on the lamp in the", "make it brighter in the", "turn the lights off in the"),
    ("make it warmer in the", "turn the heating down in the", "it is too cold in the"),
    ("play some music in the", "stop the song in the", "turn the volume up in the"),
)
# Boards of three sizes; each has other rooms, and hears more of one kind of request.
WIDTHS = {"pi-1": 1.0, "pi-2": 1.0, "pi-3": 0.5, "pi-4": 0.5, "pi-5": 0.25, "pi-6": 0.25}
SAMPLES = 80
BOARD = """fleet = "homes"
device = "{name}"
broker = "mqtt://127.0.0.1:18830"
state_dir = "state/{name}"
max_width = {width}

[data]
kind = "npz"
path = "data/{name}.npz"
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows every word of the requests."""
    words: dict[str, None] = dict.fromkeys(SPECIAL)
    for phrases in REQUESTS:
        for phrase in phrases:
            words.update(dict.fromkeys(phrase.split()))
    words.update(dict.fromkeys(ROOMS))
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    packaged = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    packaged.add_special_tokens(dict(zip(ROLES, SPECIAL, strict=True)))
    return packaged


def make_samples(
    tokenizer: PreTrainedTokenizerFast, shares: NDArray[np.float64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens, int64 [SAMPLES, LENGTH], and labels, int64 [SAMPLES].

    Args:
        tokenizer: of the model.
        shares: how often each kind of request occurs.
        seed: of the requests.
    """
    draw = np.random.default_rng(seed)
    labels = draw.choice(len(REQUESTS), size=SAMPLES, p=shares)
    texts = [f"{draw.choice(REQUESTS[label])} {draw.choice(ROOMS)}" for label in labels]
    encoded = tokenizer(texts, padding="max_length", max_length=LENGTH, truncation=True)
    return np.array(encoded["input_ids"], np.int64), labels.astype(np.int64)


if __name__ == "__main__":
    set_seed(0)
    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=32,
    )
    BertForMaskedLM(config).save_pretrained(HERE / "bert")
    tokenizer.save_pretrained(HERE / "bert")
    (HERE / "data").mkdir(exist_ok=True)
    for number, (name, width) in enumerate(WIDTHS.items()):
        shares = np.full(len(REQUESTS), 0.2)
        shares[number % len(REQUESTS)] = 0.6
        x, y = make_samples(tokenizer, shares, seed=number)
        np.savez(HERE / "data" / f"{name}.npz", x=x, y=y)
        (HERE / f"{name}.toml").write_text(BOARD.format(name=name, width=width))
        print(f"{name}: {np.bincount(y, minlength=len(REQUESTS))} requests, width {width}")
    x, y = make_samples(tokenizer, np.full(len(REQUESTS), 1 / len(REQUESTS)), seed=99)
    np.savez(HERE / "data" / "test.npz", x=x, y=y)

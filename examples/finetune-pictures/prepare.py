"""Makes what the page needs without a network: weights of a timm model, and six boards' pictures.

The weights stand for a downloaded file of pre-trained ones. They are those of a model that this
script trains for a minute on the digits 0 to 4; the boards then have all ten digits.
"""

from pathlib import Path

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn import functional

from simulation.data.datasets import load_dataset
from simulation.data.partition import dirichlet

HERE = Path(__file__).parent
ENLARGED = 4  # times, so that 8 x 8 pixels become 32 x 32
KNOWN = 5  # digits that the pre-trained model knows
EPOCHS = 10
BATCH = 32
WIDTHS = {"pi-1": 1.0, "pi-2": 1.0, "pi-3": 0.5, "pi-4": 0.5, "pi-5": 0.25, "pi-6": 0.25}
BOARD = """fleet = "cameras"
device = "{name}"
broker = "mqtt://127.0.0.1:18830"
state_dir = "state/{name}"
max_width = {width}

[data]
kind = "npz"
path = "data/{name}.npz"
"""


def enlarge(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return pictures [N, 1, 32, 32] of digits [N, 1, 8, 8]."""
    return x.repeat(ENLARGED, 2).repeat(ENLARGED, 3)


def pre_train(x: NDArray[np.float32], y: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Train a model of timm on pictures, and return its state."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        in_chans=1,
        embed_dim=48,
        depth=3,
        num_heads=3,
        num_classes=KNOWN,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            logits = model(torch.from_numpy(x[rows.numpy()]))
            loss = functional.cross_entropy(logits, torch.from_numpy(y[rows.numpy()]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}")
    return model.state_dict()


if __name__ == "__main__":
    digits = load_dataset("digits")
    train_x = enlarge(digits.train_x)
    is_known = digits.train_y < KNOWN
    save_file(pre_train(train_x[is_known], digits.train_y[is_known]), HERE / "vit.safetensors")
    (HERE / "data").mkdir(exist_ok=True)
    samples_by_device = dirichlet(digits.train_y, len(WIDTHS), 1.0, seed=7)
    for (name, width), samples in zip(WIDTHS.items(), samples_by_device, strict=True):
        np.savez(HERE / "data" / f"{name}.npz", x=train_x[samples], y=digits.train_y[samples])
        (HERE / f"{name}.toml").write_text(BOARD.format(name=name, width=width))
        print(f"{name}: {len(samples)} pictures, width {width}")
    np.savez(HERE / "data" / "test.npz", x=enlarge(digits.test_x), y=digits.test_y)

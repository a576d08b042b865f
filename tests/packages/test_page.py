"""The commands of docs/packages.md, one after the other, with transformers and timm."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

_PATIENCE = 900  # seconds for one command
PAGE = Path(__file__).parents[2] / "docs" / "packages.md"


def commands() -> list[list[str]]:
    """The commands of the page, in words."""
    return [
        shlex.split(line) for line in re.findall(r"^    (\S.*)$", PAGE.read_text(), re.MULTILINE)
    ]


@pytest.mark.packages
def test_the_commands_of_the_page(tmp_path):
    """A small BERT of transformers and a ViT of timm are exported as the page says."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("timm")
    config = transformers.BertConfig(
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=60,
        architectures=["BertForSequenceClassification"],
    )
    config.save_pretrained(tmp_path / "bert")
    for program, *words in commands():
        assert program == "shoal"
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "artifacts/bert/w0.25-d2/manifest.json").exists()
    assert (tmp_path / "artifacts/vit_tiny_patch16_224/w0.50-d12/manifest.json").exists()
    assert "cut.heads('hidden_size', 2, 16) * 2" in (tmp_path / "my_models.py").read_text()

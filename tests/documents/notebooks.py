"""Runs the notebooks of `examples/notebooks`, and stores their output in them.

`python -m tests.documents.notebooks [NAME ...]` runs all notebooks, or some of them. A notebook that
needs a data set reads it from the folder in SHOAL_DATA.
"""

import ast
import base64
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "code_cells", "notebooks", "outputs_of", "run_cell", "text_of", "value_of"]

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
DOTS_PER_INCH = 72

Cell = dict[str, Any]


def notebooks() -> list[Path]:
    """All notebooks, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[Cell]:
    """The cells of a notebook that contain code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def text_of(cell: Cell) -> str:
    """The stored lines that a cell prints."""
    lines: list[str] = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            lines += output["text"]
    return "".join(lines)


def value_of(cell: Cell) -> Any:
    """The stored value of the last line of a cell; None without one."""
    for output in cell["outputs"]:
        if output["output_type"] == "execute_result":
            return ast.literal_eval("".join(output["data"]["text/plain"]))
    return None


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line if that is an expression."""
    body = ast.parse(source)
    last = body.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(body, "cell", "exec"), names)
        return None
    body.body.pop()
    exec(compile(body, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def outputs_of(sources: list[str]) -> list[list[Cell]]:
    """Run cells one after another, and return the outputs of each in Jupyter's form."""
    names: dict[str, Any] = {"__name__": "notebook"}
    outputs = []
    for number, source in enumerate(sources, 1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = run_cell(source, names)
        cell = _stream(printed.getvalue()) + _figures()
        if value is not None:
            cell.append(_result(repr(value), number))
        outputs.append(cell)
    return outputs


def _stream(text: str) -> list[Cell]:
    if not text:
        return []
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}]


def _result(text: str, number: int) -> Cell:
    return {
        "data": {"text/plain": text.splitlines(keepends=True)},
        "execution_count": number,
        "metadata": {},
        "output_type": "execute_result",
    }


def _figures() -> list[Cell]:
    """The figures that a cell has drawn, which are closed afterwards."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return []
    pictures = []
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, dpi=DOTS_PER_INCH, bbox_inches="tight")
        data = {"image/png": base64.b64encode(image.getvalue()).decode() + "\n"}
        pictures.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return pictures


def _store_outputs(path: Path) -> None:
    """Run a notebook in its own process, and write its outputs into its file."""
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--cells"],
        input=json.dumps(sources),
        env={**os.environ, "MPLBACKEND": "Agg"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    outputs = json.loads(done.stdout.splitlines()[-1])
    for number, (cell, output) in enumerate(zip(cells, outputs, strict=True), 1):
        cell["execution_count"] = number
        cell["outputs"] = output
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--cells"]:
        print(json.dumps(outputs_of(json.loads(sys.stdin.read()))))
    else:
        for notebook_path in notebooks():
            if notebook_path.stem in sys.argv[1:] or not sys.argv[1:]:
                print(f"running {notebook_path.name}", file=sys.stderr)
                _store_outputs(notebook_path)

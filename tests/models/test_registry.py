"""Architectures by name, from the zoo and from a user's file, and how bad ones are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fleet_protocol.errors import ConfigError, PlanError
from models import (
    Architecture,
    Cut,
    Registry,
    Tier,
    architecture,
    build,
    infer_layout,
    make_plan,
    slice_weights,
)
from models.zoo.initial_state import initial_weights

USER_FILE = '''
"""A user's model: two branches that add, then a classifier."""

from torch import nn

from models import architecture
from models.zoo.layers import Scaler


class Branches(nn.Module):
    def __init__(self, inputs, stream, hidden, classes, rate):
        super().__init__()
        self.enter = nn.Linear(inputs, stream)
        self.up = nn.Linear(stream, hidden)
        self.down = nn.Linear(hidden, stream)
        self.scaler = Scaler(rate)
        self.out = nn.Linear(stream, classes)

    def forward(self, x):
        x = self.scaler(self.enter(x)).relu()
        return self.out(x + self.scaler(self.down(self.scaler(self.up(x)).relu())))


@architecture(paper="none")
def branches(cut, *, input_shape=(6,), classes=3, stream=8, hidden=10):
    return Branches(
        input_shape[0], cut.width("stream", stream), cut.width("hidden", hidden), cut.classes(classes), cut.rate
    )
'''


def user_file(folder: Path, body: str) -> Path:
    path = folder / "my_models.py"
    path.write_text(body)
    return path


def test_a_file_imports_what_lies_beside_it(tmp_path):
    """As a script does; what ends the process instead of the import is an error of the file."""
    (tmp_path / "sizes_of_mine.py").write_text("HIDDEN = 10\n")
    path = user_file(
        tmp_path,
        "from sizes_of_mine import HIDDEN\n" + USER_FILE.replace("hidden=10", "hidden=HIDDEN"),
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom models import Registry\n"
        "print(Registry.from_architectures([]).with_file(Path(sys.argv[1])).get('branches').defaults['hidden'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "10\n", done.stderr
    with pytest.raises(ConfigError, match=r"line 2 failed: SystemExit\(3\)"):
        Registry.from_architectures([]).with_file(user_file(tmp_path, "import sys\nsys.exit(3)\n"))


def test_a_size_is_a_whole_number():
    """A division with one stroke makes another."""

    @architecture()
    def halved(cut, *, input_shape=(4,), classes=3):
        return torch.nn.Linear(4, cut.width("hidden", 8 / 2))

    with pytest.raises(
        PlanError, match=r"axis hidden: 4\.0 is not a whole number of units; divide with //"
    ):
        infer_layout(halved)


def test_importing_the_numpy_half_does_not_import_torch():
    """The server and its tools can read layouts and merge without torch."""
    code = (
        "import sys, models, models.plan, models.registry, models.layout, models.slicing\n"
        "assert not {'torch', 'onnx'} & sys.modules.keys(), 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_zoo_holds_its_families(zoo):
    """Names come sorted; each architecture says where it was described."""
    assert zoo.names == (
        *(
            "cnn1",
            "cnn2",
            "conv",
            "exit_resnet",
            "exit_text_encoder",
            "har_cnn",
            "lenet5",
            "minilm_adapters",
            "minilm_encoder",
            "mlp",
            "next_word",
            "preresnet18",
            "smollm",
        ),
        *("text_encoder", "token_classifier", "transformer_mlm"),
    )
    assert [arch.name for arch in zoo] == list(zoo.names)
    assert all(arch.paper for arch in zoo)
    assert len(zoo) == len(zoo.names)
    assert "conv" in zoo


def test_a_user_registers_a_model_from_a_file(zoo, tmp_path):
    """A plain module with a cut is enough: its layout is inferred, it builds and slices at every
    width.
    """
    registry = zoo.with_file(user_file(tmp_path, USER_FILE))
    assert "branches" in registry.names
    assert "branches" not in zoo
    arch = registry.get("branches")
    layout = infer_layout(arch, {"hidden": 12})
    assert {name: axis.size for name, axis in layout.axes.items()} == {
        "stream": 8,
        "hidden": 12,
        "classes": 3,
        "fixed.6": 6,
    }
    tier = layout.tier(0.5)
    cut = slice_weights(layout, make_plan(layout, tier), initial_weights(arch, {"hidden": 12}))
    module = build(arch, tier, settings={"hidden": 12})
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == {
        name: value.shape for name, value in cut.items()
    }


def test_a_file_may_import_a_zoo_model(zoo, tmp_path):
    """What the registry has already is not a second one of the same name."""
    registry = zoo.with_file(user_file(tmp_path, "from models.zoo.mlp import mlp\n" + USER_FILE))
    assert len(registry) == len(zoo) + 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            USER_FILE.replace("def branches", "def conv"),
            "architecture conv of .*my_models.py has the name of an existing",
        ),
        ("x = 1\n", "does not define an architecture; decorate a builder"),
        (
            "x = 1\nimport nothing_of_this_name\n",
            r"my_models.py, line 2 failed: ModuleNotFoundError",
        ),
        ("from . import layers\n", "my_models.py: it runs as a script, .* write `import parts`"),
        (
            USER_FILE.replace('@architecture(paper="none")', "@architecture"),
            r"write @architecture\(\)",
        ),
        (
            USER_FILE.replace("branches(cut,", "branches("),
            "branches must take a cut and then .* but it does not take a cut",
        ),
        ("def broken(:\n", r"my_models\.py, line 1 is not valid Python: "),
        (
            USER_FILE.replace("classes=3", "classes"),
            "branches must take a cut and then .* but classes has no default",
        ),
        (
            USER_FILE.replace("input_shape=(6,)", "shape=(6,)"),
            "branches lacks the required setting input_shape",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_line(zoo, tmp_path, body, message):
    """The user learns which file, where in it, and what to do."""
    with pytest.raises(ConfigError, match=message):
        zoo.with_file(user_file(tmp_path, body))


def test_a_missing_file_is_refused(zoo, tmp_path):
    """The message names the path."""
    with pytest.raises(ConfigError, match=r"my_models\.py does not exist"):
        zoo.with_file(tmp_path / "my_models.py")


@pytest.mark.parametrize(("name", "hint"), [("cnov", "'conv'"), ("textencoder", "'text_encoder'")])
def test_an_unknown_architecture_is_refused_with_the_closest_name(zoo, name, hint):
    """A typo is answered with what was probably meant, and the list."""
    with pytest.raises(
        ConfigError,
        match=rf"unknown architecture '{name}' \(did you mean {hint}\?\); choose from cnn1,",
    ):
        zoo.get(name)


def test_an_unknown_setting_is_refused_with_the_closest_name(zoo):
    """A setting that nothing reads is an error, not silence."""
    with pytest.raises(
        ConfigError, match=r"conv has no setting 'chanels' .did you mean 'channels'"
    ):
        build(zoo.get("conv"), settings={"chanels": [4, 8]})


def test_a_word_in_place_of_a_number_is_refused_with_the_setting(zoo):
    """The builder failed on it, and advised to divide with whole numbers."""
    with pytest.raises(ConfigError, match=r"the setting classes = 'three' is not a number"):
        build(zoo.get("conv"), settings={"classes": "three"})


@pytest.mark.parametrize("width", [0, 1.5, -1])
def test_a_width_that_no_model_can_have_is_refused(zoo, width):
    """Building checks the width as tiers do."""
    with pytest.raises(PlanError, match=r"not in \(0, 1\]"):
        build(zoo.get("mlp"), width)


@pytest.mark.parametrize(
    ("name", "depth", "message"),
    [
        ("text_encoder", 5, "text_encoder: depth 5 does not exist; this model has depths 1 to 4"),
        ("text_encoder", 0, "depth 0 is not a positive number"),
        ("mlp", 2, "mlp has no sub-model of depth 2"),
    ],
)
def test_a_depth_the_model_does_not_have_is_refused(zoo, name, depth, message):
    """The message names the depths there are."""
    with pytest.raises(PlanError, match=message):
        build(zoo.get(name), 0.5, depth)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("conv", {"norm": "batch"}, "no norm 'batch'; choose 'sbn' or 'none'"),
        ("conv", {"channels": ()}, "channels is empty"),
        ("conv", {"input_shape": (1, 4, 4)}, "too small for 4 layers"),
        ("conv", {"input_shape": (4,)}, "conv cannot be built: .*check its settings"),
        ("lenet5", {"input_shape": (1, 8, 8)}, "a side of 8 is too small"),
        ("text_encoder", {"embed": 30}, "embed 30 is not a multiple of heads 4"),
    ],
)
def test_settings_that_make_no_model_are_refused(zoo, name, settings, message):
    """The message names the setting and what it may be."""
    with pytest.raises(ConfigError, match=message):
        build(zoo.get(name), settings=settings)


def test_a_tier_and_a_width_build_the_same(zoo):
    """`build` takes a tier, or a width and a depth."""
    arch = zoo.get("text_encoder")
    first = build(arch, Tier(0.5, 2))
    second = build(arch, 0.5, 2)
    shapes = [
        {name: value.shape for name, value in module.named_parameters()}
        for module in (first, second)
    ]
    assert shapes[0] == shapes[1]


def test_a_cut_refuses_one_name_for_two_axes():
    """Two layers of different size cannot share an axis; layers of a residual stream can."""
    cut = Cut(0.5)
    assert cut.width("stream", 8) == cut.width("stream", 8) == 4
    with pytest.raises(
        ConfigError,
        match="axis stream was requested twice, with 8 units in 1 groups and with 10 in 1",
    ):
        cut.width("stream", 10)
    with pytest.raises(
        ConfigError,
        match="axis stream was requested twice, with 8 units in 1 groups and with 8 in 2",
    ):
        cut.heads("stream", 2, 4)
    with pytest.raises(ConfigError, match=r"start with 'fixed\.'"):
        cut.width("fixed.3", 3)


def test_a_cut_allows_one_depth_unit():
    """A second stack of blocks would need a depth of its own."""
    cut = Cut(1.0, 2)
    assert cut.depth(4) == 2
    with pytest.raises(ConfigError, match="called twice"):
        cut.depth(4)
    with pytest.raises(ConfigError, match="at least 1 block"):
        Cut().depth(0)


def test_two_architectures_of_one_name_do_not_share_a_registry(zoo):
    """A duplicate raises; which of the two would be trained is not left to chance."""
    with pytest.raises(ConfigError, match="has the name of an existing one"):
        Registry.from_architectures([*zoo, zoo.get("conv")])


@pytest.mark.parametrize("builder", [lambda cut, *, input_shape=(1,), classes=2: None, len])
def test_only_a_named_builder_with_a_cut_is_an_architecture(builder):
    """A lambda has no name, and a function of something else no settings."""
    with pytest.raises(ConfigError):
        architecture()(builder)


def test_a_default_that_cannot_be_stored_is_refused():
    """At once, with the setting, and not where the layout is written."""
    with pytest.raises(
        ConfigError,
        match=r"custom: the default of act cannot be stored: .* use a number, text, list or table",
    ):

        @architecture()
        def custom(cut, *, input_shape=(8,), classes=3, act=len):
            """Never built."""


@pytest.mark.parametrize("dtype", ["int32", "float16", {"x": "long"}])
def test_a_dtype_that_no_input_has_is_refused(dtype):
    with pytest.raises(ConfigError, match=r"custom: input_dtype '.*' is not one of float32, int64"):

        @architecture(input_dtype=dtype)
        def custom(cut, *, input_shape=(8,), classes=3):
            """Never built."""


@pytest.mark.parametrize("shape", [(8.5,), (-1,), "a", (True,), {"x": 8}])
def test_a_shape_that_is_none_is_named(zoo, shape):
    """Where the settings come from the command line as where they are the defaults."""
    with pytest.raises(
        ConfigError, match=r"^mlp: input_shape = .* is not a list of positive integers"
    ):
        zoo.get("mlp").row({"input_shape": shape})
    # Named once, too, by a build.
    with pytest.raises(ConfigError, match=r"^mlp: input_shape = "):
        build(zoo.get("mlp"), 1.0, settings={"input_shape": shape})


def test_an_architecture_is_a_frozen_value(zoo):
    """Defaults are read-only, lists of the user become tuples."""
    arch = zoo.get("conv")
    assert isinstance(arch, Architecture)
    assert arch.settings({"channels": [4, 8]})["channels"] == (4, 8)
    assert arch.settings({"channels": 4})["channels"] == (4,)
    with pytest.raises(TypeError):
        arch.defaults["classes"] = 3

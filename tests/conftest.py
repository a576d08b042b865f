"""What every test shares: how property tests are judged, and which tests a machine can run at all.

A property test is judged by what it finds, never by how long a busy machine takes. Tests marked
`ort_training` need onnxruntime-training, which stands in the place of onnxruntime where it is
installed; elsewhere they are skipped. Slow and installed tests that `tests/representatives.py`
names are marked `representative`; CI runs them, too.
"""

import importlib.util
import subprocess
import sys

import pytest
from hypothesis import Phase, settings

from tests.representatives import representatives

settings.register_profile("shoal", deadline=None)
# `make mutants` asks only whether a test fails: the same examples each time, and no search for the
# smallest.
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("shoal")


COLLECTED = pytest.StashKey[dict[str, set[str]]]()


@pytest.fixture(autouse=True, scope="session")
def _own_configuration(tmp_path_factory):
    """Keys that commands make for their user are not put among those of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(config, items):
    chosen = representatives()
    for item in items:
        if item.nodeid in chosen:
            item.add_marker("representative")
    config.stash[COLLECTED] = {
        item.nodeid: {mark.name for mark in item.iter_markers()} for item in items
    }
    marked = [item for item in items if item.get_closest_marker("ort_training")]
    if (
        marked and importlib.util.find_spec("onnxruntime.training") is None
    ):  # to look for it imports onnxruntime
        missing = pytest.mark.skip(reason="onnxruntime-training is not installed")
        for item in marked:
            item.add_marker(missing)


def pytest_sessionfinish(session, exitstatus):
    """A whole suite that passes leaves what it ran on for the table of docs/support.md
    (`tests/documents/platforms.py`).
    """
    config = session.config
    part = config.option.keyword or config.getoption(
        "lf", False
    )  # which is not there without pytest's cache
    whole = config.args_source is config.ArgsSource.TESTPATHS and not part
    if (
        whole
        and exitstatus == 0
        and not hasattr(config, "workerinput")
        and not config.option.collectonly
    ):
        from tests.documents.platforms import ended  # noqa: PLC0415  (once in a suite)

        ended(config.option.markexpr)


@pytest.fixture
def collected(request):
    """The marks of every test of the files that pytest was asked for, whichever of the tests
    run.
    """
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for, and not whole files")
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Exports of the models that simulations share; many train the same one."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def typed(tmp_path, monkeypatch, capfd):
    """Runs the command in the test's folder and in this process, since to start one takes longer
    than most commands.
    """
    from shoal.cli.main import main  # noqa: PLC0415  (few tests need it)

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, said.out, said.err)

    return run

"""A project's folder from a template: files that are shipped as they are, but for the names in them."""

from pathlib import Path

from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.spelling import did_you_mean
from fleet_protocol.topics import check_name

_FOLDER = Path(__file__).parents[1] / "templates"
_COMMON = "common"
_SUFFIX = ".txt"
"""Behind the names of programs, so that nothing takes them for ours."""

TEMPLATES = tuple(sorted(path.name for path in _FOLDER.iterdir() if path.is_dir() and path.name != _COMMON))


def make_project(folder: Path, template: str, fleet: str) -> None:
    """Write model, data, configurations and the commands to run them into a new, or empty, folder.

    A file of the template's own counts before that of the same name which all share.

    Raises:
        ConfigError: there is no such template, the name is unusable, or the folder has something in it.
        StorageError: it cannot be written.
    """
    if template not in TEMPLATES:
        choice = f"choose one of {', '.join(TEMPLATES)}"
        raise ConfigError(f"--template: no template {template!r}{did_you_mean(template, TEMPLATES)}; {choice}")
    check_name("fleet", fleet)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; `shoal init` makes a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in (_FOLDER / _COMMON, _FOLDER / template):
            for path in source.iterdir():
                text = path.read_text(encoding="utf-8").replace("FLEET", fleet).replace("TEMPLATE", template)
                (folder / path.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error

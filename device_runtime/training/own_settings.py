"""Reads the settings that belong to one routine or one rule.

They are plain JSON in the offer, and a frozen value once read.
"""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError, ShoalError
from fleet_protocol.frozen import problems

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_settings(model: type[ModelT], settings: Mapping[str, JsonValue], owner: str) -> ModelT:
    """Read settings into a schema that forbids extra keys.

    Args:
        model: the schema.
        settings: settings of the offer.
        owner: owner for the message, as in ``routine train``.

    Raises:
        RefusedError: a key is unknown, missing or wrong; the message names it.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        text = f"settings of the {owner}: {problems(error, 'settings', 1)}"
        raise RefusedError(RefusalReason.MALFORMED, text) from error
    except ShoalError as error:
        raise RefusedError(RefusalReason.MALFORMED, f"settings of the {owner}: {error}") from error

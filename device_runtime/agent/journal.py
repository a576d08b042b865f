"""One log line per event, with the device, the round and the task in front."""

import logging

from fleet_protocol.messages import Offer

_LOG = logging.getLogger("shoal.device")


class Journal:
    """The log of one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._offer: Offer | None = None

    def follow(self, offer: Offer | None) -> None:
        """Name this task in the lines to come, or none."""
        self._offer = offer

    def _write(self, level: int, text: str, error: Exception | None = None) -> None:
        if not _LOG.isEnabledFor(level):
            return
        offer = self._offer
        where = f" round={offer.round} task={offer.task}" if offer else ""
        one_line = " ".join(text.split())
        known = {"round": offer.round, "task": offer.task} if offer else {}
        ids = {
            "device": self._device,
            **known,
            "said": one_line,
        }  # see `fleet_protocol.logs`
        _LOG.log(
            level,
            "device=%s%s %s",
            self._device,
            where,
            one_line,
            exc_info=error,
            extra=ids,
        )

    def info(self, text: str) -> None:
        """Something that is as it should be."""
        self._write(logging.INFO, text)

    def warning(self, text: str) -> None:
        """Something an operator may want to look at."""
        self._write(logging.WARNING, text)

    def error(self, text: str, error: Exception | None = None) -> None:
        """Something an operator must look at; a bug comes with its traceback."""
        self._write(logging.ERROR, text, error)

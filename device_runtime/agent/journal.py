"""One log line per event, beginning with the device, the round and the task."""

import logging

from fleet_protocol.messages import Offer

_LOG = logging.getLogger("shoal.device")


class Journal:
    """The log of one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._offer: Offer | None = None

    def follow(self, offer: Offer | None) -> None:
        """Name this task in the following lines; None for no task."""
        self._offer = offer

    def info(self, text: str) -> None:
        """Log normal operation."""
        self._write(logging.INFO, text)

    def warning(self, text: str) -> None:
        """Log something that an operator may want to look at."""
        self._write(logging.WARNING, text)

    def error(self, text: str, error: Exception | None = None) -> None:
        """Log something that an operator must look at; a bug is logged with its traceback."""
        self._write(logging.ERROR, text, error)

    def _write(
        self,
        level: int,
        text: str,
        error: Exception | None = None,
    ) -> None:
        if not _LOG.isEnabledFor(level):
            return
        one_line = " ".join(text.split())
        fields: dict[str, object] = {"device": self._device}
        where = ""
        if self._offer is not None:
            fields["round"] = self._offer.round
            fields["task"] = self._offer.task
            where = f" round={self._offer.round} task={self._offer.task}"
        fields["said"] = one_line  # the name of a line's text in `fleet_protocol.logs`
        _LOG.log(
            level,
            "device=%s%s %s",
            self._device,
            where,
            one_line,
            exc_info=error,
            extra=fields,
        )

"""Human activity from a wrist-worn 6-axis sensor: 7 exercises, recorded by 10 people.

The data are those of Burns, Leung, Hardisty, Whyne, Henry, McLachlin: "Shoulder physiotherapy
exercise recognition: machine learning the inertial signals from a smartwatch", Physiological
Measurement 2018, 50 samples a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import Dataset, dataset_folder, read_arrays

_Array = NDArray[np.float32]
_Numbers = NDArray[np.int64]


def windows(signal: _Array, size: int, step: int) -> _Array:
    """Cut a recording into windows.

    Args:
        signal: float32 [time, channels].
        size: time steps of a window.
        step: time steps from window to window.

    Returns:
        float32 [n, channels, size]; the remainder at the end is dropped, so n may be 0.
    """
    if len(signal) < size:
        return np.empty((0, signal.shape[1], size), np.float32)
    every_window = np.lib.stride_tricks.sliding_window_view(signal, size, axis=0)
    return every_window[::step].astype(np.float32)


def watch(
    root: Path | None,
    *,
    window: int = 128,
    step: int = 64,
    holdout: float = 0.25,
    test_subjects: Sequence[int] = (),
) -> Dataset:
    """Load the watch data as windows, each channel normalised by the training windows.

    By default the end of every recording is the test set, so each person has test samples. No
    window crosses the boundary.

    Args:
        root: folder that holds ``watch/``.
        window: time steps of a window; 128 are 2.56 s.
        step: time steps from window to window.
        holdout: share at the end of each recording that is tested on.
        test_subjects: people (1 to 10) to test on instead; they are then excluded from training.

    Returns:
        float32 [n, 6, window], 7 classes; groups are the people, numbered from 0.

    Raises:
        ConfigError: an option is out of range.
        DataError: the file is missing or damaged.
    """
    is_share = 0.0 < holdout < 1.0
    if window < 1 or step < 1 or not is_share:
        raise ConfigError(
            f"windows of {window} each {step} steps and a holdout of {holdout} cannot be cut"
        )
    recordings = _read(root)
    _require_subjects(recordings, test_subjects)
    train = _Side()
    test = _Side()
    for recording in recordings:
        length = len(recording.signal)
        # If people are held out, a whole recording is in one split.
        cut = int(length * (1.0 - holdout))
        # Held-out people have no training windows, and others no test windows.
        if test_subjects:
            cut = 0 if recording.subject in test_subjects else length
        train.add(windows(recording.signal[:cut], window, step), recording)
        test.add(windows(recording.signal[cut:], window, step), recording)
    if not train.count or not test.count:
        raise ConfigError(
            f"no window of {window} steps fits into the recordings; use a smaller window or"
            " another holdout"
        )
    first_subject = min(recording.subject for recording in recordings)
    train_x = np.concatenate(train.windows)
    test_x = np.concatenate(test.windows)
    # Computed from the training windows only, because the test set must not affect training.
    mean = train_x.mean((0, 2), keepdims=True)
    deviation = train_x.std((0, 2), keepdims=True)
    return Dataset(
        "watch",
        (train_x - mean) / deviation,
        train.labels,
        (test_x - mean) / deviation,
        test.labels,
        classes=max(recording.label for recording in recordings) + 1,
        # People are numbered from 1 in the file.
        train_group=train.subjects - first_subject,
        test_group=test.subjects - first_subject,
    )


@dataclass(frozen=True)
class _Recording:
    """One person doing one exercise."""

    signal: _Array  # [time, 6]
    label: int
    subject: int


@dataclass(frozen=True)
class _Side:
    """The windows for training or testing, by recording."""

    windows: list[_Array] = field(default_factory=list)
    recordings: list[_Recording] = field(default_factory=list)

    def add(self, windows: _Array, recording: _Recording) -> None:
        self.windows.append(windows)
        self.recordings.append(recording)

    @property
    def count(self) -> int:
        return sum(map(len, self.windows))

    @property
    def labels(self) -> _Numbers:
        """Return the label of each window."""
        return self._for_windows([recording.label for recording in self.recordings])

    @property
    def subjects(self) -> _Numbers:
        """Return the person of each window."""
        return self._for_windows([recording.subject for recording in self.recordings])

    def _for_windows(self, values: Sequence[int]) -> _Numbers:
        counts = list(map(len, self.windows))
        return np.repeat(np.array(values, np.int64), counts)


def _read(root: Path | None) -> list[_Recording]:
    path = dataset_folder(root, "watch", "watch.npz") / "watch.npz"
    signal, lengths, labels, subjects = read_arrays(path, ("signal", "length", "label", "subject"))
    if int(lengths.sum()) != len(signal):
        raise DataError(
            f"{path} is damaged: recordings of {lengths.sum()} steps in a signal of {len(signal)}"
        )
    # Recordings are stored end to end.
    ends = np.cumsum(lengths)
    recordings = []
    for end, length, label, subject in zip(ends, lengths, labels, subjects, strict=True):
        own_signal = signal[end - length : end]
        recordings.append(_Recording(own_signal, int(label), int(subject)))
    return recordings


def _require_subjects(recordings: Sequence[_Recording], wanted: Sequence[int]) -> None:
    subjects = {recording.subject for recording in recordings}
    for subject in sorted(wanted):
        if subject not in subjects:
            raise ConfigError(
                f"the watch data has no subject {subject}; choose from {sorted(subjects)}"
            )

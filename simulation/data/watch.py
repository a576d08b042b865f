"""Human activity from a wrist-worn 6-axis sensor: windows of recordings that 10 people made of 7
exercises.

The data are those of Burns, Leung, Hardisty, Whyne, Henry, McLachlin: "Shoulder physiotherapy
exercise recognition: machine learning the inertial signals from a smartwatch", Physiological
Measurement 2018, 50 samples a second.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError, DataError
from simulation.data.dataset import Dataset, dataset_folder, read_arrays

_Window = NDArray[np.float32]


def windows(signal: NDArray[np.float32], size: int, step: int) -> NDArray[np.float32]:
    """Cut a recording, float32 [time, channels], into windows of so many time steps, one every
    `step`.

    Returns:
        float32 [n, channels, size]; what is left at the end is dropped, so n may be 0.
    """
    if len(signal) < size:
        return np.empty((0, signal.shape[1], size), np.float32)
    return np.lib.stride_tricks.sliding_window_view(signal, size, axis=0)[::step].astype(np.float32)


def watch(
    root: Path | None,
    *,
    window: int = 128,
    step: int = 64,
    holdout: float = 0.25,
    test_subjects: Sequence[int] = (),
) -> Dataset:
    """Load the watch data as windows, each channel normalised by the training windows.

    By default the end of every recording is the test set, so each person has one. No window crosses
    the border.

    Args:
        root: folder that holds ``watch/``.
        window: time steps of a window; 128 are 2.56 s.
        step: time steps from window to window.
        holdout: share at the end of each recording that is tested on.
        test_subjects: people (1 to 10) to test on instead, who then have no part in the training.

    Returns:
        float32 [n, 6, window], 7 classes; groups are the people, numbered from 0.

    Raises:
        ConfigError: an option is out of range.
        DataError: the file is missing or damaged.
    """
    if window < 1 or step < 1 or not 0.0 < holdout < 1.0:
        raise ConfigError(
            f"windows of {window} each {step} steps and a holdout of {holdout} cannot be cut"
        )
    path = dataset_folder(root, "watch", "watch.npz") / "watch.npz"
    signal, lengths, labels, subjects = read_arrays(path, ("signal", "length", "label", "subject"))
    if int(lengths.sum()) != len(signal):
        raise DataError(
            f"{path} is damaged: recordings of {lengths.sum()} steps in a signal of {len(signal)}"
        )
    unknown = sorted(set(test_subjects) - set(subjects.tolist()))
    if unknown:
        raise ConfigError(
            f"nobody in the watch data is subject {unknown[0]}; there are {sorted(set(subjects))}"
        )
    parts: dict[bool, list[tuple[_Window, int, int]]] = {False: [], True: []}
    for end, length, label, subject in zip(
        np.cumsum(lengths), lengths, labels, subjects, strict=True
    ):
        recording = signal[end - length : end]
        # All of a recording is on one side when people are held out.
        cut = (
            int(length * (1.0 - holdout))
            if not test_subjects
            else (0 if subject in test_subjects else int(length))
        )
        for test, piece in ((False, recording[:cut]), (True, recording[cut:])):
            parts[test].append(
                (
                    windows(piece, window, step),
                    int(label),
                    int(subject) - int(subjects.min()),
                )
            )
    (train_x, train_y, train_group), (test_x, test_y, test_group) = (
        _joined(parts[test]) for test in (False, True)
    )
    if not len(train_y) or not len(test_y):
        raise ConfigError(
            f"no window of {window} steps fits; choose a smaller window or another holdout"
        )
    mean = train_x.mean((0, 2), keepdims=True)
    deviation = train_x.std((0, 2), keepdims=True)
    return Dataset(
        "watch",
        (train_x - mean) / deviation,
        train_y,
        (test_x - mean) / deviation,
        test_y,
        classes=int(labels.max()) + 1,
        train_group=train_group,
        test_group=test_group,
    )


def _joined(
    parts: list[tuple[_Window, int, int]],
) -> tuple[_Window, NDArray[np.int64], NDArray[np.int64]]:
    counts = [len(piece) for piece, _, _ in parts]
    labels = np.repeat(np.array([label for _, label, _ in parts], np.int64), counts)
    people = np.repeat(np.array([person for _, _, person in parts], np.int64), counts)
    return np.concatenate([piece for piece, _, _ in parts]), labels, people

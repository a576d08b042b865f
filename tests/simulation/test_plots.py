"""Plots: the lines are where the numbers say, the legend says what they are, and files are written
whole.
"""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from fleet_protocol.errors import DataError
from simulation.results.curves import Curve
from simulation.results.figures import save
from simulation.results.plots import over_rounds, over_spent, plot_run
from simulation.results.quantities import Quantity
from simulation.results.rounds import RoundRow
from simulation.results.tier_plots import Widths, tier_counts, widths_by_device


def a_run(accuracies, *, seconds: float = 10.0, tiers=None) -> list[RoundRow]:
    return [
        RoundRow(
            round=number,
            version=number,
            accuracy=accuracy,
            loss=None,
            train_loss=None,
            devices=4,
            tiers=tiers or {"w1.00-d1": 1, "w0.25-d1": 3},
            simulated_seconds=seconds,
            simulated_total=seconds * number,
            seconds=0.5,
            payload_bytes=10,
            local_accuracy=None,
        )
        for number, accuracy in enumerate(accuracies, start=1)
    ]


def lines(figure) -> dict[str, list[list[float]]]:
    (axes,) = figure.axes
    return {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()}


def legend(figure) -> list[str]:
    (axes,) = figure.axes
    shown = axes.get_legend()
    return [] if shown is None else [text.get_text() for text in shown.get_texts()]


def bands(figure) -> list[list[list[float]]]:
    (axes,) = figure.axes
    return [collection.get_paths()[0].vertices for collection in axes.collections]


def test_curves_of_several_panels_are_drawn_apart():
    """Each panel has its name, its own curves, and the targets of these; colours begin anew."""
    targets = {"iid": [0.6], "skewed": [0.4]}
    curves = [
        Curve(name, [a_run([0.5, 0.75])], panel=panel, targets=own)
        for panel, own in targets.items()
        for name in "ab"
    ]
    for draw in (over_rounds, partial(over_spent, "time"), partial(over_spent, "bytes")):
        panels = draw(curves).axes
        assert [axes.get_title(loc="left") for axes in panels] == ["iid", "skewed"]
        for axes, target in zip(panels, (60, 40), strict=True):
            assert [line.get_label() for line in axes.lines] == ["a", "b", f"target {target}%"]
        assert len({tuple(line.get_color() for line in axes.lines) for axes in panels}) == 1


def test_rounds_without_an_evaluation_are_left_out():
    """One run is one line through its evaluated rounds, without band or legend."""
    figure = over_rounds([Curve("ours", [a_run([None, 0.5, None, 0.75])])])
    assert lines(figure) == {"ours": [[2, 0.5], [4, 0.75]]}
    assert not bands(figure)
    assert legend(figure) == []
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy")


def test_seeds_are_a_mean_and_a_band():
    """The line is the seeds' mean in the rounds they share, the band goes from the lowest to the
    highest.
    """
    ours = Curve("ours", [a_run([0.25, 0.5, 0.9]), a_run([0.75, 1.0])], targets=[0.9])
    figure = over_rounds([ours, Curve("theirs", [a_run([0.125, 0.25])])])
    drawn = lines(figure)
    assert drawn["ours (2 seeds)"] == [[1, 0.5], [2, 0.75]]
    assert drawn["theirs"] == [[1, 0.125], [2, 0.25]]
    assert legend(figure) == ["ours (2 seeds)", "theirs", "target 90%"]
    ((band),) = bands(figure)
    assert {tuple(point) for point in band} == {(1, 0.25), (2, 0.5), (1, 0.75), (2, 1.0)}


def test_published_values_stand_at_the_edge_and_lines_differ_without_colour():
    """The value is in the legend, too; of as many lines as there are colours none has the style of
    the one before.
    """
    curves = [
        Curve(f"arm {number}", [a_run([0.25, 0.5])], 0.875 if number else None)
        for number in range(7)
    ]
    figure = over_rounds(curves)
    assert legend(figure)[:2] == ["arm 0", "arm 1, published 87.5%"]
    drawn = figure.axes[0].get_lines()
    marks = [line.get_ydata() for line in drawn if line.get_marker() == "<"]
    assert [list(map(float, mark)) for mark in marks] == [[0.875]] * 6
    styles = [line.get_linestyle() for line in drawn if line.get_marker() != "<"]
    assert all(before != after for before, after in itertools.pairwise(styles))


def test_other_quantities_have_their_own_axis():
    """What was not evaluated for them is left out; only shares are in %."""
    rows = [
        replace(row, perplexity=value)
        for row, value in zip(a_run([0.1, 0.2]), (None, 42.0), strict=True)
    ]
    quantity = Quantity("perplexity", "perplexity", lambda row: row.perplexity)
    figure = over_rounds([Curve("ours", [rows], targets=[40.0])], quantity=quantity)
    assert lines(figure)["ours"] == [[2, 42.0]]
    assert figure.axes[0].get_ylabel() == "perplexity"
    assert legend(figure) == ["ours", "target 40"]
    figure.canvas.draw()
    assert not any("%" in text.get_text() for text in figure.axes[0].get_yticklabels())


def test_time_is_shown_in_a_unit_that_fits():
    """Seconds, minutes or hours, by the longest run."""
    for seconds, unit, last in ((10, "seconds", 20), (300, "minutes", 10), (36_000, "hours", 20)):
        figure = over_spent("time", [Curve("ours", [a_run([0.25, 0.5], seconds=seconds)])])
        assert figure.axes[0].get_xlabel() == f"simulated time, {unit}"
        assert lines(figure)["ours"] == [[last / 2, 0.25], [last, 0.5]]


def test_seeds_with_different_times_meet_in_between():
    """Each seed is interpolated over its own time; the mean is drawn where every seed has a
    value.
    """
    fast = a_run([0.0, 0.4, 0.8], seconds=10)
    slow = a_run([0.0, 1.0], seconds=20)
    figure = over_spent("time", [Curve("ours", [fast, slow])])
    points = np.array(lines(figure)["ours (2 seeds)"])
    assert points[0].tolist() == pytest.approx([20, (0.4 + 0.0) / 2])
    assert points[-1].tolist() == pytest.approx([30, (0.8 + 0.5) / 2])
    assert (np.diff(points[:, 0]) > 0).all()


def test_a_curve_without_values_does_not_hide_the_others():
    """What was never evaluated has no line; if that is all there is, the error says what to do."""
    never = Curve("never", [a_run([None, None])])
    apart = Curve("apart", [a_run([0.5], seconds=1.0), a_run([0.5], seconds=9.0)])
    for draw in (over_rounds, partial(over_spent, "time")):
        assert list(lines(draw([never, Curve("ours", [a_run([0.5])])]))) == ["ours"]
        with pytest.raises(DataError, match="no round was evaluated"):
            draw([never])
    assert list(lines(over_spent("time", [apart, Curve("ours", [a_run([0.5])])]))) == ["ours"]


def test_bytes_add_up_over_all_rounds():
    """Also those of rounds that were not judged."""
    rows = [replace(item, payload_bytes=2_000_000) for item in a_run([0.25, None, 0.5])]
    assert lines(over_spent("bytes", [Curve("ours", [rows])])) == {
        "ours": [[2.0, 0.25], [6.0, 0.5]]
    }


def test_widths_are_a_picture_of_devices_by_rounds():
    """Wide is darker than narrow, also in grey; who did not take part has no colour; equal devices
    share a label.
    """
    run = Widths("ours", ["fast", "fast", "slow"], {3: (1.0, 0.5, None), 4: (1.0, 1.0, 0.25)})
    figure = widths_by_device([run, Widths("theirs", ["slow"], {3: (0.5,)})], title="widths")
    figure.draw_without_rendering()
    first, second, bar = figure.axes
    (mesh,) = (item for item in first.collections if hasattr(item, "get_coordinates"))
    assert [text.get_text() for text in first.get_yticklabels()] == ["fast", "slow"]
    assert first.get_yticks().tolist() == [1.0, 2.5]
    assert mesh.get_array().filled(-1).tolist() == [[2, 2], [1, 2], [-1, 0]]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [2.5, 3.5, 4.5]
    grey = (mesh.get_facecolors() @ [0.299, 0.587, 0.114, 0.0]).tolist()
    assert grey[0] < grey[2] < grey[5]
    assert mesh.get_facecolors()[4, 3] == 0.0
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0.25", "0.5", "1"]
    assert second.get_title(loc="left") == "theirs"


def test_tiers_are_stacked_from_the_largest():
    """Each tier's bars lie on those of the larger ones, and the highest reach the number of
    devices.
    """
    rows = a_run([None, None])
    rows[1] = replace(rows[1], tiers={"w1.00-d1": 3, "w0.50-d1": 1})
    figure = tier_counts(rows)
    (axes,) = figure.axes
    drawn = {patch.get_label(): patch.get_data() for patch in axes.patches}
    assert list(drawn) == ["width 1", "width 0.5", "width 0.25"]
    assert [stairs.values.tolist() for stairs in drawn.values()] == [[1, 3], [1, 4], [4, 4]]
    assert [np.asarray(stairs.baseline).tolist() for stairs in drawn.values()] == [
        [0, 0],
        [1, 3],
        [1, 4],
    ]
    assert drawn["width 1"].edges.tolist() == [0.5, 1.5, 2.5]
    assert legend(figure) == ["width 0.25", "width 0.5", "width 1"]


def test_many_rounds_are_averaged():
    """A bar stands for several rounds, the last one for the rest, and the axis says so."""
    rows = [
        replace(row, tiers={"w1.00-d2": 2 * (row.round % 2), "w1.00-d1": 1})
        for row in a_run([None] * 401)
    ]
    (axes,) = tier_counts(rows).axes
    deep = axes.patches[0].get_data()
    assert axes.patches[0].get_label() == "width 1, depth 2"
    assert axes.get_ylabel() == "devices, mean of 3 rounds"
    assert len(deep.values) == 134
    assert deep.values[:2] == pytest.approx([4 / 3, 2 / 3])
    assert deep.values[-1] == pytest.approx(1.0)
    assert deep.edges[[0, 1, -1]].tolist() == [0.5, 3.5, 401.5]
    with pytest.raises(DataError, match="no round to plot"):
        tier_counts([])


def test_the_plots_of_a_run_are_files(tmp_path):
    """A run has three plots, one if nothing was evaluated; the same rows make the same bytes."""
    rows = a_run([0.25, 0.5])
    written = plot_run(tmp_path, rows, title="two rounds")
    assert [path.name for path in written] == ["accuracy.png", "accuracy_time.png", "tiers.png"]
    content = [path.read_bytes() for path in written]
    assert all(data.startswith(b"\x89PNG") for data in content)
    assert [path.read_bytes() for path in plot_run(tmp_path, rows, title="two rounds")] == content
    assert [path.name for path in plot_run(tmp_path / "blind", a_run([None]))] == ["tiers.png"]
    numbers = [replace(row, loss=1.0, metrics={"mae": 0.5, "rmse": 1.0}) for row in a_run([None])]
    names = ["loss.png", "loss_time.png", "mae.png", "rmse.png", "tiers.png"]
    assert [path.name for path in plot_run(tmp_path / "numbers", numbers)] == names
    assert save(tier_counts(rows), tmp_path / "tiers.svg").read_bytes().startswith(b"<?xml")


def test_long_words_lie_within_the_picture():
    """A title longer than the figure is wide, and more arms than beside it would find room."""
    runs = [a_run([0.1, 0.5])] * 2
    arms = [
        Curve(f"federated-dropout/cifar10-high-{at}", runs, 0.7, targets=[0.7]) for at in range(24)
    ]
    figure = over_rounds(arms, title="the simulated hours to a target accuracy, " * 4)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.bbox.width > figure.bbox.width / 3
    for text in (*figure.texts, *axes.get_legend().get_texts(), axes.xaxis.label, axes.yaxis.label):
        box = text.get_window_extent()
        whole = figure.bbox
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1, text

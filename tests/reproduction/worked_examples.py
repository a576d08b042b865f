"""Worked examples with other numbers than the published ones, computed here in plain Python from
the definitions.

Nothing of the product is imported: each function makes an entry of the same form as those of the
shared file.
"""

import math
import random
from typing import Any


def _matrix(rng: random.Random, rows: int, columns: int) -> list[list[float]]:
    return [[round(rng.uniform(-3, 3), 3) for _ in range(columns)] for _ in range(rows)]


def h1() -> dict[str, Any]:
    sizes = [10, 7, 48]
    rates = {"a": 1.0, "b": 0.4, "c": 0.2}
    keep = {
        "a": [10, 7, 48],
        "b": [4, 3, 20],
        "c": [2, 2, 10],
    }  # 2.8 -> 3, 19.2 -> 20, 1.4 -> 2, 9.6 -> 10
    # Relative to b, with 4, 3 and 20 channels: a half of them for c.
    relative = {"b": [4, 3, 20], "c": [2, 2, 10]}
    return {
        "id": "H1-sizes",
        "inputs": {"K": sizes, "rates": rates, "odd": [[9, 0.3], [100, 0.29], [1, 0.01]]},
        # 2.7 -> 3; 100 x 0.29 is 28.999999999999996; at least one
        "expected": {"levels": keep, "odd": [3, 29, 1], "relative_to_b": relative},
    }


def _nested_average(
    old: list[list[float]], clients: list[tuple[list[int], list[int], list[list[float]]]]
) -> Any:
    new = [list(row) for row in old]
    counts = [[0] * len(row) for row in old]
    for i in range(len(old)):
        for j in range(len(old[0])):
            held = [
                returned[rows.index(i)][columns.index(j)]
                for rows, columns, returned in clients
                if i in rows and j in columns
            ]
            counts[i][j] = len(held)
            if held:
                new[i][j] = sum(held) / len(held)
    return new, counts


def h2(seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)
    size = 6
    old = _matrix(rng, size, size)
    clients = []
    given = {}
    for name, share, kept in (("A", 1.0, 6), ("B", 0.5, 3), ("C", 0.3, 2), ("D", 0.5, 3)):
        units = list(range(kept))
        returned = _matrix(rng, kept, kept)
        clients.append((units, units, returned))
        given[name] = {"s": share, "idx": units, "returned": returned}
    new, counts = _nested_average(old, clients)
    return {
        "id": "H2-overlap",
        "inputs": {"W_global": old, "clients": given},
        "expected": {"W_new": new, "count": counts},
    }


def h3(seed: int = 1) -> dict[str, Any]:
    rng = random.Random(seed)
    rows = 3
    columns = 5
    old = _matrix(rng, rows, columns)
    bias = [1.0, -2.0, 0.5]
    given = []
    clients = []
    bias_clients = []
    for name, share, kept, labels in (
        ("A", 1.0, 5, [0]),
        ("B", 0.4, 2, [0, 1]),
        ("C", 0.2, 1, [1]),
    ):
        returned = _matrix(rng, rows, kept)
        returned_bias = [rng.random() for _ in range(rows)]
        given.append(
            {
                "name": name,
                "s": share,
                "labels": labels,
                "in_idx": list(range(kept)),
                "returned_W": returned,
                "returned_b": returned_bias,
            }
        )
        held = [row for position, row in enumerate(returned) if position in labels]
        clients.append((labels, list(range(kept)), held))
        bias_clients.append((labels, [0], [[returned_bias[label]] for label in labels]))
    new, counts = _nested_average(old, clients)
    new_bias, bias_counts = _nested_average([[value] for value in bias], bias_clients)
    return {
        "id": "H3-classifier",
        "inputs": {"W_global": old, "b_global": bias, "clients": given},
        "expected": {
            "W_new": new,
            "W_count": counts,
            "b_new": [row[0] for row in new_bias],
            "b_count": [row[0] for row in bias_counts],
        },
    }


def h6() -> dict[str, Any]:
    logits = [0.3, 2.0, -1.5, 0.7, 0.1]
    present = [1, 2, 4]
    target = 4
    masked = [value if label in present else 0.0 for label, value in enumerate(logits)]
    total = sum(math.exp(value) for value in masked)
    probs = [math.exp(value) / total for value in masked]
    return {
        "id": "H6-masked-ce",
        "inputs": {"logits": logits, "present": present, "target": target},
        "expected": {
            "masked_logits": masked,
            "probs": probs,
            "loss": -math.log(probs[target]),
            "grad_logits": [
                (p - (label == target)) * (label in present) for label, p in enumerate(probs)
            ],
            "loss_unmasked": math.log(sum(math.exp(value) for value in logits)) - logits[target],
        },
    }


def h8() -> dict[str, Any]:
    batches = [[0.5, -1.0, 2.0], [4.0, 4.5], [9.0, -9.0, 1.0, 2.0]]
    trace = []
    mean = 0.0
    variance = 0.0
    for number, batch in enumerate(batches, 1):
        centre = sum(batch) / len(batch)
        spread = sum((value - centre) ** 2 for value in batch) / (len(batch) - 1)
        mean += (centre - mean) / number
        variance += (spread - variance) / number
        trace.append([mean, variance])
    values = [value for batch in batches for value in batch]
    centre = sum(values) / len(values)
    return {
        "id": "H8-sbn",
        "inputs": {"batches": batches},
        "expected": {
            "trace": trace,
            "running_mean": mean,
            "running_var": variance,
            "pooled_mean": centre,
            "pooled_var_unbiased": sum((value - centre) ** 2 for value in values)
            / (len(values) - 1),
        },
    }


def h9() -> dict[str, Any]:
    return {
        "id": "H9-fix",
        "inputs": {"cases": [["b3-d1", 9], ["a0-e5", 7], ["a1-c2", 100]]},
        "expected": {
            "b3_d1": [0.5] * 6 + [0.125] * 3,
            "a0_e5": [0.0625] * 7,
            "counted": {"1": 33, "0.25": 67},
        },
    }


def h10() -> dict[str, Any]:
    # 12 devices x 3 shards over 6 classes: 6 shards each; 50 samples: 9 9 8 8 8 8; all three alike:
    # 5/35 * 4/34.
    return {
        "id": "H10-shards",
        "inputs": {"users": [12], "shards_per_user": 3, "classes": [6], "class_sizes": [50]},
        "expected": {
            "other": {"shards_per_class": 6, "sizes": [9, 9, 8, 8, 8, 8]},
            "prob_client_has_one_class_only": 5 / 35 * 4 / 34,
        },
    }


def h11() -> dict[str, Any]:
    schedule = {"lr": 0.03, "milestones": [4, 7], "factor": 0.5}
    return {
        "id": "H11-lr",
        "inputs": {"heterofl": schedule, "fedrolex": schedule},
        "expected": {
            "heterofl": {"4": 0.03, "5": 0.015, "7": 0.015, "8": 0.0075},
            "fedrolex": {"3": 0.03, "4": 0.015, "6": 0.015, "7": 0.0075},
        },
    }


def h12() -> dict[str, Any]:
    """A smaller CNN: 3x3 kernels and a bias, norm scale and shift, a linear layer with 10
    labels.
    """

    def count(widths: list[int]) -> int:
        total = 0
        inputs = 1
        for width in widths:
            total += 9 * inputs * width + width + 2 * width
            inputs = width
        return total + 10 * inputs + 10

    def level(divisor: int) -> dict[str, float]:
        number = count([width // divisor for width in (16, 32, 64)])
        return {"conv": number, "conv_MB": round(number * 4 / 2**20, 2)}

    return {
        "id": "H12-params",
        "inputs": {"conv": [16, 32, 64]},
        "expected": {"a": level(1), "b": level(2), "d": level(8)},
    }


def r_windows(down: bool) -> dict[str, Any]:
    size = 7
    rounds = [0, 3, 6, 7, 20]
    sign = -1 if down else 1

    def window(kept: int) -> list[list[int]]:
        return [[(sign * start + step) % size for step in range(kept)] for start in rounds]

    return {
        "id": "R2-window-code" if down else "R1-window",
        "inputs": {"K": size, "n": [1, 5], "rounds": rounds},
        "expected": {"n1": window(1), "n5": window(5)},
    }


def r4() -> dict[str, Any]:
    return {
        "id": "R4-coverage",
        "inputs": {"cases": [[4, 3, 2], [3, 1, 5]]},
        "expected": {
            "counts": {"K4_n3_R2": [1, 2, 2, 1], "K3_n1_R5": [2, 2, 1]},
            "rounds_to_cover": {"K9_n4": 6},
        },
    }


def r5() -> dict[str, Any]:
    # Two of three units: the first draw misses one; each later one hits it with probability 2/3: 1
    # + 3/2 rounds. One of two: 1 + 2 rounds.
    return {
        "id": "R5-dropout",
        "inputs": {"cases": [[3, 2], [2, 1]]},
        "expected": {
            "expected_rounds_to_cover": {"K3_n2": 2.5, "K2_n1": 3.0},
            "rolling_rounds_to_cover": {"K3_n2": 2, "K2_n1": 2},
            "inclusion_probability": {"K3_n2": 2 / 3, "K2_n1": 0.5},
            "prob_node_untouched_after_R": {"K3_n2_R2": 1 / 9, "K2_n1_R3": 0.125},
        },
    }


def r6(seed: int = 2) -> dict[str, Any]:
    rng = random.Random(seed)
    size = 5
    start = 8
    old = _matrix(rng, size, size)
    expected = {}
    for key, sign in (("paper", 1), ("code", -1)):
        given = []
        clients = []
        for share, kept, delta in ((0.6, 3, 0.5), (0.8, 4, -1.25), (0.2, 1, 3.0)):
            units = [(sign * start + step) % size for step in range(kept)]
            given.append({"s": share, "out_idx": units, "in_idx": units, "delta": delta})
            clients.append((units, units, [[old[i][j] + delta for j in units] for i in units]))
        new, counts = _nested_average(old, clients)
        expected[key] = {"clients": given, "W_new": new, "count": counts}
    return {"id": "R6-aggregate", "inputs": {"W_global": old, "j": start}, "expected": expected}


def r8() -> dict[str, Any]:
    values = [0.5, -2.0, 3.25]
    widths = [8, 4, 1]
    mean = sum(values) / 3
    by_width = sum(v * w for v, w in zip(values, widths, strict=True)) / sum(widths)
    return {
        "id": "R8-weighting",
        "inputs": {"local_values": values, "local_widths": widths, "previous_updates": 9},
        "expected": {"avg": mean, "width": by_width, "updates": mean, "updates_width": by_width},
    }


def _fedadam(weight: float, moments: list[float], update: float, given: dict[str, float]) -> float:
    moments[0] = given["beta1"] * moments[0] + (1 - given["beta1"]) * update
    moments[1] = given["beta2"] * moments[1] + (1 - given["beta2"]) * update**2
    return weight + given["eta"] * moments[0] / (math.sqrt(moments[1]) + given["tau"])


def i1(seed: int = 3, rounds: int = 4) -> dict[str, Any]:  # noqa: C901  ()
    """Depths 1, 3 and 4; in one round nobody of the middle group takes part, in another nobody of
    the deepest.
    """
    rng = random.Random(seed)
    depths = {"a": 1, "b": 3, "c": 4}
    adam = {"beta1": 0.8, "beta2": 0.95, "eta": 0.05, "tau": 0.01}
    beta = 0.3
    numbers = {"emb": 0.5, "l1": 1.5, "l2": -1.0, "l3": 2.0, "l4": 0.25}
    models = {
        group: {name: numbers[name] for name in ["emb", *(f"l{n}" for n in range(1, depth + 1))]}
        | {"head": rng.uniform(-1, 1)}
        for group, depth in depths.items()
    }
    init = {group: dict(model) for group, model in models.items()}
    moments = {group: {name: [0.0, 0.0] for name in model} for group, model in models.items()}
    taught = {"b": 0.0, "c": 0.0}
    sampled = [
        {"a": 2, "b": 1, "c": 1},
        {"a": 1, "b": 0, "c": 3},
        {"a": 2, "b": 2, "c": 0},
        {"a": 1, "b": 1, "c": 1},
    ]
    given = []
    expected = []
    for number in range(rounds):
        counts = sampled[number]
        updates = {
            group: [
                {name: round(rng.uniform(-1, 1), 2) for name in models[group]}
                for _ in range(counts[group])
            ]
            for group in depths
        }
        given.append(updates)
        present = [group for group in depths if counts[group]]
        mean = {
            g: {name: sum(u[name] for u in updates[g]) / counts[g] for name in models[g]}
            for g in present
        }
        changed = {group: dict(update) for group, update in mean.items()}
        used = dict(taught)
        for group, teacher, layer in (("a", "b", "l1"), ("b", "c", "l3")):
            if group in changed:
                changed[group][layer] = beta * used[teacher] + (1 - beta) * mean[group][layer]
        for group in present:
            for name, update in changed[group].items():
                models[group][name] = _fedadam(
                    models[group][name], moments[group][name], update, adam
                )
        after = {group: dict(models[group]) for group in present}
        if "b" in changed:
            taught["b"] = sum(changed["b"][f"l{n}"] for n in (1, 2, 3)) / 3
        if "c" in changed:
            taught["c"] = sum(changed["c"][f"l{n}"] for n in (3, 4)) / 2
        for name, owners in (("emb", "abc"), ("l1", "bc"), ("l2", "bc")):
            total = sum(counts[group] for group in owners)
            if total:
                value = sum(counts[group] * models[group][name] for group in owners) / total
                for group in owners:
                    models[group][name] = value
        expected.append(
            {
                "t": number + 1,
                "n": counts,
                "mean_update": mean,
                "update_after_distillation": changed,
                "momentum_used": used,
                "momentum_new": dict(taught),
                "after_fedadam": after,
                "after_aggregation": {group: dict(model) for group, model in models.items()},
            }
        )
    inputs = {
        "depths": depths,
        "beta": beta,
        "fedadam": adam,
        "init": init,
        "client_updates": given,
    }
    return {"id": "I1-round", "inputs": inputs, "expected": expected}


def i2() -> dict[str, Any]:
    return {
        "id": "I2-ranges",
        "inputs": {"depths": {"a": 2, "b": 4, "c": 6, "d": 9}},
        "expected": {
            "momentum_b_layers": [2, 3, 4],
            "momentum_d_layers": [6, 7, 8, 9],
            "injected_into": {"a": 2, "b": 4, "c": 6},
            "shared_by_abcd": [1],
            "shared_by_bcd": [2, 3],
            "shared_by_cd": [4, 5],
            "only_d": [6, 7, 8, 9],
            "isolated": {"a": 2, "b": 4, "c": 6, "d": 9},
        },
    }


def i3() -> dict[str, Any]:
    given = {
        "g": [-2.0, 0.0, 3.0, 0.125],
        "beta1": 0.5,
        "beta2": 0.75,
        "eta": 0.2,
        "tau": 0.1,
        "w0": 1.0,
    }
    rows = []
    weight = 1.0
    moments = [0.0, 0.0]
    for update in given["g"]:
        weight = _fedadam(weight, moments, update, given)
        rows.append([*moments, weight])
    return {"id": "I3-fedadam", "inputs": given, "expected": {"m_v_w": rows}}


def i4() -> dict[str, Any]:
    return {
        "id": "I4-absent",
        "inputs": {"n": {"a": 0, "b": 5, "c": 3}},
        "expected": {
            "layers_shared_by_abc": [0.0, 0.625, 0.375],
            "layers_shared_by_bc": [None, 0.625, 0.375],
        },
    }


def w1(form: str = "reciprocal_of_sum", seed: int = 4, rounds: int = 30) -> dict[str, Any]:
    rng = random.Random(seed)
    given = {
        "alpha": 3.0,
        "target_loss": 0.1,
        "delta_th": 0.1,
        "beta": 0.25,
        "gamma": 1.5,
        "theta": 2.0,
        "TE0": 1.0,
    }
    devices = {}
    expected = {}
    for name, cap in (("A", 1.0), ("B", 0.25), ("C", 0.0625)):
        compute = rng.uniform(0.2, 1)
        transmit = [rng.uniform(0.1, 1) for _ in range(rounds)]
        loss = [2.0 * 0.9**number + rng.uniform(0, 0.05) for number in range(rounds)]
        devices[name] = {"Tcp": compute, "Tcm": transmit, "smax": cap, "loss": loss}
        progress = given["TE0"]
        rows = []
        for r in range(rounds):
            if r >= 2 and abs(loss[r - 1] - loss[r - 2]) <= given["delta_th"]:
                progress += (
                    given["beta"]
                    if loss[r - 1] >= given["alpha"] * given["target_loss"]
                    else -given["beta"]
                )
            speed = (
                1 / transmit[r] + 1 / compute
                if form == "sum_of_reciprocals"
                else 1 / (transmit[r] + compute)
            )
            value = speed * math.copysign(abs(progress) ** given["gamma"], progress)
            share = min(max(value / given["theta"], 0.0), 1.0)
            wanted = (
                1.0 if share >= 0.8 else 0.5 if share >= 0.6 else 0.25 if share >= 0.4 else 0.125
            )
            wanted = 0.0625 if share < 0.2 else wanted
            rows.append(
                {
                    "r": r,
                    "SE": speed,
                    "TE": progress,
                    "U": value,
                    "Un": share,
                    "wanted_rate": wanted,
                    "rate": min(wanted, cap),
                }
            )
        expected[name] = rows
    return {
        "id": f"W1-trace-{form}",
        "inputs": {"devices": devices, **given, "SE": form},
        "expected": expected,
    }


def w3() -> dict[str, Any]:
    # 0.01 s x 8 x 3 = 0.24 s; a half: 0.12 s and a quarter of 2 s.
    return {
        "id": "W3-latency",
        "inputs": {
            "batch": 8,
            "K": 3,
            "step_time": {"board": {"1": 0.01, "0.5": 0.005}},
            "full_comm_time": {"board": 2.0},
            "assignment": {"board": 0.5},
        },
        "expected": {
            "all_full": {"board": 2.24},
            "round_all_full": 2.24,
            "assigned": {"board": 0.62},
            "round_assigned": 0.62,
        },
    }


def _softmax(logits: list[float]) -> list[float]:
    top = sum(math.exp(value) for value in logits)
    return [math.exp(value) / top for value in logits]


def _mutual(
    own: list[list[float]], other: list[list[float]], labels: list[int], trust: float
) -> dict[str, Any]:
    p = [_softmax(row) for row in own]
    q = [_softmax(row) for row in other]
    size = len(own)
    entropy = -sum(math.log(row[label]) for row, label in zip(p, labels, strict=True)) / size
    divergence = (
        sum(
            b * math.log(b / a)
            for x, y in zip(p, q, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        / size
    )
    slope = [
        [
            (trust * (a - (j == label)) + (1 - trust) * (a - b)) / size
            for j, (a, b) in enumerate(zip(x, y, strict=True))
        ]
        for x, y, label in zip(p, q, labels, strict=True)
    ]
    return {
        "p": p,
        "ce": entropy,
        "kl": divergence,
        "loss": trust * entropy + (1 - trust) * divergence,
        "grad": slope,
    }


def f1(seed: int = 5) -> dict[str, Any]:
    rng = random.Random(seed)
    personal = _matrix(rng, 3, 4)
    meme = _matrix(rng, 3, 4)
    labels = [3, 0, 1]
    one = _mutual(personal, meme, labels, 0.2)
    two = _mutual(meme, personal, labels, 0.9)
    return {
        "id": "F1-loss",
        "inputs": {
            "logits_personal": personal,
            "logits_meme": meme,
            "labels": labels,
            "alpha": 0.2,
            "beta": 0.9,
        },
        "expected": {
            "p_personal": one["p"],
            "p_meme": two["p"],
            "ce_personal": one["ce"],
            "ce_meme": two["ce"],
            "kl_meme_to_personal": one["kl"],
            "kl_personal_to_meme": two["kl"],
            "loss_personal": one["loss"],
            "loss_meme": two["loss"],
            "grad_personal": one["grad"],
            "grad_meme": two["grad"],
        },
    }


def f2() -> dict[str, Any]:
    given = f1()["inputs"]
    personal = given["logits_personal"]
    meme = given["logits_meme"]
    labels = given["labels"]
    return {
        "id": "F2-limits",
        "inputs": {"same": "F1"},
        "expected": {
            "grad_personal_alpha1": _mutual(personal, meme, labels, 1.0)["grad"],
            "grad_meme_beta0": _mutual(meme, personal, labels, 0.0)["grad"],
        },
    }


def f3(seed: int = 6) -> dict[str, Any]:
    rng = random.Random(seed)
    rows = 4
    columns = 3
    lr = 0.3
    alpha = 0.4
    beta = 0.6
    old = _matrix(rng, rows, columns)
    personals = [_matrix(rng, rows, columns) for _ in range(3)]
    data = [
        {"X": _matrix(rng, count, columns), "y": [rng.randrange(rows) for _ in range(count)]}
        for count in (2, 5, 1)
    ]

    def logits(weights: list[list[float]], x: list[list[float]]) -> list[list[float]]:
        return [
            [sum(a * b for a, b in zip(row, sample, strict=True)) for row in weights]
            for sample in x
        ]

    def stepped(
        weights: list[list[float]], slope: list[list[float]], x: list[list[float]]
    ) -> list[list[float]]:
        return [
            [
                weights[i][j] - lr * sum(slope[k][i] * x[k][j] for k in range(len(x)))
                for j in range(columns)
            ]
            for i in range(rows)
        ]

    new_personals = []
    memes = []
    for personal, batch in zip(personals, data, strict=True):
        z = logits(personal, batch["X"])
        m = logits(old, batch["X"])
        new_personals.append(
            stepped(personal, _mutual(z, m, batch["y"], alpha)["grad"], batch["X"])
        )
        memes.append(stepped(old, _mutual(m, z, batch["y"], beta)["grad"], batch["X"]))

    def mean(weights: list[float]) -> list[list[float]]:
        total = sum(weights)
        return [
            [
                sum(w * meme[i][j] for w, meme in zip(weights, memes, strict=True)) / total
                for j in range(columns)
            ]
            for i in range(rows)
        ]

    return {
        "id": "F3-round",
        "inputs": {
            "global_": old,
            "personal": personals,
            "data": data,
            "alpha": alpha,
            "beta": beta,
            "lr": lr,
        },
        "expected": {
            "simultaneous": {
                "personal": new_personals,
                "meme": memes,
                "global_new": mean([1.0, 1.0, 1.0]),
                "global_if_sample_weighted": mean([2.0, 5.0, 1.0]),
            }
        },
    }


def d1(seed: int = 9) -> dict[str, Any]:
    rng = random.Random(seed)
    exits = [_matrix(rng, 3, 4) for _ in range(3)]
    labels = [3, 0, 1]
    temperature = 1.5
    distillation = 0.3
    inner = 0.6
    size = len(labels)
    shares = [[_softmax(row) for row in logits] for logits in exits]
    softened = []
    for logits in exits:
        softened.append([_softmax([value / temperature for value in row]) for row in logits])
    entropies = []
    for one in shares:
        logs = [math.log(row[label]) for row, label in zip(one, labels, strict=True)]
        entropies.append(-sum(logs) / size)
    pair = distillation * temperature / (len(exits) - 1)
    loss = entropies[-1] + inner * sum(entropies[:-1])
    gradients = []
    for i, own in enumerate(softened):
        weight = 1.0 if i == len(exits) - 1 else inner
        rows = []
        for b, label in enumerate(labels):
            row = []
            for c in range(4):
                slope = weight * (shares[i][b][c] - (c == label))
                for j, other in enumerate(softened):
                    if j != i:
                        p = own[b][c]
                        q = other[b][c]
                        slope += pair * (p - q)
                        loss += pair * temperature * q * math.log(q / p) / size
                row.append(slope / size)
            rows.append(row)
        gradients.append(rows)
    return {
        "id": "D1-exits",
        "inputs": {
            "logits": exits,
            "labels": labels,
            "temperature": temperature,
            "distillation": distillation,
            "inner": inner,
        },
        "expected": {"ce": entropies, "loss": loss, "grad": gradients},
    }


def d2() -> dict[str, Any]:
    """FedDyn of the paper's algorithm 1 with gradients g and h, on two blocks and two devices."""
    alpha, fleet = 0.25, 5
    model = {"shallow": [1.0, -2.0], "deep": [0.5]}
    start = {name: list(values) for name, values in model.items()}
    h = {name: [0.0] * len(values) for name, values in model.items()}
    g = {"a": {"shallow": [0.0, 0.0], "deep": [0.0]}, "b": {"shallow": [0.0, 0.0]}}
    rounds = [
        {"a": {"shallow": [1.5, -1.0], "deep": [1.0]}, "b": {"shallow": [0.25, -3.0]}},
        {"b": {"shallow": [2.0, 0.5]}},
        {"a": {"shallow": [0.75, 1.25], "deep": [-1.0]}},
    ]
    expected = []
    for trained in rounds:
        anchors: dict[str, Any] = {}
        changes: dict[str, list[list[float]]] = {}
        for device, values in trained.items():
            anchors[device] = {}
            for name, after in values.items():
                before, slope = model[name], g[device][name]
                anchors[device][name] = [w + s / alpha for w, s in zip(before, slope, strict=True)]
                change = [new - w for new, w in zip(after, before, strict=True)]
                g[device][name] = [s - alpha * d for s, d in zip(slope, change, strict=True)]
                changes.setdefault(name, []).append(change)
        for name, rows in changes.items():
            sums = [sum(column) for column in zip(*rows, strict=True)]
            h[name] = [b - alpha * d / fleet for b, d in zip(h[name], sums, strict=True)]
            model[name] = [
                w + d / len(rows) - b / alpha
                for w, d, b in zip(model[name], sums, h[name], strict=True)
            ]
        expected.append(
            {
                "anchors": anchors,
                "model": {name: list(values) for name, values in model.items()},
                "correction": {name: [b / alpha for b in values] for name, values in h.items()},
            }
        )
    memories = {
        device: {name: [s / alpha for s in values] for name, values in own.items()}
        for device, own in g.items()
    }
    return {
        "id": "D2-feddyn",
        "inputs": {"alpha": alpha, "fleet_devices": fleet, "start": start, "rounds": rounds},
        "expected": {"rounds": expected, "memories": memories},
    }


def other_numbers() -> list[dict[str, Any]]:
    """One entry of each kind that is computed here."""
    return [
        h1(), h2(), h3(), h6(), h8(), h9(), h10(), h11(), h12(),
        r_windows(down=False), r_windows(down=True), r4(), r5(), r6(), r8(),
        i1(), i2(), i3(), i4(),
        w1(), w1("sum_of_reciprocals"), w3(),
        f1(), f2(), f3(),
        d1(), d2(),
    ]  # fmt: skip

"""InclusiveFL with labels of its own for each depth, as in the paper's NER: three devices, three
heads, one encoder.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.onnx_runtime import open_graph
from broker_server.rounds.run_context import prepare_run
from broker_server.rounds.tier_models import open_model
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from broker_server.store import Store
from broker_server.strategies.strategy import PlanRequest
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.manifest import parameter_input
from models.plan import compile_plan, make_plan
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.text import Vocabulary
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run
from tests.fleet.named_entities import Scores, entity_scores
from tests.fleet.tagged import LABELS, names_in, read_sentences, tagged
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

ROUNDS = 5
DEPTHS = {"weak": 1, "medium": 2, "strong": 3}
LENGTH = 16
VOCAB = 1000
TRAIN = 500
TEST = 150
DATA = Path(os.environ.get("SHOAL_DATA") or Path(__file__).parents[3] / "shared" / "data")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DATA / "cola").is_dir(), reason="CoLA is not in SHOAL_DATA"),
]


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    """A broker and three agents, each with its own depth, sentences and label set."""
    folder = tmp_path_factory.mktemp("ward")
    sentences = read_sentences(DATA)
    names = names_in(sentences)
    words = Vocabulary.from_texts([" ".join(words) for words in sentences], VOCAB)
    order = np.random.default_rng(4).permutation(len(sentences))
    devices = []
    for number, (kind, labels) in enumerate(LABELS.items()):
        mine = [sentences[place] for place in order[number :: len(LABELS)]]
        for name, part in (("train", mine[:TRAIN]), ("test", mine[TRAIN : TRAIN + TEST])):
            x, y = tagged(part, labels, names, words, LENGTH)
            np.savez(folder / f"{kind}-{name}.npz", x=x, y=y)
        devices.append(LocalDevice(kind, folder / f"{kind}-train.npz", 1.0, max_depth=DEPTHS[kind]))
    architecture = Registry.zoo().get("token_classifier")
    settings = architecture.settings(
        {
            "input_shape": (LENGTH,),
            "classes": len(LABELS["strong"]),
            "vocab": len(words),
            "embed": 32,
            "heads": 2,
            "ffn": 64,
            "blocks": DEPTHS["strong"],
            "dropout": 0.0,
            "pretrained": False,
        }
    )
    layout = infer_layout(architecture, settings)
    tiers = {kind: layout.tier(1.0, depth) for kind, depth in DEPTHS.items()}
    export_architecture(
        ExportRequest(
            architecture,
            settings,
            tuple(tiers.values()),
            Recipe(Sgd(weight_decay=0.0)),
            heads={tiers[kind]: len(LABELS[kind]) for kind in ("weak", "medium")},
        ),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    with (
        mosquitto_broker(folder) as broker,
        LocalFleet(
            folder / "devices", fleet="ward", broker=broker.url, devices=devices, holdout=0.1
        ) as fleet,
    ):
        yield folder, broker.url, fleet, {kind: tier.id for kind, tier in tiers.items()}


@pytest.fixture
def trained(ward, tmp_path):
    """Does a run; gives what it told, the judgement of its last version, and F1 by kind."""
    folder, url, fleet, tiers = ward

    def go(inclusivefl, **tables):
        test = {kind: {"kind": "npz", "path": folder / f"{kind}-test.npz"} for kind in tiers}
        config = FleetConfig.model_validate(
            {
                "fleet": "ward",
                "store": tmp_path / "store",
                "broker": BrokerConfig(url=url),
                "model": ModelConfig(artifacts=folder / "artifacts", arch="token_classifier"),
                "round": {"rounds": ROUNDS, "min_devices": len(tiers), "nudge_seconds": 5.0},
                "train": TrainConfig(learning_rate=0.1, epochs=3, batch_size=16, mask_labels=False),
                "strategy": {"name": "inclusivefl", "inclusivefl": inclusivefl},
                "evaluation": {
                    "data": test["strong"],
                    "tiers": tuple(tiers.values()),
                    "tier_data": {tiers[kind]: test[kind] for kind in ("weak", "medium")},
                },
                **tables,
            }
        )
        watcher = Watcher()
        finished = run(config, watcher)
        fleet.check()
        assert finished.status == "finished", finished.error
        assert not watcher.events_of(control.UpdateRefused)
        return watcher, finished.evaluation, scores(config, finished.run, folder, tiers)

    return go


def scores(config, run_id, folder, tiers):
    """The entities that each device's next model finds in its test sentences, as seqeval counts
    them.
    """
    artifacts = load_artifacts(
        config.model.artifacts, config.model.arch, chunk_bytes=config.round.chunk_bytes
    )
    layout = artifacts.layout
    context = prepare_run(run_id, config, artifacts)
    store = Store(config.store, read_only=True)
    blobs = BlobStore(config.store / "blobs")
    version = store.version(run_id)
    store.close()
    found = {}
    for kind, tier_id in tiers.items():
        tier = artifacts.tiers[tier_id]
        request = PlanRequest(tier.tier, kind, version.number, config.seed)
        model = context.strategy.send(
            compile_plan(layout, make_plan(layout, tier.tier)), request, open_model(blobs, version)
        )
        with np.load(folder / f"{kind}-test.npz") as file:
            x = file["x"]
            y = file["y"]
        inputs = {parameter_input(name): value for name, value in model.items()}
        graph = open_graph(tier.folder / tier.manifest.graphs["onnx/infer"].path, threads=1)
        (logits,) = graph.run(None, {**inputs, "x": x})
        truth, guess = (
            [
                [LABELS[kind][label] for label in row[kept]]
                for row, kept in zip(labels, y >= 0, strict=True)
            ]
            for labels in (y, logits.argmax(-1))
        )
        found[kind] = sum(entity_scores(truth, guess).values(), Scores(0, 0, 0)).f1
    print({kind: round(f1, 3) for kind, f1 in found.items()})
    return found


def test_every_depth_learns_its_own_labels_on_a_shared_encoder(trained):
    """Three label sets of different sizes in one run; each depth finds entities that only its own
    device was taught.

    Untrained models have an F1 of at most 0.12.
    """
    watcher, evaluation, f1 = trained(
        {"beta": 0.5}, server_optimizer={"name": "fedadam", "learning_rate": 0.01, "beta1": 0.5}
    )
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        len(DEPTHS)
    ] * ROUNDS
    assert min(f1.values()) > 0.5
    # The share of words outside every entity is 0.93, 0.71 and 0.64.
    weak, medium, strong = (found.accuracy for found in evaluation.tiers.values())
    assert weak > 0.95
    assert medium > 0.8
    assert strong == evaluation.accuracy > 0.75


def test_alone_every_device_keeps_its_labels_too(trained):
    """The paper's baseline for NER: nothing is shared, and each device learns with its own head."""
    _, evaluation, f1 = trained({"baseline": "local"})
    assert min(f1.values()) > 0.5
    assert evaluation.accuracy < 0.7  # the global model is as it was

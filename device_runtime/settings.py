"""The device's configuration: one TOML file, frozen once read.

Relative paths are relative to that file.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from device_runtime.conditions import ConditionsConfig
from device_runtime.processor_share import thread_counts
from device_runtime.training.accelerators import Accelerators
from device_runtime.training.own_model_files import KEPT_RUNS
from fleet_protocol.configuration import read_toml, validate_config
from fleet_protocol.data.sources import DataConfig
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.member import Member
from fleet_protocol.own_code import require_own_code
from fleet_protocol.topics import NAME_PATTERN
from fleet_protocol.transport import BrokerAddress

if TYPE_CHECKING:
    from fleet_protocol.identity.papers import Membership

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(gt=0)]
ProviderName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9]+(:\d{1,3})?$"),
    AfterValidator(lambda name: name.replace("ExecutionProvider", "")),
]


def _switch(value: object) -> object:
    """Read ``true`` as a table of defaults, and ``false`` as none."""
    if not isinstance(value, bool):
        return value
    return {} if value else None


_SWITCH = BeforeValidator(_switch)


class TlsConfig(FrozenModel):
    """Files for a ``mqtts://`` broker.

    Attributes:
        ca_file: certificates to trust instead of the system's.
        cert_file: client certificate.
        key_file: its key.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class IdentityConfig(FrozenModel):
    """Who this board is in an enrolled fleet.

    Attributes:
        file: the enrolment that ``shoal enroll`` wrote; fleet, device and broker stand in it.
    """

    file: Path


class OwnModelConfig(FrozenModel):
    """A model of this board's own, which is trained beside the fleet's and never leaves it.

    Attributes:
        set: folder of a pair, exported for the fleet's model and this board's own.
        keep_runs: of so many runs the model is kept, the current one among them; older ones are
            removed.
    """

    set: Path
    keep_runs: int = Field(default=KEPT_RUNS, ge=1)


class RuntimeConfig(FrozenModel):
    """What computes the training steps, where the installed onnxruntime has more than the CPU.

    Attributes:
        providers: execution providers in the order in which they are tried, such as ``CUDA``, or
            ``CPU:4`` for four threads; one that is not there, fails, computes other numbers than
            the CPU with ``threads``, or is not faster, leaves the steps to the next, or to that.
        insist: use one although it is not faster.
    """

    providers: tuple[ProviderName, ...] = ()
    insist: bool = False


class PredictConfig(FrozenModel):
    """What predicts is kept beside the weights of every task.

    Programs may ask while the agent runs.

    Attributes:
        socket: where programs on the board connect; who may write to the file may ask.
        mqtt: whether who may steer the fleet's server may ask, too, over the fleet's broker.
        max_bytes: of a request at the socket.
        max_clients: that are served at a time; others wait. Over the broker so many may wait,
            others are refused.
        seconds: for a request to arrive, for its answer, and for the answer to be taken.
    """

    socket: Path | None = None
    mqtt: bool = False
    max_bytes: int = Field(default=2**20, ge=64)
    max_clients: int = Field(default=4, ge=1, le=64)
    seconds: Seconds = 60.0


class DeviceConfig(FrozenModel):
    """Everything an operator may set on a board.

    Attributes:
        fleet: name of the fleet.
        device: id of the device, unique in the fleet.
        broker: ``mqtt[s]://[user:password@]host[:port]``.
        state_dir: folder for the task record and the blobs; it is made.
        data: where the training data is.
        max_width: widest sub-model this board may be given, in (0, 1].
        max_depth: deepest, in blocks, or None for no limit.
        backend: ``onnx`` (portable step), ``ort-training``, or ``auto`` (the latter where it is
            installed).
        threads: threads of one training step; 0 takes every core, and ``auto`` as many as are
            fastest: the first task on a graph tries one, two and all that this process may use.
        holdout: share of the samples kept for evaluation instead of training.
        connect_timeout_seconds: how long to try the broker at start before giving up.
        retry_seconds: time between two announcements of a finished update that nobody acknowledges.
        repair_seconds: silence after which missing chunks are asked for again.
        max_cache_bytes: bound of the blobs kept between tasks.
        tls: certificate files.
        identity: of this board in an enrolled fleet; it then takes nothing that the fleet's server
            has not signed.
        insecure: without an identity, connect over a network although whoever reaches the broker
            can give this board graphs to run.
        own_model: the board's own model, for methods that train one beside the fleet's.
        conditions: when this board may train.
        runtime: what computes the training steps.
        predict: predictions on this board, ``true`` for `shoal device predict` alone.
        report_data: send the data findings to the fleet, as sentences with figures, and a digest of
            the labels that ``labels`` in ``[data]`` names; if false, they stay in this board's log
            and `shoal device doctor`.
        code: further folders whose Python functions the data may name, besides the folder of this
            file.
    """

    fleet: Name
    device: Name
    broker: str
    state_dir: Path
    data: DataConfig
    max_width: float = Field(default=1.0, gt=0, le=1)
    max_depth: int | None = Field(default=None, ge=1)
    backend: Literal["auto", "onnx", "ort-training"] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    holdout: float = Field(default=0.1, ge=0, lt=1)
    connect_timeout_seconds: Seconds = 30.0
    retry_seconds: Seconds = 5.0
    repair_seconds: Seconds = 2.0
    max_cache_bytes: int = Field(default=512 * 1024 * 1024, ge=0)
    tls: TlsConfig | None = None
    identity: IdentityConfig | None = None
    insecure: bool = False
    own_model: OwnModelConfig | None = None
    conditions: ConditionsConfig = ConditionsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    predict: Annotated[PredictConfig | None, _SWITCH] = None
    report_data: bool = True
    code: tuple[Path, ...] = ()

    @property
    def known_threads(self) -> int:
        """Threads of whatever no trial chooses them for; one with ``auto``."""
        return 1 if self.threads == "auto" else self.threads

    def accelerators(self) -> Accelerators | None:
        """Return what is tried beside one thread of the CPU; None for nothing."""
        threads = thread_counts() if self.threads == "auto" else ()
        if not self.runtime.providers and not threads:
            return None
        path = self.state_dir / "providers.json"
        return Accelerators(path, self.runtime.providers, self.runtime.insist, threads)

    def address(self) -> BrokerAddress:
        """Return the broker with its certificate files.

        Raises:
            ConfigError: the address has a wrong form, or certificate files go with a plain
                connection, or a network would carry everything in the open although nobody said
                that it may.
            StorageError: the certificates of an enrolment cannot be written out.
        """
        member = self.member()
        if member is not None:
            # An enrolment brings certificates and a login of its own.
            self._refuse_idle_settings()
            return member.enrolment.address(member.folder, self.broker)
        tls = self.tls or TlsConfig()
        address = BrokerAddress.parse(
            self.broker,
            ca_file=tls.ca_file,
            cert_file=tls.cert_file,
            key_file=tls.key_file,
        )
        if self.tls is not None and not address.tls:
            raise ConfigError(f"[tls] is set but broker {address} is not encrypted; write mqtts://")
        # Graphs come over this connection, and run on the data of this board.
        if not (address.tls or address.on_this_machine or self.insecure):
            raise ConfigError(
                f"broker {address} without an identity: whoever reaches it can run graphs on this "
                "board's data. Name the file of `shoal enroll` in [identity], or say "
                "insecure = true for a network that you trust"
            )
        return address

    def _refuse_idle_settings(self) -> None:
        """Refuse settings that an enrolment makes needless."""
        idle = ""
        if self.tls:
            idle = "[tls]"
        elif self.insecure:
            idle = "insecure"
        elif "@" in self.broker:
            idle = "the login in broker"
        if idle:
            raise ConfigError(f"{idle} has no effect beside [identity]; remove it")

    def member(self) -> Member | None:
        """Return this board in an enrolled fleet, None in one without identities.

        Raises:
            ConfigError: the enrolment cannot be read.
        """
        if self.identity is None:
            return None
        return Member(
            read_enrolment(self.identity.file),
            self.state_dir / "identity",
            remembers=True,
        )

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the files that say who this board is; `path` is that of the configuration."""
        return (path,) if self.identity is None else (path, self.identity.file)

    def shut_out(self) -> str:
        """Return what to do about an enrolment that counts no more; empty where it counts."""
        membership = self._membership()
        if membership is None or self.identity is None or not membership.is_revoked:
            return ""
        name = quote(membership.enrolment.name)
        return (
            f"the enrolment of {name} counts no more: it was revoked, or another one was made "
            f"since. Put the file of a new `shoal enroll {name}` in place of {self.identity.file}"
        )

    def _membership(self) -> "Membership | None":
        member = self.member()
        if member is None:
            return None
        # It needs cryptography, which takes memory that other tasks of a small board keep.
        from fleet_protocol.identity.papers import Membership  # noqa: PLC0415

        return Membership(member.enrolment, member.folder / "papers.json")

    def ended(self) -> str:
        """Return what to do about an enrolment whose days are over; empty where they are not."""
        papers = self._membership()
        if papers is None:
            return ""
        expires = papers.certificate.expires
        if not 0 < expires < time.time():  # 0 is for one without an end
            return ""
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
        renewing = f"`shoal renew {quote(papers.enrolment.name)}`"
        return f"the enrolment ended on {day}: its operator lets it go on with {renewing}"


def load_device_config(path: Path, enrolment: Path | None = None) -> DeviceConfig:
    """Read a device's configuration file.

    Args:
        path: the TOML file.
        enrolment: the board's, instead of the one that the file names.

    Raises:
        ConfigError: the file cannot be read or its content is wrong, or differs from the
            enrolment's.
    """
    folder = path.resolve().parent
    document = read_toml(path)
    if enrolment is not None:
        document["identity"] = {"file": str(enrolment.resolve())}
    else:
        enrolment = _named_enrolment(document, folder)
    if enrolment is not None:
        _fill_in(document, enrolment, path)
    config = validate_config(
        document,
        DeviceConfig,
        source=str(path),
        written=True,
    )
    config = config.resolved(folder)
    require_own_code(config, path, config.code)
    # Now, so that a wrong one is found before the agent starts.
    config.address()  # raises where it is wrong
    return config


def _named_enrolment(document: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the enrolment that a configuration names, if it names one in a form that can be read.

    What is wrong with its form, the validation says.
    """
    identity = document.get("identity")
    if isinstance(identity, dict) and isinstance(identity.get("file"), str):
        return folder / str(identity["file"])
    return None


def _fill_in(document: dict[str, Any], enrolment: Path, path: Path) -> None:
    """Fill in what an enrolment says; a ConfigError where the configuration says otherwise.

    The broker may be named by another address.
    """
    member = read_enrolment(enrolment, "device")
    values = {"fleet": member.fleet, "device": member.name, "broker": member.broker}
    for key, value in values.items():
        configured = document.setdefault(key, value)
        if configured != value and key != "broker":
            raise ConfigError(
                f"{path}: {key} is {configured!r}, and in the enrolment {enrolment} {value!r}"
            )

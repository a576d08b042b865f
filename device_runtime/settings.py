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
from device_runtime.training.kept_outputs import FOLDER, KeptOutputs
from device_runtime.training.own_model_files import KEPT_RUNS
from fleet_protocol.byte_counts import ByteCount
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
Confidence = Annotated[float, Field(gt=0, le=1)]
ProviderName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9]+(:\d{1,3})?$"),
    AfterValidator(lambda name: name.replace("ExecutionProvider", "")),
]


def _switch(value: object) -> object:
    """Read ``true`` as a table of defaults, and ``false`` as no table."""
    if not isinstance(value, bool):
        return value
    return {} if value else None


_SWITCH = BeforeValidator(_switch)


class TlsConfig(FrozenModel):
    """TLS files for a ``mqtts://`` broker.

    Attributes:
        ca_file: file with the certificates to trust instead of the system's.
        cert_file: file with the client certificate.
        key_file: file with the private key of the client certificate.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class IdentityConfig(FrozenModel):
    """The board's identity in an enrolled fleet.

    Attributes:
        file: the enrolment file that `shoal enroll` wrote; it sets the fleet, the device and the
            broker.
    """

    file: Path


class OwnModelConfig(FrozenModel):
    """The board's own model, which is trained beside the fleet's and never leaves the board.

    Attributes:
        set: folder of the exported set in which the fleet's model and the board's own model are
            trained together.
        keep_runs: number of runs, including the current one, for which the board keeps its own
            model; the models of older runs are removed.
    """

    set: Path
    keep_runs: int = Field(default=KEPT_RUNS, ge=1)


class RuntimeConfig(FrozenModel):
    """Execution providers for training steps, if the installed onnxruntime has more than the CPU.

    Attributes:
        providers: execution providers in the order in which the agent tries them, such as ``CUDA``,
            or ``CPU:4`` for four threads. The agent tries the next one if a provider is missing,
            fails, computes numbers that differ from the CPU's, or is not faster than the CPU with
            ``threads`` threads. If no provider qualifies, the agent uses the CPU.
        insist: use a provider even if it is not faster than the CPU.
    """

    providers: tuple[ProviderName, ...] = ()
    insist: bool = False


class PredictConfig(FrozenModel):
    """Predictions on this board; the graphs that predict are kept beside the weights of every task.

    Programs may send requests while the agent runs.

    Attributes:
        socket: path of the socket to which programs on the board connect; every program that can
            write to the socket may send requests.
        mqtt: whether clients that may control the fleet's server may also send requests over the
            fleet's broker.
        max_bytes: maximum size of a request on the socket, in bytes.
        max_clients: maximum number of clients that the socket serves at the same time; other
            clients wait. Over the broker, up to this number of requests can wait; further requests
            are refused.
        confidence: in a model with exits, stop at the first exit whose largest probability
            (softmax) is at least this number. With None, every sample passes through the whole
            model.
        seconds: seconds allowed for each step: receiving a request, computing the answer, and
            sending it to the client.
    """

    socket: Path | None = None
    mqtt: bool = False
    max_bytes: int = Field(default=2**20, ge=64)
    max_clients: int = Field(default=4, ge=1, le=64)
    confidence: Confidence | None = None
    seconds: Seconds = 60.0


class DeviceConfig(FrozenModel):
    """All settings of a board.

    Attributes:
        fleet: name of the fleet.
        device: id of the device, unique in the fleet.
        broker: address of the broker: ``mqtt[s]://[user:password@]host[:port]``.
        state_dir: folder for the task record and the blobs; the agent creates it if it is missing.
        data: where the training data is.
        max_width: width of the widest sub-model that this board may train, in (0, 1].
        max_depth: depth of the deepest sub-model that this board may train, in blocks; None for no
            limit.
        backend: training backend: ``onnx`` (portable step), ``ort-training``, or ``auto``
            (``ort-training`` if it is installed, otherwise ``onnx``).
        threads: number of threads of one training step. 0 uses every core. ``auto`` uses the
            fastest number, which the agent finds at the first task that uses a graph: it tries one
            thread, two threads, and as many as this process may use.
        holdout: share of the board's samples that is held out for evaluation.
        connect_timeout_seconds: seconds for which the agent tries to reach the broker at startup
            before it gives up.
        retry_seconds: seconds between two announcements of a finished update that the server has
            not acknowledged.
        repair_seconds: seconds without a chunk after which the agent requests the missing chunks
            again.
        max_cache_bytes: maximum total size, in bytes, of the blobs that the agent keeps between
            tasks.
        cache: maximum size of the stored outputs of frozen layers, such as ``"2 GB"`` or a number
            of bytes; 0 stores nothing. With stored outputs, the frozen layers run once for this
            board's samples instead of in every pass. The cache is used only on the CPU, only for a
            tier that trains a share of its blocks, and only if samples are not changed at random.
        tls: certificate files.
        identity: identity of this board in an enrolled fleet; the board then accepts only what the
            fleet's server has signed.
        insecure: allow a network connection without an identity. Anyone who reaches the broker can
            then send this board graphs to run.
        own_model: the board's own model, for methods that train one beside the fleet's.
        conditions: when this board may train.
        runtime: execution providers for training steps.
        predict: predictions on this board; ``true`` enables only `shoal device predict`.
        report_data: whether to send the server the findings about the board's data, as sentences
            with figures, and a digest of the list ``labels`` in ``[data]``. If false, the findings
            appear only in this board's log and in `shoal device doctor`.
        code: folders, in addition to this file's folder, with Python functions that the data
            settings can name.
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
    cache: ByteCount = 0
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
        """Threads for work without a trial; one with ``auto``."""
        return 1 if self.threads == "auto" else self.threads

    def accelerators(self) -> Accelerators | None:
        """Return what to try besides one thread of the CPU; None for nothing."""
        threads = thread_counts() if self.threads == "auto" else ()
        if not self.runtime.providers and not threads:
            return None
        path = self.state_dir / "providers.json"
        return Accelerators(path, self.runtime.providers, self.runtime.insist, threads)

    def kept_outputs(self) -> KeptOutputs | None:
        """Return where outputs of frozen layers are kept; None for nowhere."""
        # A provider with its own memory would copy the frozen layers there in every step.
        is_on_cpu = all(name.startswith("CPU") for name in self.runtime.providers)
        if not self.cache or not is_on_cpu:
            return None
        return KeptOutputs(self.state_dir / FOLDER, self.cache)

    def address(self) -> BrokerAddress:
        """Return the broker with its certificate files.

        Raises:
            ConfigError: the address is malformed, certificate files are set for a plain connection,
                or the connection would be unencrypted although the settings do not allow that.
            StorageError: the certificates of an enrolment cannot be written out.
        """
        member = self.member()
        if member is not None:
            # An enrolment includes certificates and a login.
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
        # Graphs arrive over this connection, and run on the data of this board.
        if not (address.tls or address.on_this_machine or self.insecure):
            raise ConfigError(
                f"broker {address} without an identity: anyone who can reach it can run graphs on "
                "this board's data. Name the file of `shoal enroll` in [identity], or set "
                "insecure = true for a network that you trust"
            )
        return address

    def _refuse_idle_settings(self) -> None:
        """Refuse settings that an enrolment replaces."""
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
        """Return this board as a fleet member; None if the fleet has no identities.

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
        """Return the files that define the board's identity; `path` is the configuration's."""
        return (path,) if self.identity is None else (path, self.identity.file)

    def shut_out(self) -> str:
        """Return what to do about an enrolment that is no longer valid; empty if it is valid."""
        membership = self._membership()
        if membership is None or self.identity is None or not membership.is_revoked:
            return ""
        name = quote(membership.enrolment.name)
        return (
            f"the enrolment of {name} is no longer valid: it was revoked, or replaced by a "
            f"newer one. Put the file of a new `shoal enroll {name}` in place of "
            f"{self.identity.file}"
        )

    def _membership(self) -> "Membership | None":
        member = self.member()
        if member is None:
            return None
        # It needs cryptography, whose memory small boards need for other tasks.
        from fleet_protocol.identity.papers import Membership  # noqa: PLC0415

        return Membership(member.enrolment, member.folder / "papers.json")

    def ended(self) -> str:
        """Return what to do about an expired enrolment; empty if it has not expired."""
        papers = self._membership()
        if papers is None:
            return ""
        expires = papers.certificate.expires
        if not 0 < expires < time.time():  # 0 means that it never expires
            return ""
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
        renewing = f"`shoal renew {quote(papers.enrolment.name)}`"
        return f"the enrolment expired on {day}: its operator can renew it with {renewing}"


def load_device_config(path: Path, enrolment: Path | None = None) -> DeviceConfig:
    """Read a device's configuration file.

    Args:
        path: the TOML file.
        enrolment: the board's enrolment, instead of the one that the file names.

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
    # Read now, so that an error is found before the agent starts.
    config.address()  # raises if it is wrong
    return config


def _named_enrolment(document: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the enrolment that a configuration names, if it names one in a form that can be read.

    Validation reports errors of its form.
    """
    identity = document.get("identity")
    if isinstance(identity, dict) and isinstance(identity.get("file"), str):
        return folder / str(identity["file"])
    return None


def _fill_in(document: dict[str, Any], enrolment: Path, path: Path) -> None:
    """Add the values of an enrolment; raise ConfigError if the configuration contradicts them.

    The broker may have a different address in the configuration.
    """
    member = read_enrolment(enrolment, "device")
    values = {"fleet": member.fleet, "device": member.name, "broker": member.broker}
    for key, value in values.items():
        configured = document.setdefault(key, value)
        if configured != value and key != "broker":
            raise ConfigError(
                f"{path}: {key} is {configured!r}, but the enrolment {enrolment} has {value!r}"
            )

"""The certificate files of a connection over TLS."""

import paho.mqtt.client as paho

from fleet_protocol.errors import ConfigError
from fleet_protocol.transport import BrokerAddress


def set_certificates(client: paho.Client, address: BrokerAddress) -> None:
    """Have a client encrypt, with the certificate files of an address.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = (address.ca_file, address.cert_file, address.key_file)
    try:
        ca, cert, key = (str(file) if file else None for file in files)
        client.tls_set(ca_certs=ca, certfile=cert, keyfile=key)
    except (OSError, ValueError) as error:
        names = ", ".join(str(file) for file in files if file)
        raise ConfigError(
            f"cannot use the certificate files {names} for {address}: {error}"
        ) from error

"""Connections to a broker over TLS, which are closed if their handshake fails."""

import ssl

from typing_extensions import override

from fleet_protocol.errors import ConfigError
from fleet_protocol.transport import BrokerAddress


class _TlsSocket(ssl.SSLSocket):
    """A connection that is closed if its handshake fails.

    paho leaves it to the garbage collector, which warns of an open socket.
    """

    @override
    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (OSError, ValueError):
            self.close()
            raise


def refuse_passphrase() -> str:
    """Raise an error for a key with a passphrase; OpenSSL would wait for it at the terminal."""
    raise ValueError("the key has a passphrase; write it without one")


def tls_context(address: BrokerAddress) -> ssl.SSLContext:
    """Return how to encrypt a connection and verify the broker's certificate.

    Raises:
        ConfigError: the address names certificate files that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = _TlsSocket
    try:
        if address.ca_file is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(address.ca_file)
        if address.cert_file is not None:
            context.load_cert_chain(address.cert_file, address.key_file, refuse_passphrase)
    except (OSError, ValueError) as error:
        files = (address.ca_file, address.cert_file, address.key_file)
        names = ", ".join(str(file) for file in files if file)
        raise ConfigError(
            f"cannot use the certificate files {names} for {address}: {error}"
        ) from error
    return context

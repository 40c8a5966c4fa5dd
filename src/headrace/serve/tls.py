"""The certificate of the server, read at the start. Knows files and OpenSSL."""

from __future__ import annotations

import os
import ssl
from typing import NoReturn

from headrace.errors import OptionError
from headrace.serve.options import ServerOptions


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """For TLS 1.2 and later; None where nothing is to be encrypted. OptionError names the file that cannot be used."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    cert, key = os.path.expanduser(options.tls_cert), os.path.expanduser(options.tls_key)
    for name, file in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise OptionError(f"{name} {file} cannot be read: {error.strerror}", name) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def ask() -> NoReturn:
        raise OptionError(f"tls_key {key} is encrypted: give one without a passphrase", "tls_key")

    try:
        context.load_cert_chain(cert, key, ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OptionError(
                f"tls_key {key} is not the key of the certificate in tls_cert {cert}", "tls_key"
            ) from None
        raise _which(cert, key) from None
    return context


def _which(cert: str, key: str) -> OptionError:
    """Which of the two files it is that OpenSSL does not take."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except ssl.SSLError:
        return OptionError(f"tls_cert {cert} holds no certificate in PEM form", "tls_cert")
    return OptionError(f"tls_key {key} holds no private key in PEM form", "tls_key")

"""Certificates of a server that is loaded, and what went wrong with a connection, in words.

The same context serves the questions before a run (httpx) and the requests of the run (loadgen/wire.py), so both trust
the same authorities: those of the system, of SSL_CERT_FILE, or of one file.
"""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Iterator

from policies.text import SpecError

NO_DESCRIPTOR = "no file descriptor left for another stream: raise `ulimit -n` or use --processes"


def tls_context(cacert: str | None = None, *, insecure: bool = False) -> ssl.SSLContext:
    """Checks the server's certificate and name unless `insecure`. Raises SpecError for a file that holds no certificate."""
    try:
        context = ssl.create_default_context(cafile=cacert)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"got --cacert {cacert}: {error.strerror or error}; expected a file of PEM certificates") from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def reason(error: BaseException) -> str:
    """Why a connection failed, one line: the error at the bottom of the chain, certificates by name."""
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the server's certificate is not trusted: {cause.verify_message}; --cacert FILE names its authority, --insecure accepts it"
            )
        if isinstance(cause, ssl.SSLError):
            return f"the TLS handshake failed: {cause.reason or cause}; does the server speak https?"
    numbers = [cause.errno for cause in chain if isinstance(cause, OSError) and cause.errno is not None]
    if errno.EMFILE in numbers:
        return NO_DESCRIPTOR
    if numbers and numbers[-1] > 0:
        return os.strerror(numbers[-1]).lower()
    return str(error) or type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            yield from _chain(error.exceptions[0])
        error = error.__cause__ or error.__context__

"""How commands reach a server: its URL, its certificate, the admin key that a gateway on this
machine made for one run, and the reason of a failed connection.

No command reads HTTP_PROXY and its like: a delay that is measured through a proxy is the proxy's
too.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kendall.policies.text import SpecError, counted

NO_DESCRIPTOR = "no file descriptor left for another stream: raise `ulimit -n` or use --processes"
NOT_TRUSTED = "the server's certificate is not trusted"
NO_TLS = "the TLS handshake failed"


def server_root(url: str) -> str:
    """The URL that `/v1/...`, `/admin/...` and `/health` are appended to: with or without `/v1` and
    a slash at its end.

    >>> server_root("http://gateway:8080/v1/")
    'http://gateway:8080'
    >>> server_root("https://host/llm/v1")
    'https://host/llm'
    """
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address, or `localhost`."""
    if host == "localhost":
        return True
    if (address := address_of(host)) is None:
        return False
    mapped: ipaddress.IPv4Address | None = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def checked_host(host: str, advice: str = "") -> str:
    """Without the brackets of an IPv6 address. Raises SpecError for what is no host: a URL, or
    one with a port; `advice` about URLs.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if re.fullmatch(r"[\w.-]+", host) or address_of(bare) is not None:
        return bare
    told = "; --port takes the port" if re.fullmatch(r"[^/:]+:\d+", host) else advice
    raise SpecError(f"got --host {host or repr('')}; expected a host name or address{told}")


def host_url(host: str, port: int) -> str:
    """The URL of a server by its host and port. Raises SpecError.

    >>> host_url("::1", 81)
    'http://[::1]:81'
    """
    checked = checked_host(host, "; --base-url takes a URL")
    return f"http://[{checked}]:{port}" if ":" in checked else f"http://{checked}:{port}"


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_no_credentials(url: str, name: str) -> None:
    """Raises SpecError: a password would end in files and logs; the message does not repeat it.
    Nor may it be no URL at all.
    """
    try:
        netloc = urlsplit(url).netloc
    except ValueError as error:
        raise SpecError(f"got {name} {url!r}: {error}; expected http://HOST:PORT") from None
    if not url.isprintable():
        raise SpecError(f"got {name} {url!r}; expected http://HOST:PORT without control characters")
    if "@" in netloc:
        raise SpecError(
            f"got {name} with a user name or password; expected http://HOST:PORT, with --api-key "
            "KEY for a key"
        )


def check_key(key: str | None, option: str) -> None:
    """Raises SpecError for a key that no header can carry; the message does not repeat it. None
    and an empty one are no key.
    """
    if key and (" " in key or not (key.isascii() and key.isprintable())):
        raise SpecError(
            f"got {option} with a key of {counted(len(key), 'character')}; expected printable "
            "ASCII without spaces or line ends"
        )


def tls_context(cacert: str | None = None, *, insecure: bool = False) -> ssl.SSLContext:
    """Trusts the authorities of a file, else those of SSL_CERT_FILE or the system. Raises
    SpecError for a file without certificates.
    """
    try:
        context = ssl.create_default_context(cafile=cacert)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(
            f"got --cacert {cacert}: {error.strerror or error}; expected a file of PEM certificates"
        ) from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


REFUSED = (401, 403)  # statuses of a server that does not take the key, or wants one


def key_refusal(where: str, status: int, message: str, option: str) -> str:
    """One line for a refused key: what the server got, and which option gives another key; its
    own advice is for other clients.
    """
    got, told, _ = message.partition("; expected ")
    if status == 401 or not told:
        return f"{where} answered {status}: {got}; expected {option} with a key that it accepts"
    return f"{where} answered {status}: {message}"


@dataclass(frozen=True, slots=True)
class Trust:
    """The certificates that a command accepts. Raises SpecError."""

    cacert: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.insecure and self.cacert is not None:
            raise SpecError(f"got --insecure with --cacert {self.cacert}; expected one of them")

    def verification(self, url: str) -> ssl.SSLContext | bool:
        """The `verify` of httpx: the context of a URL with TLS; without TLS there is nothing to
        verify. Raises SpecError.
        """
        if not url.lower().startswith("https:"):
            return False
        return tls_context(
            None if self.cacert is None else str(self.cacert), insecure=self.insecure
        )


SYSTEM = Trust()
A_GATEWAY = "expected the URL of a running `kendall serve`, for example http://127.0.0.1:8080"
CACERT = (
    "PEM file of the authorities that may have signed the server's certificate. Default: the "
    "system's."
)
INSECURE = "Accept any TLS certificate of the server."


def reason(error: BaseException) -> str:
    """Why a connection failed, one line: the error at the bottom of the chain, certificates by
    name.
    """
    chain = list(_chain(error))
    for cause in chain:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"{NOT_TRUSTED}: {cause.verify_message}; --cacert FILE names its authority, "
                "--insecure accepts any"
            )
        if isinstance(cause, ssl.SSLError):
            return f"{NO_TLS}: {cause.reason or cause}; does the server speak https?"
    numbers = [
        cause.errno for cause in chain if isinstance(cause, OSError) and cause.errno is not None
    ]
    if errno.EMFILE in numbers:
        return NO_DESCRIPTOR
    if numbers and numbers[-1] > 0:
        return os.strerror(numbers[-1]).lower()
    if names := [
        cause.strerror for cause in chain if isinstance(cause, socket.gaierror) and cause.strerror
    ]:
        return names[-1].lower()
    return str(error) or type(error).__name__


def unanswered(error: BaseException, url: str) -> str:
    """Why a request was not answered: a server that speaks TLS drops what is no TLS."""
    # httpx's
    dropped = type(error).__name__ == "RemoteProtocolError" and url.lower().startswith("http:")
    return "it closed the connection; does it speak https?" if dropped else reason(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            yield from _chain(error.exceptions[0])
        error = error.__cause__ or error.__context__


_PORTS = {"http": 80, "https": 443}


def key_file(port: int) -> Path:
    """The file of the gateway on this port: in XDG_RUNTIME_DIR, else in the user's cache. Raises
    RuntimeError without a home.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    cache = os.environ.get("XDG_CACHE_HOME")
    usable = runtime.is_dir() and os.access(runtime, os.W_OK)
    folder = runtime if usable else Path(cache) if cache else Path.home() / ".cache"
    return folder / "kendall" / f"admin-key-{port}"


def local_admin_key(url: str) -> str | None:
    """The key for a gateway of this user on this machine; None where there is no such file, or
    where others can read it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
        if parts.hostname is None or not is_loopback(parts.hostname):
            return None
        with key_file(port).open(encoding="ascii") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                return None
            return file.read().strip() or None
    except (OSError, RuntimeError, ValueError):
        return None


def key_for_admin(url: str, admin_key: str | None, api_key: str | None = None) -> str | None:
    """The key of a call to `/admin`: the admin key that was given, else the one that the gateway
    made, else an API key.

    Raises SpecError for a key that cannot be sent.
    """
    check_key(admin_key, "--admin-key")
    check_key(api_key, "--api-key")
    return admin_key or local_admin_key(url) or api_key

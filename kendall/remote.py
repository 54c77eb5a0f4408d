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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kendall.options import option
from kendall.policies.text import SpecError, counted

NO_DESCRIPTOR = "no file descriptor left for another stream: raise `ulimit -n` or use --processes"
NOT_TRUSTED = "the server's certificate is not trusted"
NO_TLS = "the TLS handshake failed"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def server_root(url: str) -> str:
    """The URL to which `/v1/...`, `/admin/...` and `/health` are appended; `url` may end in `/v1`,
    a slash or both.

    >>> server_root("http://gateway:8080/v1/")
    'http://gateway:8080'
    >>> server_root("https://host/llm/v1")
    'https://host/llm'
    """
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether the host is `localhost` or an address that only this machine reaches."""
    if host == "localhost":
        return True
    if (address := address_of(host)) is None:
        return False
    mapped: ipaddress.IPv4Address | None = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def checked_host(host: str, advice: str = "") -> str:
    """The host, without the brackets of an IPv6 address. Raises SpecError for what is not a host,
    such as a URL or a host with a port; `advice` ends the message, unless it is about the port.
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
    """The host as an IP address; None where it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_no_credentials(url: str, name: str) -> None:
    """Raises SpecError for a URL with a user name or password, which would end in files and logs,
    and for one that cannot be parsed or has control characters. What may hold a password is not
    repeated.
    """
    shown = f"{name} {url!r}" if "@" not in url else f"{name} with an @"
    try:
        netloc = urlsplit(url).netloc
    except ValueError as error:
        why = "" if "@" in url else f": {error}"
        raise SpecError(f"got {shown}{why}; expected http://HOST:PORT") from None
    if not url.isprintable():
        raise SpecError(f"got {shown}; expected http://HOST:PORT without control characters")
    if "@" in netloc:
        raise SpecError(
            f"got {name} with a user name or password; expected http://HOST:PORT, with --api-key "
            "KEY for a key"
        )


def check_key(key: str | None, option: str) -> None:
    """Raises SpecError for a key that no header can carry, without repeating it. None and the empty
    text pass: they mean that there is no key.
    """
    if key and (" " in key or not (key.isascii() and key.isprintable())):
        raise SpecError(
            f"got {option} with a key of {counted(len(key), 'character')}; expected printable "
            "ASCII without spaces or line ends"
        )


REFUSED = (401, 403)  # statuses of a server that does not take the key, or wants one


def key_refusal(where: str, status: int, message: str, option: str) -> str:
    """One line for a call that the server refused because of its key. After a 401 the server's
    advice, which is for other clients, is replaced by the option that gives another key; after
    another status it stays.
    """
    got, told, _ = message.partition("; expected ")
    if status == 401 or not told:
        return f"{where} answered {status}: {got}; expected {option} with a key that it accepts"
    return f"{where} answered {status}: {message}"


def parse_headers(
    texts: Sequence[str], own: frozenset[str] = frozenset()
) -> tuple[tuple[str, str], ...]:
    """`["x-tenant: blue"]`, none of them in `own`; no message repeats a value, which may be a key.
    Raises SpecError.
    """
    headers: dict[str, str] = {}
    for text in texts:
        name, colon, value = (part.strip() for part in text.partition(":"))
        shown = f"--header {name}" if colon else "--header without a colon"
        if not colon or not _HEADER_NAME.fullmatch(name):
            raise SpecError(f"got {shown}; expected NAME:VALUE, for example x-tenant:blue")
        if not value.isprintable() or not value.isascii():
            raise SpecError(
                f"got {shown} with a value of other characters; expected printable ASCII"
            )
        if name.lower() in own:
            raise SpecError(f"got {shown}; expected a header that the request does not set itself")
        if name.lower() in headers:
            raise SpecError(f"got {shown} twice; expected it once")
        headers[name.lower()] = value
    return tuple(headers.items())


@dataclass(frozen=True, slots=True)
class Trust:
    """Which certificates a command accepts. Raises SpecError where both fields are given."""

    cacert: Path | None = option(
        "",
        (
            "PEM file of the authorities that may have signed the server's certificate. Default: "
            "the system's."
        ),
    )
    insecure: bool = option(
        "", "Accept any TLS certificate of the server.", "--insecure", default=False
    )

    def __post_init__(self) -> None:
        if self.insecure and self.cacert is not None:
            raise SpecError(f"got --insecure with --cacert {self.cacert}; expected one of them")

    def context(self) -> ssl.SSLContext:
        """A TLS context that trusts the authorities of the file, else those of SSL_CERT_FILE or
        the system. Raises SpecError for a file without certificates.
        """
        try:
            context = ssl.create_default_context(cafile=self.cacert)
        except (OSError, ssl.SSLError) as error:
            raise SpecError(
                f"got --cacert {self.cacert}: {error.strerror or error}; expected a file of PEM "
                "certificates"
            ) from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def verification(self, url: str) -> ssl.SSLContext | bool:
        """The `verify` of httpx: the context of a URL with TLS; without TLS there is nothing to
        verify. Raises SpecError.
        """
        return self.context() if url.lower().startswith("https:") else False


SYSTEM = Trust()
A_GATEWAY = "expected the URL of a running `kendall serve`, for example http://127.0.0.1:8080"


def reason(error: BaseException) -> str:
    """Why a connection failed, in one line. An untrusted certificate, a failed TLS handshake and a
    lack of file descriptors have words of their own; else it is the operating system's word for the
    last error in the chain of causes.
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
    """Why a request was not answered, in one line. A server that speaks TLS closes a connection on
    which the client does not: there the line asks about https.
    """
    # httpx's error, by its name: httpx is not imported here
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
    """The file with the admin key that the gateway on this port made: in XDG_RUNTIME_DIR if it is
    writable, else in the user's cache. Raises RuntimeError where there is no home directory.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    cache = os.environ.get("XDG_CACHE_HOME")
    usable = runtime.is_dir() and os.access(runtime, os.W_OK)
    folder = runtime if usable else Path(cache) if cache else Path.home() / ".cache"
    return folder / "kendall" / f"admin-key-{port}"


def local_admin_key(url: str) -> str | None:
    """The admin key that a gateway of this user made on this machine. None where the URL is not of
    this machine, where there is no such file, or where it is another user's or others have access.
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
    """The key for a call to `/admin`: the admin key that was given, else the one that a gateway on
    this machine made, else the API key.

    Raises SpecError for a key that cannot be sent.
    """
    check_key(admin_key, "--admin-key")
    check_key(api_key, "--api-key")
    return admin_key or local_admin_key(url) or api_key


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAccess:
    """How a command reaches `/admin` of a running gateway."""

    admin_key: str | None = option(
        "", "Key for a gateway with --admin-key; overrides --api-key.", secret=True
    )
    trust: Trust = field(default_factory=Trust)

    def key(self, url: str, api_key: str | None) -> str | None:
        """The key for a call to this URL. Raises SpecError for one that cannot be sent."""
        return key_for_admin(url, self.admin_key, api_key)

"""Base URLs as people write them: with or without `/v1`, with or without a slash at the end."""

from __future__ import annotations


def server_root(url: str) -> str:
    """The URL that `/v1/...`, `/admin/...` and `/health` are appended to.

    >>> server_root("http://gateway:8080/v1/")
    'http://gateway:8080'
    >>> server_root("https://host/llm/v1")
    'https://host/llm'
    """
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
